"""The plan of who owns what, as the ranks agree on it.

Decides: what goes into the plan, and that all ranks derived the same one (invariant 6) and have equal options, before
anything is sent by it. Does not decide who owns what (`ownership.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..costs import CostModel
from ..matrices import OwnedSpec, Piece, count_matrices
from ..ownership import MeshSpec, OwnershipPlan, assign
from ..topology import Topology
from .wires import Control

logger = logging.getLogger(__name__)


def make_plan(
    specs: list[OwnedSpec],
    grouped: list[tuple[str, list[str]]],
    topology: Topology,
    balance: str,
    cost: CostModel | None,
) -> OwnershipPlan:
    pieces: dict[str, tuple[Piece, ...]] = {spec.name: spec.pieces() for spec in specs}
    unit_of = {p.key: i for i, (_, names) in enumerate(grouped) for n in names for p in pieces[n]}
    mesh = MeshSpec(topology.world, topology.shard_size, topology.ranks_per_node)
    every = [p for ps in pieces.values() for p in ps]
    plan = assign(every, mesh, balance=balance, ownership=topology.ownership, cost=cost, unit_of=unit_of)
    riders = sum(p.rider for p in every)
    logger.info(
        "%d matrices in %d pieces and %d riders on %d owners, largest load %.3f times the mean",
        count_matrices(every),
        len(every) - riders,
        riders,
        plan.n_owners,
        plan.imbalance,
    )
    return plan


def compare_ranks(plan: OwnershipPlan, options: Mapping[str, Any], control: Control, rank: int) -> None:
    """Raise on every rank, showing what differs, unless all ranks derived the same plan (invariant 6) and have equal
    options."""
    every = control.all_gather((plan.digest, options))
    other = next((r for r, each in enumerate(every) if each != every[0]), None)
    if other is None:
        return
    (digest, first), (other_digest, second) = every[0], every[other]
    if digest == other_digest:
        lines = [f"{name}: {first[name]} against {second[name]}" for name in first if first[name] != second[name]]
        raise RuntimeError(
            f"ranks 0 and {other} of the data-parallel group have different options:\n  " + "\n  ".join(lines)
        )
    plans = control.all_gather(plan.to_json() if rank in (0, other) else None)
    lines = OwnershipPlan.from_json(plans[0]).difference(OwnershipPlan.from_json(plans[other]))
    raise RuntimeError(
        f"ranks 0 and {other} of the data-parallel group derived different ownership plans:\n  " + "\n  ".join(lines)
    )
