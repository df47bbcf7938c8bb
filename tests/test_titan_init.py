"""Initial weights by name: the same values on every mesh, and nothing else touched."""

import functools
import hashlib

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks
from torchtitan_dmuon.seeding import stream_seed
from torchtitan_dmuon.titan import initialization, platform

platform.prepare()

from torchtitan.models.llama3 import model_registry as llama3  # noqa: E402
from torchtitan.models.qwen3 import model_registry as qwen3  # noqa: E402

NORMAL = functools.partial(torch.nn.init.normal_, std=0.02)
FP32 = {"dtype": torch.float32, "device": "cpu"}


def _initialized(spec, mesh_shape, seed=7, layers=None):
    """Full values by name after the named init under FSDP2 on this mesh; () is one process."""
    with torch.device("meta"):
        model = spec.model.build()
    if layers is not None:
        for name in list(model.layers)[layers:]:
            del model.layers[name]
    if mesh_shape:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(mesh_shape) :])
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    initialization.install_named_init(model, seed)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():  # nothing may be left over from uninitialized memory
            param.fill_(float("nan"))
        model.init_weights(buffer_device=None)
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}


def _digests(rank, world, mesh_shapes):
    """Per mesh: a digest of every parameter's bits, by name."""
    torch.set_num_threads(1)
    jobs = [_initialized(llama3("debugmodel"), shape, layers=1) for shape in mesh_shapes]
    return [{n: hashlib.sha256(v.detach().numpy().tobytes()).hexdigest() for n, v in values.items()} for values in jobs]


@pytest.mark.parametrize(("world", "mesh_shapes"), [(3, [(3,)]), (4, [(2, 2), (4,)])])
def test_llama3_starts_from_the_same_weights_on_every_mesh(world, mesh_shapes):
    [expected] = _digests(0, 1, [()])
    assert len(expected) > 8
    for per_mesh in run_ranks(_digests, world, mesh_shapes):
        assert per_mesh == [expected] * len(mesh_shapes)


def test_distributions_are_torchtitans_own():
    values = _initialized(llama3("debugmodel"), (), layers=1)
    assert values["norm.weight"].eq(1).all()
    wqkv = values["layers.0.attention.qkv_linear.wqkv.weight"]
    assert wqkv.std() == pytest.approx(0.02, rel=0.05)
    assert values["tok_embeddings.weight"].std() == pytest.approx(1.0, rel=0.05)


def test_streams_differ_by_name_index_and_seed():
    assert stream_seed(1, "a", 0) == stream_seed(1, "a", 0)
    seeds = [stream_seed(s, n, i) for s in (1, 12) for n in ("a", "b") for i in (0, 1, 2)]
    seeds.append(stream_seed(1, "2\na"))  # the parts of a key do not run into each other unnoticed
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Written down, so that saved seeds keep their meaning.
    assert stream_seed(0, "layers.0.w.weight", 3) == 5976883534545731117


def test_equal_shapes_get_different_values():
    values = _initialized(llama3("debugmodel"), (), layers=2)
    first, second = (values[f"layers.{i}.attention.wo.weight"] for i in (0, 1))
    assert not torch.allclose(first / first.std(), second / second.std(), atol=0.5)


def test_expert_slices_are_drawn_alone():
    whole = initialization.draw(NORMAL, "e", 3, (4, 16, 24), **FP32)
    part = initialization.draw_rows(NORMAL, "e", 3, (4, 16, 24), 1, 3, **FP32)
    assert torch.equal(part, whole[1:3])
    assert not torch.equal(whole[0], whole[1])


def test_rows_of_an_init_that_sees_the_shape_come_from_the_whole():
    init = torch.nn.init.xavier_normal_
    assert not initialization.is_elementwise(init)
    whole = initialization.draw(init, "w", 3, (4, 16, 24), **FP32)
    assert torch.equal(initialization.draw_rows(init, "w", 3, (4, 16, 24), 1, 3, **FP32), whole[1:3])


def test_drawing_leaves_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    initialization.draw(NORMAL, "w", 3, (8, 8), **FP32)
    assert torch.equal(torch.rand(3), expected)


def test_tied_weights_stay_tied_and_are_drawn_once():
    values = _initialized(qwen3("debugmodel"), (), layers=1)
    assert ("tok_embeddings.weight" in values) != ("lm_head.weight" in values)  # one parameter, listed once
    assert all(value.isfinite().all() for value in values.values())


def test_modules_with_torchs_own_reset_are_seeded_by_name():
    from torchtitan.protocols.module import Module

    class Conv(torch.nn.Conv2d, Module):
        pass

    def value(noise):
        torch.manual_seed(noise)
        model = torch.nn.Sequential(Conv(3, 4, 2))
        initialization.install_named_init(model, 7)
        model[0].init_states()
        return model[0].weight.detach().clone(), model[0].bias.detach().clone()

    (w1, b1), (w2, b2) = value(1), value(2)
    assert torch.equal(w1, w2) and torch.equal(b1, b2)
