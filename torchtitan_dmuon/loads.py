"""Elements that every rank sends and receives in each phase of one unit, for whole worlds at once. Pure.

Decides nothing: it counts what the routes of `topology.py` move. `topology.traffic` lists one rank's messages; here
roots that lie alike in their cell and node share one count, so that thousands of ranks and units take seconds. Keeps:
the sums are those of `topology.traffic`, element by element (invariant 4), which the tests compare.

Shape suffix: W ranks of the data-parallel group.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from .topology import Topology, UnitLayout

PHASES = ("gather", "reduce_1", "reduce_2", "publish")


@dataclass(frozen=True)
class Loads:
    """Elements per rank [W] int64: near within the rank's node, far to or from other nodes."""

    sent_near_W: torch.Tensor
    sent_far_W: torch.Tensor
    received_near_W: torch.Tensor
    received_far_W: torch.Tensor

    @staticmethod
    def none(world: int) -> Loads:
        return Loads(*(torch.zeros(world, dtype=torch.int64) for _ in range(4)))

    def __add__(self, other: Loads) -> Loads:
        return Loads(*(a + b for a, b in zip(self.parts(), other.parts(), strict=True)))

    def __mul__(self, factor: int) -> Loads:
        return Loads(*(a * factor for a in self.parts()))

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.sent_near_W, self.sent_far_W, self.received_near_W, self.received_far_W

    @property
    def near(self) -> int:
        """Elements sent inside nodes, of all ranks."""
        return int(self.sent_near_W.sum())

    @property
    def far(self) -> int:
        """Elements sent between nodes, of all ranks."""
        return int(self.sent_far_W.sum())

    @property
    def busiest_far(self) -> int:
        """Elements on the busiest rank's link between nodes, in its busier direction."""
        return int(torch.maximum(self.sent_far_W, self.received_far_W).max())

    @property
    def busiest_near(self) -> int:
        return int(torch.maximum(self.sent_near_W, self.received_near_W).max())


@dataclass(frozen=True)
class Shares:
    """Elements of one unit per rank [W] int64: held between steps, collected at level 1, rooted (summed here at level
    2), mastered (rooted, or with replica ownership one in each replica)."""

    held_W: torch.Tensor
    collected_W: torch.Tensor
    rooted_W: torch.Tensor
    mastered_W: torch.Tensor


class LoadCounter:
    """Counts the units of one topology. What depends on the ranks alone is derived once."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._node_W = torch.tensor([topology.node(r) for r in range(topology.world)])
        self._members_W = torch.tensor([len(topology.node_members(n)) for n in range(topology.nodes)])[self._node_W]
        # A rank's group: the members of its cell on its node.
        groups: dict[tuple[int, int], int] = {}
        cell_of, cell_nodes = [], []
        for r in range(topology.world):
            cell = topology.cell(r)
            cell_of.append(groups.setdefault((cell.start, topology.node(r)), len(groups)))
            cell_nodes.append(topology.node(cell[-1]) - topology.node(cell[0]) + 1)
        self._group_W = torch.tensor(cell_of)
        self._group_size_W = torch.bincount(self._group_W)[self._group_W]
        self._cell_nodes_W = torch.tensor(cell_nodes)
        self._cell_size_W = torch.tensor([len(topology.cell(r)) for r in range(topology.world)])
        self._holders = cache(self._find_holders)
        self._relays = cache(self._find_relays)
        self._entries = cache(self._find_entries)
        self._publish = cache(self._find_publish)

    # ---- what roots that lie alike have in common ----

    def kind(self, root: int) -> tuple[int, int]:
        """(place in its cell, local rank): all that a route takes from a root, beside the root itself."""
        return root - self.topology.cell(root).start, self.topology.local(root)

    @cached_property
    def _alike(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Kind -> a rank of that kind, and one on another node where there is one."""
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for r in range(self.topology.world):
            known = found.get(k := self.kind(r), ())
            if not known or (len(known) == 1 and self.topology.node(r) != self.topology.node(known[0])):
                found[k] = (*known, r)
        return found

    def _find_holders(self, kind: tuple[int, int]) -> torch.Tensor:
        root = self._alike[kind][0]
        return torch.tensor([self.topology.holder(root, cell) for cell in self.topology.cells])

    def _find_relays(self, local: int) -> torch.Tensor:
        return torch.tensor([self.topology.relay(local, n) for n in range(self.topology.nodes)])

    def _find_entries(self, kind: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(where a gather enters each node of each cell, the sources among them)."""
        t = self.topology
        sources = self._holders(kind).tolist()
        entries = []
        for cell, source in zip(t.cells, sources, strict=True):
            for node in range(t.node(cell[0]), t.node(cell[-1]) + 1):
                members = [m for m in t.node_members(node) if m in cell]
                entries.append(source if t.node(source) == node else members[kind[1] % len(members)])
        return torch.tensor(entries), torch.tensor(sources)

    def _find_publish(self, kind: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(holders, their number on each node, where a publish from elsewhere enters each node or -1)."""
        t = self.topology
        holders = self._holders(kind)
        entry = torch.full((t.nodes,), -1)
        for root in self._alike[kind]:
            for _, dst in t.publish_edges(root, root)[0]:
                if t.node(dst) != t.node(root):
                    entry[t.node(dst)] = dst
        return holders, torch.bincount(self._node_W[holders], minlength=t.nodes), entry

    # ---- one unit ----

    def shares(self, layout: UnitLayout) -> Shares:
        """What each rank keeps of a unit, in elements of the layout (the spare ones behind each piece included)."""
        t, world = self.topology, self.topology.world
        held, collected, rooted = (torch.zeros(world, dtype=torch.int64) for _ in range(3))
        by_kind: dict[tuple[int, int], int] = defaultdict(int)
        by_local: dict[int, int] = defaultdict(int)
        for root, (start, stop) in layout.ranges.items():
            rooted[root] += stop - start
            by_kind[self.kind(root)] += stop - start
            by_local[t.local(root)] += stop - start
        for kind, elements in by_kind.items():
            held[self._holders(kind)] += elements
        if t.routing == "flat":
            collected = rooted.clone()
        else:
            for local, elements in by_local.items():
                collected[self._relays(local)] += elements
        mastered = rooted
        if t.ownership == "replica":
            mastered = rooted.view(t.replicas, t.shard_size).sum(0).repeat(t.replicas)
        return Shares(held, collected, rooted, mastered)

    def loads(self, layout: UnitLayout) -> dict[str, Loads]:
        """Phase -> elements sent and received. Gather once, reduces and publish once; replica ownership publishes
        nothing, and its reduce spreads sums to the other replicas' owners (:meth:`spread`)."""
        shares = self.shares(layout)
        first, second = self._reduce(layout, shares)
        return {
            "gather": self._gather(layout, shares),
            "reduce_1": first,
            "reduce_2": second,
            "publish": self.spread(layout),
        }

    def chains(self, layout: UnitLayout) -> dict[str, Loads]:
        """:meth:`loads` where a range passes from rank to rank, inside nodes by local rank and along rails by node:
        from its source on for a gather or publish, to its root at last for a reduce. Every link carries it once. For
        regular topologies; in total as much as :meth:`loads`."""
        t, shares = self.topology, self.shares(layout)
        shape = (t.nodes, -1)
        held, collected, rooted = (x.view(shape) for x in (shares.held_W, shares.collected_W, shares.rooted_W))
        total, none = torch.full_like(held, layout.numel), torch.zeros_like(held)

        def chain(
            all_of: torch.Tensor, at: torch.Tensor, axis: int, is_reduce: bool
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """(sent, received): the ends of a range's chain leave one of them out."""
            if is_reduce:
                return all_of - at, all_of - at.roll(1, axis)
            return all_of - at.roll(-1, axis), all_of - at

        def far(is_reduce: bool) -> tuple[torch.Tensor, torch.Tensor]:
            return chain(collected, rooted, 0, is_reduce)

        def near(at: torch.Tensor, is_reduce: bool) -> tuple[torch.Tensor, torch.Tensor]:
            return chain(total, at, 1, is_reduce)

        parts = {
            "gather": (near(held, False), (none, none)),
            "reduce_1": (near(collected, True), (none, none)),
            "reduce_2": ((none, none), far(True)),
            "publish": ((none, none), far(False)),
        }
        return {
            phase: Loads(sent.flatten(), far_sent.flatten(), received.flatten(), far_received.flatten())
            for phase, ((sent, received), (far_sent, far_received)) in parts.items()
        }

    def _gather(self, layout: UnitLayout, shares: Shares) -> Loads:
        t, held = self.topology, shares.held_W
        total = layout.numel
        if t.routing == "flat" or int(self._cell_nodes_W.max()) == 1:
            around = self._sum_by(self._group_W, held)
            return Loads(
                held * (self._group_size_W - 1),
                held * (self._cell_size_W - self._group_size_W),
                around - held,
                total - around,
            )
        sent_far, received_far, entered = (torch.zeros(t.world, dtype=torch.int64) for _ in range(3))
        for kind, elements in self._by_kind(layout).items():
            entries, sources = self._entries(kind)
            entered[entries] += elements
            received_far[entries] += elements
            received_far[sources] -= elements
            sent_far[sources] += elements * (self._cell_nodes_W[sources] - 1)
        return Loads(entered * (self._group_size_W - 1), sent_far, total - entered, received_far)

    def _reduce(self, layout: UnitLayout, shares: Shares) -> tuple[Loads, Loads]:
        t, total = self.topology, layout.numel
        collected, rooted = shares.collected_W, shares.rooted_W
        if t.routing == "flat":
            around = self._sum_by(self._node_W, rooted)
            first = Loads(
                around - rooted, total - around, rooted * (self._members_W - 1), rooted * (t.world - self._members_W)
            )
            return first, Loads.none(t.world)
        none = torch.zeros(t.world, dtype=torch.int64)
        first = Loads(total - collected, none, collected * (self._members_W - 1), none)
        # What a rank collects and does not root itself has its root on another node.
        return first, Loads(none, collected - rooted, none, rooted * (t.nodes - 1))

    def spread(self, layout: UnitLayout) -> Loads:
        """From each root to the holders of the other cells: a publish, or the spread of sums to other replicas."""
        t = self.topology
        parts = [torch.zeros(t.world, dtype=torch.int64) for _ in range(4)]
        sent_near, sent_far, received_near, received_far = parts
        at_kind: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for root, (start, stop) in layout.ranges.items():
            at_kind[self.kind(root)].append((root, stop - start))
        for kind, roots in at_kind.items():
            holders, count_by_node, entry = self._publish(kind)
            node_of_holder = self._node_W[holders]
            own_by_node = torch.zeros(t.nodes, dtype=torch.int64)
            total = 0
            for root, elements in roots:
                node = t.node(root)
                own_by_node[node] += elements
                total += elements
                here = int(count_by_node[node])
                sent_near[root] += elements * (here - 1)
                received_near[root] -= elements  # counted below with the other holders of its node
                away = len(holders) - here if t.routing == "flat" else int((count_by_node > 0).sum()) - 1
                sent_far[root] += elements * away
            received_near[holders] += own_by_node[node_of_holder]
            elsewhere = total - own_by_node
            if t.routing == "flat":
                received_far[holders] += elsewhere[node_of_holder]
                continue
            entered = (entry >= 0) & (elsewhere > 0)
            at, elements_in = entry[entered], elsewhere[entered]
            received_far[at] += elements_in
            sent_near[at] += elements_in * (count_by_node[entered] - 1)
            received_near[holders] += elsewhere[node_of_holder]
            received_near[at] -= elements_in
        return Loads(*parts)

    def _by_kind(self, layout: UnitLayout) -> dict[tuple[int, int], int]:
        found: dict[tuple[int, int], int] = defaultdict(int)
        for root, (start, stop) in layout.ranges.items():
            found[self.kind(root)] += stop - start
        return found

    @staticmethod
    def _sum_by(group_W: torch.Tensor, values_W: torch.Tensor) -> torch.Tensor:
        """For each rank the sum over the ranks of its group."""
        sums = torch.zeros(int(group_W.max()) + 1, dtype=torch.int64).index_add_(0, group_W, values_W)
        return sums[group_W]
