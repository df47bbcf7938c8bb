"""Transports: the operations that carry a unit's gather, reduce and publish. Two families behind one interface.

Decides: which operations carry a route and in which order sums form. Does not decide where data goes (`topology.py`),
which library call moves it (`wires.py`) nor when (`engine.py`). Keeps invariant 1: `PointToPoint` sums by local rank,
then by node; `Collectives` leave the order to the library.
"""

from __future__ import annotations

import datetime
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ..topology import Stage, Topology
from .board import Board
from .unit import Ranges, Unit, slice_of
from .wires import Control, GroupWire, Parcel, Wire, make_group, on_nccl

logger = logging.getLogger(__name__)

# Each has a wire of its own; groups are made in this order on every rank.
PHASES = ("gather", "reduce", "reduce_between_nodes", "publish")
TRANSPORTS = ("auto", "point_to_point", "collective", "padded")


class Transport(Protocol):
    """``wires`` by phase; ``sent``: payload bytes this rank has sent, by (phase, "intra_node" or "inter_node")."""

    wires: dict[str, Wire]
    sent: Counter[tuple[str, str]]

    def peers(self, phase: str, unit: Unit) -> list[int]:
        """The ranks that this one exchanges messages with in a unit's operation, or is in a group with."""

    def gather(self, unit: Unit) -> None:
        """The ranges that other ranks of the cell hold, into ``unit.flat``, which has this rank's."""

    def reduce_in_node(self, unit: Unit, contrib: torch.Tensor) -> dict[int, Ranges]:
        """Level 1: sums of contributions, by node, of what this rank collects, in reduce dtype. They may be parts of
        ``contrib``, whose other parts are undefined afterwards."""

    def reduce_between_nodes(self, unit: Unit, sums: dict[int, Ranges]) -> Ranges:
        """Level 2: totals over all nodes of what this rank is the root of, as float32 tensors of their own.
        ``sums``, by node, are undefined afterwards."""

    def spread(self, unit: Unit, ranges: Ranges, phase: str) -> None:
        """From each root's part of ``ranges`` to the other holders' of it."""


class PointToPoint:
    """One message for each pair of ranks and stage of a route: any topology, and a fixed order of summation."""

    def __init__(self, topology: Topology, rank: int, wires: Mapping[str, Wire]) -> None:
        self.topology, self.rank, self.wires = topology, rank, dict(wires)
        self.sent: Counter[tuple[str, str]] = Counter()

    def peers(self, phase: str, unit: Unit) -> list[int]:
        routes = unit.routes
        stages = {
            "gather": routes.gather,
            "reduce": routes.reduce[:1],
            "reduce_between_nodes": [
                *routes.reduce[1:],
                *(routes.publish if self.topology.ownership == "replica" else ()),
            ],
            "publish": routes.publish,
        }[phase]
        return sorted({m.peer for stage in stages for m in (*stage.sends, *stage.recvs)})

    def gather(self, unit: Unit) -> None:
        flat = _everywhere({(0, unit.flat.numel()): unit.flat})
        for stage in unit.routes.gather:
            self._exchange("gather", stage, flat, flat)

    def reduce_in_node(self, unit: Unit, contrib: torch.Tensor) -> dict[int, Ranges]:
        """Summed by local rank."""
        ranges = unit.layout.collected(self.rank)
        stage = unit.routes.reduce[0]
        received = {peer: _buffers(unit, ranges) for peer in {m.peer for m in stage.recvs}}
        self._exchange("reduce", stage, _everywhere({(0, contrib.numel()): contrib}), received.__getitem__)
        received[self.rank] = {(a, b): contrib[a:b] for a, b in ranges}
        sums: dict[int, Ranges] = {}
        for node in sorted({self.topology.node(r) for r in received}):
            members = [r for r in sorted(received) if self.topology.node(r) == node]
            sums[node] = {span: _sum([received[m][span] for m in members]) for span in ranges}
        return sums

    def reduce_between_nodes(self, unit: Unit, sums: dict[int, Ranges]) -> Ranges:
        """Summed by node."""
        ranges = unit.layout.rooted(self.rank)
        stage = unit.routes.reduce[1]
        received = {peer: _buffers(unit, ranges) for peer in {m.peer for m in stage.recvs}}
        own = sums.get(self.topology.node(self.rank), {})
        self._exchange("reduce_between_nodes", stage, _everywhere(own), received.__getitem__)
        by_node = {self.topology.node(peer): theirs for peer, theirs in received.items()} | sums
        totals: Ranges = {}
        for span in ranges:
            first, *others = (slice_of(by_node[n], *span) for n in sorted(by_node))
            totals[span] = first.to(torch.float32, copy=True)
            for each in others:
                totals[span].add_(each)
        return totals

    def spread(self, unit: Unit, ranges: Ranges, phase: str) -> None:
        for stage in unit.routes.publish:
            self._exchange(phase, stage, _everywhere(ranges), _everywhere(ranges))

    def _exchange(
        self, phase: str, stage: Stage, sources: Callable[[int], Ranges], targets: Callable[[int], Ranges]
    ) -> None:
        """The messages of a stage: ``sources(peer)`` and ``targets(peer)`` hold the ranges sent and received."""
        if not stage.sends and not stage.recvs:
            return
        sends = [(m.peer, slice_of(sources(m.peer), m.start, m.stop)) for m in stage.sends]
        recvs = [(m.peer, slice_of(targets(m.peer), m.start, m.stop)) for m in stage.recvs]
        for peer, tensor in sends:
            near = self.topology.node(peer) == self.topology.node(self.rank)
            self.sent[phase, "intra_node" if near else "inter_node"] += tensor.nbytes
        self.wires[phase].exchange(sends, recvs)


class Collectives:
    """Broadcasts and reduces of whole ranges: inside the node one for each rail, along the rail one for each owner.

    For regular topologies. The library passes each range on in pieces, so that every link carries it once, and sums on
    the way: no rank receives from many at once, and nothing but the sum is stored. A phase without a wire has one rank.
    """

    def __init__(self, topology: Topology, rank: int, wires: Mapping[str, Wire]) -> None:
        self.topology, self.rank, self.wires = topology, rank, dict(wires)
        self.sent: Counter[tuple[str, str]] = Counter()
        self._local, self._node = topology.local(rank), topology.node(rank)

    def peers(self, phase: str, unit: Unit) -> list[int]:
        if phase in ("gather", "reduce"):
            members = list(self.topology.node_members(self._node))
        else:
            members = [self.topology.relay(self.rank, node) for node in range(self.topology.nodes)]
        return [r for r in members if r != self.rank]

    def gather(self, unit: Unit) -> None:
        if (wire := self.wires.get("gather")) is not None:
            parcels = [(local, unit.flat[a:b]) for local, (a, b) in unit.layout.rail_spans]
            self._count_broadcast("gather", parcels)
            wire.broadcast(parcels)

    def reduce_in_node(self, unit: Unit, contrib: torch.Tensor) -> dict[int, Ranges]:
        if (wire := self.wires.get("reduce")) is not None:
            parcels = [(local, contrib[a:b]) for local, (a, b) in unit.layout.rail_spans]
            self._count_reduce("reduce", parcels)
            wire.reduce(parcels)
        return {self._node: {(a, b): contrib[a:b] for a, b in unit.layout.collected(self.rank)}}

    def reduce_between_nodes(self, unit: Unit, sums: dict[int, Ranges]) -> Ranges:
        own = sums[self._node]
        if (wire := self.wires.get("reduce_between_nodes")) is not None:
            parcels = self._along_rail(unit, own)
            self._count_reduce("reduce_between_nodes", parcels)
            wire.reduce(parcels)
        return {s: slice_of(own, *s).to(torch.float32, copy=True) for s in unit.layout.rooted(self.rank)}

    def spread(self, unit: Unit, ranges: Ranges, phase: str) -> None:
        if (wire := self.wires.get(phase)) is not None:
            parcels = self._along_rail(unit, ranges)
            self._count_broadcast(phase, parcels)
            wire.broadcast(parcels)

    def _along_rail(self, unit: Unit, ranges: Ranges) -> list[Parcel]:
        return [(node, slice_of(ranges, a, b)) for node, (a, b) in unit.layout.rails[self._local]]

    # Counted as chains: every rank passes a range on once, but for the last of a broadcast and the root of a reduce.

    def _place(self, phase: str) -> tuple[int, int, str]:
        """This rank's position in the phase's group, the group's size, and where its bytes go."""
        if phase in ("gather", "reduce"):
            return self._local, len(self.topology.node_members(self._node)), "intra_node"
        return self._node, self.topology.nodes, "inter_node"

    def _count_broadcast(self, phase: str, parcels: Sequence[Parcel]) -> None:
        position, size, where = self._place(phase)
        self.sent[phase, where] += sum(t.nbytes for root, t in parcels if (position + 1) % size != root)

    def _count_reduce(self, phase: str, parcels: Sequence[Parcel]) -> None:
        position, _, where = self._place(phase)
        self.sent[phase, where] += sum(t.nbytes for root, t in parcels if position != root)


class PaddedCollectives(Collectives):
    """Even operations inside the node, every rail's range padded to the largest: one all-gather and one reduce-scatter,
    for which libraries have their best algorithms, at the price of the padding and of a copy on either side."""

    def gather(self, unit: Unit) -> None:
        wire, spans = self.wires.get("gather"), unit.layout.rail_spans
        if wire is None or not spans:
            return
        size, longest = self._place("gather")[1], max(b - a for _, (a, b) in spans)
        mine, every = unit.flat.new_empty(longest), unit.flat.new_empty(size * longest)
        for local, (a, b) in spans:
            if local == self._local:
                mine[: b - a].copy_(unit.flat[a:b])
        self.sent["gather", "intra_node"] += (size - 1) * mine.nbytes
        wire.all_gather(every, mine)
        for local, (a, b) in spans:
            if local != self._local:
                unit.flat[a:b].copy_(every[local * longest : local * longest + b - a])

    def reduce_in_node(self, unit: Unit, contrib: torch.Tensor) -> dict[int, Ranges]:
        wire, spans = self.wires.get("reduce"), unit.layout.rail_spans
        if wire is None or not spans:
            return super().reduce_in_node(unit, contrib)
        size, longest = self._place("reduce")[1], max(b - a for _, (a, b) in spans)
        mine, parts = contrib.new_empty(longest), contrib.new_zeros(size * longest)
        for local, (a, b) in spans:
            parts[local * longest : local * longest + b - a].copy_(contrib[a:b])
        self.sent["reduce", "intra_node"] += (size - 1) * mine.nbytes
        wire.reduce_scatter(mine, parts)
        return {self._node: {(a, b): mine[: b - a] for a, b in unit.layout.collected(self.rank)}}


def check_transport(topology: Topology, transport: str) -> None:
    """Raise ValueError unless ``transport`` is one of TRANSPORTS and can carry the topology."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport = {transport!r}: must be one of {', '.join(map(repr, TRANSPORTS))}")
    if transport in ("collective", "padded") and topology.irregularity:
        raise ValueError(f'transport = {transport!r} needs another topology ({topology.irregularity}): use "auto"')


def connect(
    topology: Topology,
    ranks: Sequence[int],
    rank: int,
    device: torch.device,
    transport: str = "auto",
    timeout: datetime.timedelta | None = None,
) -> tuple[Transport, Control, list[dist.ProcessGroup]]:
    """Make the process groups of a data-parallel group and what moves units over them. A collective.

    Args:
        ranks: the group's global ranks, ascending. ``rank``: this one's index in it.
        transport: "auto" takes collectives on NCCL where the topology is regular, messages elsewhere: gloo's
            collectives send more bytes than messages do, and the order of their sums is not ours.
    """
    if topology.world == 1:
        return PointToPoint(topology, rank, {}), Control(), []
    nccl, board = on_nccl(device), Board(ranks, rank, timeout)
    if transport == "auto":
        transport = "collective" if nccl and not topology.irregularity else "point_to_point"
        if nccl and topology.irregularity:
            logger.warning("units travel point to point, which is slow on many nodes: %s", topology.irregularity)
    if transport == "point_to_point":
        groups = {phase: make_group(ranks, device, timeout) for phase in PHASES}
        control = Control([groups["reduce_between_nodes"]], board)
        family: type[PointToPoint | Collectives] = PointToPoint
    else:
        node = [ranks[r] for r in topology.node_members(topology.node(rank))]
        rail = [ranks[topology.relay(rank, n)] for n in range(topology.nodes)]
        members = {"gather": node, "reduce": node, "reduce_between_nodes": rail, "publish": rail}
        groups = {p: make_group(members[p], device, timeout) for p in PHASES if len(members[p]) > 1}
        control = Control([groups[p] for p in ("reduce", "reduce_between_nodes") if p in groups], board)
        family = PaddedCollectives if transport == "padded" else Collectives
    wires: dict[str, Wire] = {phase: GroupWire(group, device) for phase, group in groups.items()}
    return family(topology, rank, wires), control, list(groups.values())


def _everywhere(ranges: Ranges) -> Callable[[int], Ranges]:
    return lambda _peer: ranges


def _buffers(unit: Unit, ranges: Sequence[tuple[int, int]]) -> Ranges:
    return {(a, b): torch.empty(b - a, dtype=unit.reduce_dtype, device=unit.device) for a, b in ranges}


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Left to right, into the first: ((t0 + t1) + t2) + ..."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total
