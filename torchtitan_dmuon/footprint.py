"""What a plan weighs: bytes at rest, peak bytes by phase and bytes per step, with FSDP2+AdamW's beside them. Pure.

Decides: the formulas, each next to its term. Does not decide who owns what (`ownership.py`) nor what a route moves
(`topology.py`, counted by `loads.py`). Keeps: buffers are those of `runtime/unit.py` and `runtime/engine.py`, counted
as if the network were slow, so that the peak of a run stays at or below the planned one; AdamW's are counted as if
nothing lingered, so that a comparison never flatters. Activations, which both have alike, are left out.

Shape suffix: W ranks of the data-parallel group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .loads import LoadCounter, Loads, Shares
from .matrices import Piece
from .muon import DEFAULT_BATCH_BYTES
from .newton_schulz import NewtonSchulz, compute_dtype, workspace_bytes
from .ownership import OwnershipPlan
from .runtime.engine import CONTRIBUTIONS_IN_FLIGHT, NODE_SUMS_IN_FLIGHT
from .topology import Topology, UnitLayout

MASTER_BYTES = 4  # fp32 masters, reduced gradients and AdamW's parameters
ADAM_STATE_BYTES = 8  # fp32 first and second moment
PHASES = ("init", "forward", "backward", "step")


@dataclass(frozen=True)
class Group:
    """What `fully_shard` takes at once: ``pieces`` that are owned, and ``rest`` elements that FSDP2 shards."""

    name: str
    rest: int
    pieces: tuple[Piece, ...] = ()
    layout: UnitLayout | None = None

    @property
    def owned(self) -> int:
        return sum(p.numel for p in self.pieces)

    @property
    def copied(self) -> int:
        """Elements of stacks, which are copied out of the unit's buffer when gathered."""
        several = Counter(p.name for p in self.pieces)
        return sum(p.numel for p in self.pieces if several[p.name] > 1)


@dataclass(frozen=True)
class Options:
    """Bytes per element of compute, reduce and momentum; and what decides how long buffers live."""

    compute_bytes: int = 2
    reduce_bytes: int = 4
    momentum_bytes: int = 4
    reshard: bool = True
    prefetch: int = 1
    micro_batches: int = 1
    defer_reduce: bool = True
    settings: NewtonSchulz = NewtonSchulz()
    is_muon: bool = True  # another rule has no Newton-Schulz and is taken to need two fp32 temporaries
    device_type: str = "cuda"
    batch_bytes: int = DEFAULT_BATCH_BYTES
    early_update: bool = False  # Newton-Schulz runs during backward, and its results wait for the step


@dataclass(frozen=True)
class Footprint:
    """``rest_W`` and each of ``peaks`` (by phase) are bytes per rank; ``traffic`` maps "gather", "reduce_1",
    "reduce_2", "publish" and "rest" to bytes per step, ``adamw_traffic`` "gather", "reduce_scatter", "all_reduce"."""

    rest_W: torch.Tensor
    peaks: Mapping[str, torch.Tensor]
    adamw_rest: int
    adamw_peaks: Mapping[str, int]
    traffic: Mapping[str, Loads]
    adamw_traffic: Mapping[str, Loads]

    @property
    def peak_W(self) -> torch.Tensor:
        return torch.stack([self.peaks[phase] for phase in PHASES]).amax(0)

    @property
    def adamw_peak(self) -> int:
        return max(self.adamw_peaks.values())

    @staticmethod
    def total(traffic: Mapping[str, Loads]) -> Loads:
        first, *others = traffic.values()
        return sum(others, first)


def footprint(topology: Topology, groups: Sequence[Group], options: Options) -> Footprint:
    """Bytes of ``groups`` (in forward order) on every rank of ``topology``."""
    counter = LoadCounter(topology)
    shares = [counter.shares(g.layout) if g.layout is not None else None for g in groups]
    rest_W, peaks = _owned_memory(topology, groups, shares, options)
    adamw_rest, adamw_peaks = adamw_memory([g.owned + g.rest for g in groups], topology.shard_size, options)
    whole = sum(g.owned + g.rest for g in groups)
    traffic = _owned_traffic(counter, groups, options)
    traffic["rest"] = Footprint.total(fsdp_traffic(sum(g.rest for g in groups), topology, options))
    return Footprint(rest_W, peaks, adamw_rest, adamw_peaks, traffic, fsdp_traffic(whole, topology, options))


def lay_out(groups: Sequence[Group], topology: Topology, plan: OwnershipPlan) -> list[Group]:
    """``groups`` with the buffers that their pieces have on this topology."""
    return [
        replace(g, layout=UnitLayout.build(topology, [(p.key, p.numel, plan.roots[p.key]) for p in g.pieces]))
        if g.pieces
        else g
        for g in groups
    ]


def uses_collectives(topology: Topology, device_type: str) -> bool:
    """Whether units travel by collectives inside nodes and along rails, as `runtime/transport.py` chooses: on NCCL,
    where the topology is regular."""
    return device_type == "cuda" and topology.world > 1 and not topology.irregularity


def should_defer(topology: Topology, groups: Sequence[Group], options: Options) -> bool:
    """Whether level 2 once per step keeps the planned peak at or below AdamW's: what defer_reduce = "auto" means. With
    one micro-batch there is nothing to defer, and the answer is True."""
    if options.micro_batches == 1:
        return True
    deferred = footprint(topology, groups, replace(options, defer_reduce=True))
    return int(deferred.peak_W.max()) <= deferred.adamw_peak


# ---- memory ----


def adamw_memory(groups: Sequence[int], shard_size: int, options: Options) -> tuple[int, dict[str, int]]:
    """Bytes at rest and peaks by phase of FSDP2+AdamW on a rank; ``groups``: elements in forward order.

    At rest: fp32 parameter and two moments, 12/S an element. Gathered: a group and its neighbour, in compute dtype.
    In backward also the group's gradients in compute dtype, the reduce-scatter's input in reduce dtype, and the fp32
    shards of the gradients so far. AdamW itself is fused and needs no temporaries.
    """
    c, w = options.compute_bytes, options.reduce_bytes
    size = [float(n) / shard_size for n in groups]
    rest = (MASTER_BYTES + ADAM_STATE_BYTES) * sum(size)
    window = 2 if options.reshard else len(groups)
    gathered = [c * sum(groups[i : i + window]) for i in range(len(groups))]
    backward, so_far = 0.0, 0.0
    for i in reversed(range(len(groups))):
        so_far += MASTER_BYTES * size[i]
        near = c * sum(groups[max(0, i - 1) : i + 1]) if options.reshard else c * sum(groups)
        backward = max(backward, rest + so_far + near + (c + w) * groups[i])
    peaks = {
        "init": MASTER_BYTES * sum(size),
        "forward": rest + max(gathered),
        "backward": backward,
        "step": rest + so_far,
    }
    return round(rest), {phase: round(value) for phase, value in peaks.items()}


def _owned_memory(
    topology: Topology, groups: Sequence[Group], shares: Sequence[Shares | None], options: Options
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    c, w = options.compute_bytes, options.reduce_bytes
    zero_W = torch.zeros(topology.world, dtype=torch.int64)
    indices = range(len(groups))

    def per_rank(pick: Callable[[Shares], torch.Tensor]) -> list[torch.Tensor]:
        return [zero_W if s is None else pick(s) for s in shares]

    mastered, rooted = per_rank(lambda s: s.mastered_W), per_rank(lambda s: s.rooted_W)
    held, collected = per_rank(lambda s: s.held_W), per_rank(lambda s: s.collected_W)
    full = [0 if g.layout is None else g.layout.numel for g in groups]
    shard = [g.rest / topology.shard_size for g in groups]
    members_W = torch.tensor([len(topology.node_members(topology.node(r))) for r in range(topology.world)])
    is_resident = topology.holders == "shard_group" and topology.shard_size == 1  # the held copy is the gathered one

    weights_W = sum((MASTER_BYTES * m + c * h for m, h in zip(mastered, held)), zero_W)
    weights_W = weights_W + round(MASTER_BYTES * sum(shard))
    state_W = options.momentum_bytes * sum(mastered, zero_W) + round(ADAM_STATE_BYTES * sum(shard))
    state_W = state_W + (ADAM_STATE_BYTES - options.momentum_bytes) * _rider_elements(topology, groups)
    base_W = weights_W + state_W

    def gathered(lo: int, hi: int) -> int:
        """Groups lo to hi, both gathered by us and by FSDP2."""
        lo, hi = max(0, lo), min(hi, len(groups) - 1)
        own = 0 if is_resident else sum(full[lo : hi + 1])
        return c * (own + sum(g.copied + g.rest for g in groups[lo : hi + 1]))

    # Level 1: what a collector receives beyond the node sums that it becomes; once sums of earlier micro-batches exist,
    # all of it. Level 2 at a root: the node sums of the others in reduce dtype and their total in fp32; with replica
    # ownership every owner's share of the totals. Collectives sum in place and receive nothing aside.
    nodes, flat = topology.nodes, topology.routing == "flat"
    in_place, is_replica = uses_collectives(topology, options.device_type), topology.ownership == "replica"
    has_earlier = options.micro_batches > 1
    defers = options.defer_reduce and has_earlier
    senders_W = torch.full_like(members_W, topology.world - 1) if flat else members_W - 1
    kept = 0 if defers else nodes if flat else 1
    received = [zero_W if in_place else w * (senders_W - kept).clamp(min=0) * x for x in collected]
    partial = [w * x * (nodes if flat else 1) for x in collected]
    grad = [MASTER_BYTES * m for m in mastered]
    aside = 0 if flat or in_place else (nodes - 1) * w
    level_2 = [(aside + MASTER_BYTES) * r + (g if is_replica else 0) for r, g in zip(rooted, grad)]
    earlier = [zero_W] * len(groups) if not has_earlier else partial if defers else grad  # of earlier micro-batches
    before_last_W = sum(partial, zero_W) if defers else zero_W

    owned = [i for i in indices if full[i]]

    def reducing(first: int) -> torch.Tensor:
        """When this backward has issued the reduces of the groups from ``first`` on, the last one first."""
        begun, others = [i for i in owned if i >= first], [i for i in owned if i < first]
        left = owned[: CONTRIBUTIONS_IN_FLIGHT - 1]  # behind the last reduce of a backward
        near = left if not others and first not in owned else begun + left if has_earlier else begun
        near = near[:CONTRIBUTIONS_IN_FLIGHT]  # the latest first
        far = (begun + owned if has_earlier and not defers else begun)[:NODE_SUMS_IN_FLIGHT]
        sums_W = _total(partial, far) + _largest(level_2, far) + _total(grad, begun) + _total(earlier, others)
        return w * sum(full[i] for i in near) + _largest(received, near) + torch.maximum(sums_W, before_last_W)

    ahead = options.prefetch if options.reshard else len(groups)
    forward_W = base_W + reducing(len(groups)) + max(gathered(i if options.reshard else 0, i + ahead) for i in indices)
    backward_W, shards = zero_W, 0.0
    for i in reversed(indices):
        shards += MASTER_BYTES * shard[i]
        now = gathered(i - ahead, i) + c * (full[i] + groups[i].rest) + w * groups[i].rest + round(shards)
        most_W = torch.maximum(reducing(i + 1), reducing(i)) if full[i] else reducing(i)  # before its reduce, behind it
        backward_W = torch.maximum(backward_W, base_W + now + most_W)
    workspace_W = _workspace(topology, groups, options)
    update_W = zero_W  # scratch of updates that are made during backward, beside what making them needs
    if options.early_update:
        itemsize = compute_dtype(options.settings, options.device_type).itemsize
        update_W = sum((itemsize * m for m in mastered), zero_W)
        unit_W = _largest(mastered, indices)  # its advanced momentum and clipped gradient
        backward_W = backward_W + update_W + workspace_W + (options.momentum_bytes + MASTER_BYTES) * unit_W
    largest = max((p.numel for g in groups for p in g.pieces), default=0)
    peaks = {
        "init": weights_W + max(c * max(full), MASTER_BYTES * largest),
        "forward": forward_W,
        "backward": backward_W,
        "step": base_W + sum(grad, zero_W) + round(shards) + workspace_W + update_W,
    }
    return base_W, peaks


def _total(values: Sequence[torch.Tensor], of: Sequence[int]) -> torch.Tensor:
    return sum((values[i] for i in of), torch.zeros_like(values[0]))


def _largest(values: Sequence[torch.Tensor], of: Sequence[int]) -> torch.Tensor:
    return torch.stack([torch.zeros_like(values[0]), *(values[i] for i in of)]).amax(0)


def _workspace(topology: Topology, groups: Sequence[Group], options: Options) -> torch.Tensor:
    """Bytes of Newton-Schulz on each rank: matrices of one shape and unit, as many as a batch holds, at least one."""
    most_W = torch.zeros(topology.world, dtype=torch.int64)
    for group in groups:
        if group.layout is None:
            continue
        count: Counter[tuple[int, int, int]] = Counter()
        root_at = _root_finder(group.layout)
        for piece in group.pieces:
            root = root_at(piece.key)
            for m, n in piece.matrices():
                count[root, m, n] += 1
        for (root, m, n), number in count.items():
            each = 2 * MASTER_BYTES * m * n
            if options.is_muon:
                each += workspace_bytes(m, n, options.settings, options.device_type)
            batch = each * max(1, min(number, options.batch_bytes // each))
            most_W[root] = max(int(most_W[root]), batch)
    if topology.ownership == "replica":
        by_place = most_W.view(topology.replicas, topology.shard_size).amax(0)
        most_W = by_place.repeat(topology.replicas)
    return most_W


def _rider_elements(topology: Topology, groups: Sequence[Group]) -> torch.Tensor:
    """Elements of riders that each rank [W] updates."""
    riders_W = torch.zeros(topology.world, dtype=torch.int64)
    for group in groups:
        riders = [p for p in group.pieces if p.rider]
        if group.layout is not None and riders:
            root_at = _root_finder(group.layout)
            for piece in riders:
                riders_W[root_at(piece.key)] += piece.numel
    if topology.ownership == "replica":
        riders_W = riders_W.view(topology.replicas, topology.shard_size).sum(0).repeat(topology.replicas)
    return riders_W


def _root_finder(layout: UnitLayout) -> Callable[[str], int]:
    spans = sorted((start, stop, root) for root, (start, stop) in layout.ranges.items())
    table = {}
    at = 0
    for key in sorted(layout.slots, key=layout.slots.__getitem__):
        while layout.slots[key] >= spans[at][1]:
            at += 1
        table[key] = spans[at][2]
    return table.__getitem__


# ---- bytes per step ----


def _owned_traffic(counter: LoadCounter, groups: Sequence[Group], options: Options) -> dict[str, Loads]:
    """Gathers in every micro-batch, twice when resharded; level 1 in every micro-batch; level 2 in every micro-batch,
    or once when deferred; publish once. Replica ownership spreads fp32 sums with level 2 and publishes nothing."""
    topology = counter.topology
    micro = options.micro_batches
    level_2 = 1 if options.defer_reduce else micro
    elements = {phase: Loads.none(topology.world) for phase in ("gather", "reduce_1", "reduce_2", "publish")}
    for group in groups:
        if group.layout is not None:
            moved = counter.chains if uses_collectives(topology, options.device_type) else counter.loads
            for phase, loads in moved(group.layout).items():
                elements[phase] = elements[phase] + loads
    c, w = options.compute_bytes, options.reduce_bytes
    spread = elements["publish"]
    replica = topology.ownership == "replica"
    return {
        "gather": elements["gather"] * (c * micro * (2 if options.reshard else 1)),
        "reduce_1": elements["reduce_1"] * (w * micro),
        "reduce_2": (elements["reduce_2"] * w + spread * (MASTER_BYTES if replica else 0)) * level_2,
        "publish": spread * (0 if replica else c),
    }


def ring_bytes(total: float, ranks: int, nodes: int, all_reduce: bool = False) -> tuple[float, float]:
    """(near, far): what each rank sends of a tensor of ``total`` bytes that a group of ranks on so many nodes gathers,
    scatters (``total`` of the whole tensor) or all-reduces, as rings that cross nodes in rank order.

    Gather and reduce-scatter: (n-1)/n of it, of which (nodes-1)/n between nodes. All-reduce: twice (n-1)/n, between
    nodes on as many of its links as it has nodes.
    """
    sent = total * (ranks - 1) / ranks
    if all_reduce:
        crossing = nodes / ranks if nodes > 1 else 0.0
        return 2 * sent * (1 - crossing), 2 * sent * crossing
    far = total * (nodes - 1) / ranks
    return sent - far, far


def fsdp_traffic(elements: int, topology: Topology, options: Options) -> dict[str, Loads]:
    """Bytes per step of FSDP2 on ``elements``, spread evenly over the ranks. Every micro-batch all-reduces, in reduce
    dtype, what a rank holds of the sums."""
    world, per_node = topology.world, min(topology.ranks_per_node, topology.world)
    shards, replicas, nodes = topology.shard_size, topology.replicas, topology.nodes
    near, far = ring_bytes(elements, shards, -(-shards // min(shards, per_node)))
    replicas_on = -(-replicas // max(1, per_node // shards)) if nodes > 1 else 1  # nodes that hold replicas of a shard
    passes = 2 if options.reshard else 1
    summed_near, summed_far = ring_bytes(elements / shards, replicas, replicas_on, all_reduce=True)

    def even(near: float, far: float, bytes_each: int) -> Loads:
        near_W, far_W = (torch.full((world,), round(x * bytes_each * options.micro_batches)) for x in (near, far))
        return Loads(near_W, far_W, near_W, far_W)

    return {
        "gather": even(near * passes, far * passes, options.compute_bytes),
        "reduce_scatter": even(near, far, options.reduce_bytes),
        "all_reduce": even(summed_near, summed_far, options.reduce_bytes),
    }
