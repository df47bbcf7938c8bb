"""Nodes, shard groups and the routes that gathers, reduces and publishes follow. Pure: no torch, no process group.

Decides: which rank holds a copy of a piece, which ranks relay it, who sends what to whom in which stage, and how a
unit's buffers are laid out so that almost every message is one contiguous range. Does not decide ownership
(`ownership.py`) and moves no data (`runtime/`). Keeps invariant 4 (the bytes of a step follow from the messages listed
here) and the summation order of invariant 1: by local rank inside a node, then by node, on every route.

Ranks are indices 0..world-1 within the data-parallel group; rank r * S + s is member s of shard group r.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

# A piece's slot in a buffer ends on a multiple of this many elements (16 bytes of bf16). At least one element after the
# piece is spare: in a reduce buffer it counts the ranks that used the piece.
SLOT_ELEMENTS = 8

ROUTINGS = ("two_level", "flat")
HOLDERS = ("shard_group", "node")
OWNERSHIPS = ("global", "replica")


@dataclass(frozen=True)
class Message:
    """Elements [start, stop) of a unit's buffer, to or from ``peer``."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True)
class Stage:
    """What one rank sends and receives at once. Both ends list a pair's messages in the same order."""

    sends: tuple[Message, ...] = ()
    recvs: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Routes:
    """Stages of one unit on one rank, by phase."""

    gather: tuple[Stage, ...]
    reduce: tuple[Stage, ...]
    publish: tuple[Stage, ...]


@dataclass(frozen=True)
class Topology:
    """The ranks of one data-parallel group, grouped by shard group and by node.

    ``ranks_per_node`` larger than the world means one node. The last node may be smaller than the others: relays then
    take local rank modulo the node's size.
    """

    world: int
    shard_size: int
    ranks_per_node: int
    routing: str = "two_level"
    holders: str = "shard_group"
    ownership: str = "global"

    def __post_init__(self) -> None:
        if self.world < 1 or self.shard_size < 1 or self.world % self.shard_size:
            raise ValueError(f"world size {self.world} is not a positive multiple of the shard size {self.shard_size}")
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be at least 1, got {self.ranks_per_node}")
        for name, value, choices in (
            ("routing", self.routing, ROUTINGS),
            ("holders", self.holders, HOLDERS),
            ("ownership", self.ownership, OWNERSHIPS),
        ):
            if value not in choices:
                raise ValueError(f"{name} = {value!r}: must be one of {', '.join(map(repr, choices))}")

    @property
    def replicas(self) -> int:
        return self.world // self.shard_size

    @property
    def nodes(self) -> int:
        return -(-self.world // self.ranks_per_node)

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def local(self, rank: int) -> int:
        return rank % self.ranks_per_node

    def node_members(self, node: int) -> range:
        return range(node * self.ranks_per_node, min((node + 1) * self.ranks_per_node, self.world))

    def shard_group(self, rank: int) -> range:
        first = rank - rank % self.shard_size
        return range(first, first + self.shard_size)

    @cached_property
    def cells(self) -> tuple[range, ...]:
        """Groups of ranks that gather from each other, each with one holder of every piece: shard groups or nodes."""
        if self.holders == "node":
            return tuple(self.node_members(n) for n in range(self.nodes))
        return tuple(self.shard_group(r * self.shard_size) for r in range(self.replicas))

    def cell(self, rank: int) -> range:
        return self.node_members(self.node(rank)) if self.holders == "node" else self.shard_group(rank)

    def holder(self, root: int, cell: range) -> int:
        """The member of ``cell`` that keeps the compute-dtype copy of what ``root`` owns."""
        if root in cell:
            return root
        index = root - self.cell(root).start
        return cell[index % len(cell)]

    def relay(self, root: int, node: int) -> int:
        """The rank of ``node`` on the same rail (local rank) as ``root``."""
        members = self.node_members(node)
        return members[self.local(root) % len(members)]

    def masters_of(self, rank: int) -> tuple[int, ...]:
        """Roots whose masters ``rank`` keeps: itself, or with replica ownership the roots on its shard index."""
        if self.ownership == "global":
            return (rank,)
        return tuple(r * self.shard_size + rank % self.shard_size for r in range(self.replicas))

    @cached_property
    def irregularity(self) -> str:
        """Why collectives inside nodes and along rails cannot carry the routes; empty where they can: every cell is one
        node, and all nodes have as many ranks."""
        if self.routing != "two_level":
            return f"routing is {self.routing!r}, not 'two_level'"
        if self.world % self.ranks_per_node and self.nodes > 1:
            return f"the last node has {self.world % self.ranks_per_node} ranks, the others {self.ranks_per_node}"
        if any(cell != self.node_members(self.node(cell[0])) for cell in self.cells):
            hint = "; holders = 'node' would do" if self.shard_size > self.ranks_per_node else ""
            return f"shard groups of {self.shard_size} ranks are not nodes of {self.ranks_per_node}{hint}"
        return ""

    def layout_key(self, root: int) -> tuple[int, int, int]:
        """Sort key of owners in a buffer; makes the ranges of a rail and of a holder contiguous on regular meshes."""
        index, local = root - self.cell(root).start, self.local(root)
        return (min(index, local), max(index, local), root)

    # ---- routes: edges (src, dst) of one root's data, per stage, limited to those that touch ``rank`` ----

    def gather_edges(self, root: int, rank: int) -> list[list[tuple[int, int]]]:
        """Holder to every member of the cell of ``rank``; through one relay per node when the cell spans nodes."""
        cell = self.cell(rank)
        source = self.holder(root, cell)
        if self.routing == "flat" or self.node(cell[0]) == self.node(cell[-1]):
            return [[(source, d) for d in cell if d != source and rank in (source, d)]]
        first: list[tuple[int, int]] = []
        second: list[tuple[int, int]] = []
        for node in range(self.node(cell[0]), self.node(cell[-1]) + 1):
            members = [m for m in self.node_members(node) if m in cell]
            entry = source if self.node(source) == node else members[self.local(root) % len(members)]
            if entry != source and rank in (source, entry):
                first.append((source, entry))
            second.extend((entry, d) for d in members if d != entry and rank in (entry, d))
        return [first, second]

    def reduce_edges(self, root: int, rank: int) -> list[list[tuple[int, int]]]:
        """Every rank to the collector on its node, collectors to the root; or every rank straight to the root."""
        if self.routing == "flat":
            sources = range(self.world) if rank == root else (rank,)
            return [[(s, root) for s in sources if s != root], []]
        node = self.node(rank)
        collector = root if node == self.node(root) else self.relay(root, node)
        sources = self.node_members(node) if rank == collector else (rank,)
        first = [(s, collector) for s in sources if s != collector]
        if rank == root:
            second = [(self.relay(root, n), root) for n in range(self.nodes) if n != node]
        else:
            second = [(rank, root)] if rank == collector else []
        return [first, second]

    def publish_edges(self, root: int, rank: int) -> list[list[tuple[int, int]]]:
        """Root to the holders of the other cells: each node is entered once, the rest fans out inside the node."""
        targets = [h for c in self.cells if (h := self.holder(root, c)) != root]
        if self.routing == "flat":
            return [[(root, h) for h in targets if rank in (root, h)]]
        by_node: dict[int, list[int]] = defaultdict(list)
        for h in targets:
            by_node[self.node(h)].append(h)
        first: list[tuple[int, int]] = []
        second: list[tuple[int, int]] = []
        for node, holders in by_node.items():
            # On the root's rail where the node has several holders, so that its links share the load.
            relay = self.relay(root, node)
            entry = root if node == self.node(root) else relay if relay in holders else holders[0]
            if entry != root and rank in (root, entry):
                first.append((root, entry))
            second.extend((entry, h) for h in holders if h != entry and rank in (entry, h))
        return [first, second]


@dataclass(frozen=True)
class UnitLayout:
    """Where each piece of a unit lies in the unit's buffers: owner by owner, so that a route's messages are ranges.

    ``slots`` maps a piece key to its first element; ``ranges`` maps a root owner to its [start, stop).
    """

    topology: Topology
    slots: Mapping[str, int]
    sizes: Mapping[str, int]
    ranges: Mapping[int, tuple[int, int]]
    numel: int
    order: tuple[str, ...] = field(repr=False, default=())

    @staticmethod
    def build(topology: Topology, pieces: Iterable[tuple[str, int, int]]) -> UnitLayout:
        """``pieces``: (key, elements, root owner) in the unit's own order."""
        by_root: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for key, numel, root in pieces:
            by_root[root].append((key, numel))
        slots, sizes, ranges, offset = {}, {}, {}, 0
        for root in sorted(by_root, key=topology.layout_key):
            start = offset
            for key, numel in by_root[root]:
                slots[key], sizes[key] = offset, numel
                offset += (numel + SLOT_ELEMENTS) // SLOT_ELEMENTS * SLOT_ELEMENTS
            ranges[root] = (start, offset)
        return UnitLayout(topology, slots, sizes, ranges, offset, tuple(slots))

    def _stages(self, edges_of, rank: int, count: int) -> tuple[Stage, ...]:
        sends: list[dict[int, list[tuple[int, int]]]] = [defaultdict(list) for _ in range(count)]
        recvs: list[dict[int, list[tuple[int, int]]]] = [defaultdict(list) for _ in range(count)]
        for root, span in self.ranges.items():
            for i, edges in enumerate(edges_of(root, rank)):
                for src, dst in edges:
                    if src == rank:
                        sends[i][dst].append(span)
                    else:
                        recvs[i][src].append(span)
        return tuple(Stage(_messages(s), _messages(r)) for s, r in zip(sends, recvs))

    def gather(self, rank: int) -> tuple[Stage, ...]:
        return self._stages(self.topology.gather_edges, rank, 2)

    def reduce(self, rank: int) -> tuple[Stage, ...]:
        """Stage 0: inside nodes (or everything, when flat). Stage 1: between nodes."""
        return self._stages(self.topology.reduce_edges, rank, 2)

    def publish(self, rank: int) -> tuple[Stage, ...]:
        return self._stages(self.topology.publish_edges, rank, 2)

    def routes(self, rank: int) -> Routes:
        return Routes(self.gather(rank), self.reduce(rank), self.publish(rank))

    # ---- ranges of a regular topology, the same on every rank ----

    @cached_property
    def rails(self) -> tuple[tuple[tuple[int, tuple[int, int]], ...], ...]:
        """By local rank: (owner's node, its range), in the order of the buffer."""
        rails: list[list[tuple[int, tuple[int, int]]]] = [[] for _ in self.topology.node_members(0)]
        for root, span in self.ranges.items():
            rails[self.topology.local(root)].append((self.topology.node(root), span))
        return tuple(map(tuple, rails))

    @cached_property
    def rail_spans(self) -> tuple[tuple[int, tuple[int, int]], ...]:
        """(local rank, what it holds, collects and relays on every node): one range each; idle rails are left out."""
        return tuple((local, (rail[0][1][0], rail[-1][1][1])) for local, rail in enumerate(self.rails) if rail)

    # ---- ranges of one rank ----

    def held(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Ranges of which ``rank`` keeps the compute-dtype copy between steps."""
        cell = self.topology.cell(rank)
        return merge_ranges(span for root, span in self.ranges.items() if self.topology.holder(root, cell) == rank)

    def mastered(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Ranges of which ``rank`` keeps the fp32 master."""
        return merge_ranges(self.ranges[r] for r in self.topology.masters_of(rank) if r in self.ranges)

    def rooted(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Ranges whose gradients are summed on ``rank``."""
        return merge_ranges([self.ranges[rank]] if rank in self.ranges else [])

    def collected(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Ranges whose node-level partial sums form on ``rank``: two_level collectors, or roots when flat."""
        t = self.topology
        if t.routing == "flat":
            return self.rooted(rank)
        node = t.node(rank)
        return merge_ranges(
            span
            for root, span in self.ranges.items()
            if rank == (root if t.node(root) == node else t.relay(root, node))
        )


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sorted, with adjacent ranges joined."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif stop > start:
            merged.append((start, stop))
    return tuple(merged)


def _messages(by_peer: Mapping[int, Sequence[tuple[int, int]]]) -> tuple[Message, ...]:
    return tuple(Message(peer, *span) for peer in sorted(by_peer) for span in merge_ranges(by_peer[peer]))


@dataclass(frozen=True)
class Traffic:
    """Elements one rank sends, split by whether the peer is on the same node."""

    intra_node: int
    inter_node: int


def traffic(layout: UnitLayout, phase: str, rank: int) -> Traffic:
    """Elements ``rank`` sends in one ``phase`` ("gather", "reduce_1", "reduce_2", "publish") of one unit."""
    if phase in ("reduce_1", "reduce_2"):
        stages = layout.reduce(rank)[phase == "reduce_2" :][:1]
    else:
        stages = layout.gather(rank) if phase == "gather" else layout.publish(rank)
    near = far = 0
    for stage in stages:
        for m in stage.sends:
            if layout.topology.node(m.peer) == layout.topology.node(rank):
                near += m.stop - m.start
            else:
                far += m.stop - m.start
    return Traffic(near, far)
