"""State through DCP without TorchTitan: whole parameters and stacks, resumed on the same and on other meshes."""

import functools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchtitan_dmuon as dmuon
from tests import toy
from tests.parity_table import RIDERS
from tests.ranks import run_ranks
from torchtitan_dmuon.checkpoint import load_optimizer_state, optimizer_state

MUON = functools.partial(dmuon.Muon, lr=0.02, ns_dtype="float32")


class Experts(nn.Module):
    """A stack [5, 6, 4] applied expert by expert, and a plain matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.w_EMN = nn.Parameter(torch.randn(5, 6, 4) * 0.3)
        self.out = nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.einsum("emn,bn->bem", self.w_EMN, x).tanh().mean(1))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(world, shape, **options):
    mesh = toy.mesh_of(*shape)
    model = Mixture()
    owned = dmuon.own_matrices(model, mesh, select=r"layers", units=model.layers, stacks=r"w_EMN$")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=owned.parameters)
    fully_shard(model, mesh=mesh, ignored_params=owned.parameters)
    return model, owned, owned.build_optimizer(functools.partial(MUON, **options))


def train(model, owned, optimizer, steps, rank, world):
    """The batch is that of four virtual ranks, whatever the world, so that runs on several meshes compare."""
    losses = []
    for step in steps:
        total = 0.0
        for virtual in range(rank, 4, world):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + virtual))
            owned.set_is_last_backward(virtual + world >= 4)
            loss = (model(x) - x.roll(1, 0)).square().mean() * world / 4
            loss.backward()
            total += loss.item()
        owned.clip_grad_norm_(model, 1.0)
        optimizer.step()
        losses.append(total)
    return losses


def momenta(optimizer):
    inner = optimizer.inners[0]
    names = [n for g in inner.param_groups for n in g["param_names"]]
    params = [p for g in inner.param_groups for p in g["params"]]
    return {n: inner.state[p]["momentum_buffer"].clone() for n, p in zip(names, params)}


def first_half(rank, world, shape, path):
    model, owned, optimizer = build(world, shape)
    train(model, owned, optimizer, range(3), rank, world)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer_state(optimizer)}, checkpoint_id=path)
    train(model, owned, optimizer, range(3, 6), rank, world)
    return owned.masters(), momenta(optimizer)


def three_steps(rank, world):
    model, owned, optimizer = build(world, (1, 1))
    train(model, owned, optimizer, range(3), rank, world)
    return momenta(optimizer)


def second_half(rank, world, shape, path):
    model, owned, optimizer = build(world, shape)
    state = {"model": model.state_dict(), "optimizer": optimizer_state(optimizer)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"], strict=False)
    load_optimizer_state(optimizer, state["optimizer"])
    train(model, owned, optimizer, range(3, 6), rank, world)
    return owned.masters(), momenta(optimizer)


def merged(results):
    masters, momenta = {}, {}
    for m, s in results:
        masters.update(m)
        momenta.update(s)
    return masters, momenta


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (1, 2), (1, 1)])
def test_resuming_equals_the_uninterrupted_run(tmp_path_factory, shape, saved):
    path, masters, momenta = saved
    world = shape[0] * shape[1]
    again_masters, again_momenta = merged(run_ranks(second_half, world, shape, path))
    assert again_masters.keys() == masters.keys() and again_momenta.keys() == momenta.keys()
    for mine, reference in ((again_masters, masters), (again_momenta, momenta)):
        for key, value in reference.items():
            if shape == (1, 4):
                assert torch.equal(mine[key], value), key
            else:  # sums over ranks and micro-batches come in another order
                assert (mine[key] - value).norm() <= 1e-5 * value.norm(), key


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("dcp") / "step-3")
    return path, *merged(run_ranks(first_half, 4, (1, 4), path))


def test_a_stack_is_one_tensor_in_the_checkpoint(saved):
    metadata = dcp.FileSystemReader(saved[0]).read_metadata().state_dict_metadata
    for key in ("model.layers.0.w_EMN", "optimizer.state.layers.0.w_EMN.momentum_buffer"):
        assert metadata[key].size == torch.Size([5, 6, 4]) and len(metadata[key].chunks) == 5
    assert metadata["model.layers.0.out.weight"].size == torch.Size([4, 6])
    assert not [k for k in metadata if "[" in k]


@pytest.mark.parametrize(("own", "tolerance"), [("bfloat16", 4e-3), ("float32", 0.0)])
def test_momentum_is_restored_in_the_dtype_asked_for(saved, own, tolerance):
    """The saved run kept float32; options of the rule come from the checkpoint, the dtype from this run."""

    def job(rank, world):
        _, _, optimizer = build(world, (1, 1), momentum_dtype=own, lr=0.5)
        state = optimizer_state(optimizer)
        dcp.load({"optimizer": state}, checkpoint_id=saved[0])
        load_optimizer_state(optimizer, state)
        return momenta(optimizer), [(g["momentum_dtype"], g["lr"]) for g in optimizer.param_groups]

    reference = run_ranks(three_steps, 1)[0]
    (found, options) = run_ranks(job, 1)[0]
    assert options == [(own, 0.02)]
    for name, value in found.items():
        assert value.dtype == getattr(torch, own)
        assert (value.float() - reference[name]).norm() <= max(tolerance, 1e-5) * reference[name].norm(), name


def test_a_checkpoint_of_the_other_momentum_form_is_refused(saved):
    def job(rank, world):
        _, _, optimizer = build(world, (1, 1), momentum_form="heavy_ball")
        state = optimizer_state(optimizer)
        dcp.load({"optimizer": state}, checkpoint_id=saved[0])
        with pytest.raises(ValueError, match="saved momentum is of the form 'ema'"):
            load_optimizer_state(optimizer, state)

    run_ranks(job, 1)


def test_a_missing_state_is_named():
    def job(rank, world):
        _, _, optimizer = build(world, (1, 1))
        state = optimizer_state(optimizer)
        state.pop("state.layers.1.out.weight.momentum_buffer")
        with pytest.raises(KeyError, match="layers.1.out.weight.momentum_buffer.*without this optimizer's state"):
            load_optimizer_state(optimizer, state)

    run_ranks(job, 1)


# ---- riders: small parameters may change sides between runs ----


def build_toy(shape, riders):
    """The toy with its norms and biases owned as riders or left to FSDP2, and one AdamW for all that is no matrix."""
    model = toy.make_toy(layers=2)
    owned = toy.shard(model, toy.mesh_of(*shape), riders=RIDERS if riders else None)
    optimizer = owned.build_optimizer(MUON, riders=toy.adamw)
    named = [(n, p) for n, p in model.named_parameters() if p not in owned.parameters]
    return model, owned, optimizer, named, toy.adamw([p for _, p in named])


def train_toy(parts, rank, world, steps):
    """Four virtual ranks, whatever the world."""
    model, owned, optimizer, _, rest = parts
    for step in steps:
        for virtual in range(rank, 4, world):
            owned.set_is_last_backward(virtual + world >= 4)
            (toy.loss_of(model, step, 0, virtual) * world / 4).backward()
        owned.clip_grad_norm_(model, 1.0)
        optimizer.step()
        rest.step()
        rest.zero_grad()


def state_of(parts):
    """Everything, under the keys of TorchTitan's checkpoints."""
    model, _, optimizer, named, rest = parts
    for _, p in named:
        if p not in rest.state:  # as a fresh AdamW would make it
            zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            rest.state[p] = {"step": torch.tensor(0.0), **zeros}
    state = optimizer_state(optimizer)
    for name, p in named:
        state |= {f"state.{name}.{key}": value for key, value in rest.state[p].items()}
        options = {k: v for k, v in rest.param_groups[0].items() if k != "params"}
        state |= {f"param_groups.{name}.{option}": value for option, value in options.items()}
    return {"model": model.state_dict(), "optimizer": state}


def whole_of(state):
    flat = {
        f"{part}.{k}": v for part, values in state.items() for k, v in values.items() if isinstance(v, torch.Tensor)
    }
    flat = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in flat.items()}
    return {k: v.clone() for k, v in toy.held(flat).items()}


def save_toy(rank, world, shape, riders, path):
    parts = build_toy(shape, riders)
    train_toy(parts, rank, world, range(2))
    dcp.save(state_of(parts), checkpoint_id=path)
    saved = whole_of(state_of(parts))
    train_toy(parts, rank, world, range(2, 4))
    return saved, whole_of(state_of(parts))


def load_toy(rank, world, shape, riders, path):
    parts = build_toy(shape, riders)
    state = state_of(parts)
    dcp.load(state, checkpoint_id=path)
    parts[0].load_state_dict(state["model"], strict=False)
    load_optimizer_state(parts[2], state["optimizer"])
    loaded = whole_of(state_of(parts))
    train_toy(parts, rank, world, range(2, 4))
    return loaded, whole_of(state_of(parts))


@pytest.mark.parametrize("riders", [True, False], ids=["saved with riders", "saved without"])
def test_riders_and_fsdp2_read_each_others_checkpoints(tmp_path, riders):
    path = str(tmp_path / "step-2")
    saved, reference = merged(run_ranks(save_toy, 4, (2, 2), riders, path))
    loaded, resumed = merged(run_ranks(load_toy, 2, (1, 2), not riders, path))
    assert loaded.keys() == saved.keys() == reference.keys() == resumed.keys()
    assert sum(".norm1." in k for k in saved) == 2 * 4  # weight, step and two moments, in each layer
    assert [k for k in saved if not torch.equal(saved[k], loaded[k])] == []
    far = [k for k, v in reference.items() if (v - resumed[k]).norm() > 1e-5 * v.norm()]
    assert far == []
