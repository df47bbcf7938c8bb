"""GatherMuon equals Muon on one process, on every mesh, uneven shards and fused weights included."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.ranks import run_ranks
from torchtitan_dmuon.matrices import MatrixLayout
from torchtitan_dmuon.muon import Muon, set_layout
from torchtitan_dmuon.titan.gather_muon import GatherMuon

# (shape, layout): fused q|k|v, wide, tall, fewer rows than ranks, rows that 4 does not divide, one row.
PARAMETERS = [
    ((48, 16), MatrixLayout(groups=2, rows=(16, 4, 4))),
    ((16, 40), MatrixLayout()),
    ((40, 16), MatrixLayout()),
    ((3, 8), MatrixLayout()),
    ((18, 12), MatrixLayout()),
    ((1, 16), MatrixLayout()),
    ((16, 40), MatrixLayout()),
]
MATRICES = 9
SETTINGS = [
    {"adjust_lr_fn": "match_rms_adamw", "ns_dtype": "float32"},
    {"nesterov": False, "momentum_form": "heavy_ball", "ns_dtype": "float32", "momentum_dtype": "bfloat16"},
    {"ns_dtype": "bfloat16", "batch_bytes": 0},
    {"row_beta": 0.9, "cautious_weight_decay": True, "ns_dtype": "float32"},
]


def _start():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape, _ in PARAMETERS]
    grads = [[torch.randn(shape, generator=generator) for shape, _ in PARAMETERS] for _ in range(3)]
    return weights, grads


def _run(optimizer_class, place, settings):
    """Three steps with two learning rates; whole weights and momenta, and the counted NS calls of a step."""
    weights, grads = _start()
    params = []
    for weight, (_, layout) in zip(weights, PARAMETERS, strict=True):
        param = torch.nn.Parameter(place(weight))
        set_layout(param, layout)
        params.append(param)
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.3}]
    optimizer = optimizer_class(groups, lr=0.1, weight_decay=0.1, **settings)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = place(grad)
        optimizer.step()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in params]
    momenta = [optimizer.state[p]["momentum_buffer"] for p in params]
    momenta = [m.full_tensor() if isinstance(m, DTensor) else m for m in momenta]
    return [t.detach().float() for t in whole], [m.float() for m in momenta], optimizer.stats.ns_calls


def _rank(rank, world, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    place = lambda t: distribute_tensor(t, mesh, [Replicate(), Shard(0)])  # noqa: E731
    return [_run(GatherMuon, place, settings) for settings in SETTINGS]


@pytest.mark.parametrize("mesh_shape", [(2, 2), (1, 4)])
def test_equals_muon_on_one_process(mesh_shape):
    expected = [_run(Muon, lambda t: t.clone(), settings) for settings in SETTINGS]
    start, _ = _start()
    for results in run_ranks(_rank, 4, mesh_shape):
        for (weights, momenta, calls), (ref_weights, ref_momenta, ref_calls) in zip(results, expected, strict=True):
            assert calls == ref_calls == MATRICES
            for got, ref in zip(momenta, ref_momenta, strict=True):
                assert torch.equal(got, ref)
            for got, ref, first in zip(weights, ref_weights, start, strict=True):
                # The factor and the rate are multiplied in another order: one rounding apart, not more.
                assert (got - ref).norm() <= 1e-6 * (ref - first).norm()


def test_plain_parameters_equal_muon():
    (weights, momenta, _), (ref_weights, ref_momenta, _) = (
        _run(cls, lambda t: t.clone(), SETTINGS[0]) for cls in (GatherMuon, Muon)
    )
    for got, ref in zip([*weights, *momenta], [*ref_weights, *ref_momenta], strict=True):
        torch.testing.assert_close(got, ref, rtol=1e-6, atol=1e-6)


def test_parameters_without_a_gradient_are_left_alone():
    used, unused = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    optimizer = GatherMuon([used, unused])
    used.grad = torch.eye(4)
    optimizer.step()
    assert torch.equal(unused, torch.ones(4, 4)) and unused not in optimizer.state
    assert not torch.equal(used, torch.ones(4, 4))


def test_muons_checks_hold_here():
    with pytest.raises(ValueError, match=r"2-D.*\(4,\)"):
        GatherMuon([torch.nn.Parameter(torch.ones(4))])
    with pytest.raises(ValueError, match="adjust_lr_fn"):
        GatherMuon([torch.nn.Parameter(torch.ones(4, 4))], adjust_lr_fn="spectral")
    with pytest.raises(ValueError, match="row_beta"):
        GatherMuon([torch.nn.Parameter(torch.ones(4, 4))], row_beta=2.0)
