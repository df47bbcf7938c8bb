"""Sums of float16: divided before they are formed, as FSDP2 does, so that they end where its sums end."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import torchtitan_dmuon as dmuon
from torchtitan_dmuon.runtime.engine import divide_factors

from .ranks import run_ranks

Case = dict[str, Any]
CASES: list[tuple[tuple[int, int], Case]] = [
    (mesh, {"transport": transport, "ownership": ownership})
    for mesh, transport, ownership in itertools.product(
        ((2, 2), (4, 1)), ("point_to_point", "collective", "padded"), ("global", "replica")
    )
    # Regular topologies alone have collectives: a shard group is a node there.
    if transport == "point_to_point" or mesh == (2, 2)
]
CASES += [
    ((2, 2), {"routing": "flat"}),
    ((1, 4), {"holders": "node"}),
    ((1, 4), {"micros": 2}),
]
CASES += [((1, 4), {"ranks_per_node": 4, "transport": t}) for t in ("point_to_point", "collective", "padded")]


def _gradients(rank: int, largest: float, micros: int) -> torch.Tensor:
    """[micros, 8, 8], a little below ``largest``."""
    return largest * (1 - torch.rand(micros, 8, 8, generator=torch.Generator().manual_seed(rank)) / 100)


class _Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def _sums(rank: int, world: int, mesh: tuple[int, int], options: Case, factor: float | None, largest: float) -> Any:
    """The reduced gradient of one weight by FSDP2 and by ours (where this rank owns it), after two backwards."""
    options = {"ranks_per_node": 2, **options}
    micros = options.pop("micros", 1)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    devices = init_device_mesh("cpu", mesh, mesh_dim_names=("dp_replicate", "dp_shard"))
    theirs, mine = _Weight(), _Weight()
    fully_shard(theirs, mesh=devices, mp_policy=policy)
    if factor is not None:
        theirs.set_gradient_divide_factor(factor)
    owned = dmuon.own_matrices(mine, devices, "weight", [mine], policy, gradient_divide_factor=factor, **options)
    for gradient in _gradients(rank, largest, micros):
        theirs(gradient).backward()
        mine(gradient).backward()
    owned.engine.finish_reduces()
    grad = theirs.weight.grad
    assert isinstance(grad, DTensor)
    used = owned.engine.gradients_are_finite()  # and takes those away that no rank used
    found = {k: p.grad for u in owned.engine.units for k, p in u.master_of.items()}
    owned.close()
    return grad.full_tensor(), found, used


@pytest.mark.parametrize(("factor", "largest"), [(None, 30000.0), (6.0, 30000.0), (1.5, 12000.0)])
def test_gradients_of_float16_end_where_those_of_fsdp2_do(factor: float | None, largest: float) -> None:
    def job(rank: int, world: int) -> list[Any]:
        return [_sums(rank, world, mesh, options, factor, largest) for mesh, options in CASES]

    results = run_ranks(job, 4, ranks_per_node=2)
    for index, (mesh, options) in enumerate(CASES):
        theirs = results[0][index][0]
        exact = sum(_gradients(rank, largest, options.get("micros", 1)).sum(0) for rank in range(4)) / (factor or 4)
        if mesh[1] > 1:  # FSDP2 divides twice where a shard group is one rank and the factor its own
            assert (theirs - exact).norm() <= 2e-3 * exact.norm(), "FSDP2"
        owners = [found for _, found, _ in (r[index] for r in results) if found]
        assert len(owners) == (mesh[0] if options.get("ownership") == "replica" else 1)
        for found in owners:
            (grad,) = found.values()
            assert grad is not None, (mesh, options)
            assert (grad - exact).norm() <= 2e-3 * exact.norm(), (mesh, options, grad.max())
        assert all(finite for _, _, finite in (r[index] for r in results))


def test_the_factors() -> None:
    """Powers of two up to the root, as FSDP2 takes them; wider dtypes are divided at the end alone."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    for factor in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 12.0, 48.0, 64.0, 1000.0, 1024.0, 3072.0):
        before, after = divide_factors(factor, torch.float16)
        assert (before, after) == _get_gradient_divide_factors(None, None, torch.float16, "cpu", factor)[:2]
        assert before * after == factor and math.log2(before) % 1 == 0
        for dtype in (torch.float32, torch.bfloat16):
            assert divide_factors(factor, dtype) == (1, factor)
