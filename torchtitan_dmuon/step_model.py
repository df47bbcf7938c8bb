"""One training step of each variant as tasks: what runs on which lane, what it waits for, how long it takes alone.

Decides: the order of a step, as `runtime/engine.py`, `schedule.py` and `optimizer.py` issue it (and FSDP2, for the
variants that are FSDP2's), and the seconds of each task from a cluster's rates. Does not decide owners, routes or
bytes: they are the plan's. Keeps: ranks that do alike are simulated once (one timeline of computation, one lane inside
a node, one lane between nodes for each rail, which is what ranks of equal local rank form); where they do not, the
busiest counts.

Shape suffix: W ranks of the data-parallel group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from .costs import ELEMENTWISE_BYTES
from .events import Schedule, Task
from .footprint import MASTER_BYTES, Group, Options, fsdp_traffic
from .loads import LoadCounter, Loads
from .newton_schulz import flops
from .ownership import OwnershipPlan
from .runtime.engine import CONTRIBUTIONS_IN_FLIGHT, NODE_SUMS_IN_FLIGHT
from .topology import Topology, UnitLayout

ADAMW_BYTES = 28  # of memory traffic per element: parameter, gradient and moments read, parameter and moments written
STEPS = 3  # simulated; the last is the one reported: publishes of the step before reach into it


@dataclass(frozen=True)
class Cluster:
    """Rates of one GPU: FLOP/s, bytes/s (per direction for links) as reached, not as printed; seconds per operation."""

    name: str
    ranks_per_node: int
    training_flops: float
    update_flops: float
    memory_rate: float
    memory_bytes: float
    near_rate: float
    near_latency: float
    far_rate: float
    far_latency: float
    far_shared: bool = False
    blocking_all_reduce: bool = False  # FSDP2's own all-reduce stops the computation, as on gloo
    far_burst_bytes: float = 0.0  # that a link between nodes passes at once after it was idle


@dataclass(frozen=True)
class Work:
    """What a step computes: forward FLOPs of each group on one rank and micro-batch; ``recompute``: the share of the
    forward that backward repeats."""

    groups: Sequence[Group]
    forward_flops: Sequence[float]
    recompute: float
    options: Options

    @property
    def elements(self) -> int:
        return sum(g.owned + g.rest for g in self.groups)


@dataclass(frozen=True)
class Placed:
    """A plan on a topology with the layouts of its units in ``groups``."""

    plan: OwnershipPlan
    topology: Topology
    groups: Sequence[Group]
    sync: bool = False
    ring: bool = False  # by collectives that pass ranges on (`footprint.uses_collectives`), else point to point
    overlap: bool = False  # point to point with all units under way that may be in flight: the best case of that route

    @cached_property
    def counter(self) -> LoadCounter:
        return LoadCounter(self.topology)

    def loads(self, layout: UnitLayout) -> dict[str, Loads]:
        """Elements by phase, as this route moves them."""
        return self.counter.chains(layout) if self.ring else self.counter.loads(layout)


@dataclass
class Simulated:
    """Seconds of the last step, and where computation waited in it."""

    step_seconds: float
    update_seconds: float
    exposed: Mapping[str, float]
    tasks: list[Task] = field(repr=False)


class StepModel:
    """Tasks of one variant on one cluster."""

    def __init__(self, cluster: Cluster, work: Work, topology: Topology) -> None:
        self.cluster, self.work, self.topology = cluster, work, topology
        self.options = work.options
        self.rails = min(topology.ranks_per_node, topology.world)
        burst = cluster.far_burst_bytes / (cluster.far_rate * (self.rails if cluster.far_shared else 1))
        self.schedule = Schedule(lambda port: 0.0 if port == "inside" else burst)
        self._micro = replace(work.options, micro_batches=1, reshard=False)  # FSDP2's bytes of one pass
        local_W = torch.tensor([topology.local(r) for r in range(topology.world)])
        self._by_rail = [torch.nonzero(local_W == rail).flatten() for rail in range(self.rails)]

    # ---- seconds ----

    def near_seconds(self, elements: int, size: float) -> float:
        return elements * size / self.cluster.near_rate

    def far_seconds(self, elements: int, size: float) -> float:
        """Of bytes over one rank's link; where a node's ranks share it, of all its ranks' bytes over all of it."""
        return elements * size / self.cluster.far_rate

    def _ports(self, near: float, far: float) -> dict[object, float]:
        """Shares of all links: the longer part of an operation that uses both kinds takes all of its kind."""
        longest = max(near, far)
        ports: dict[object, float] = {"inside": near / longest} if near > 0 else {}
        if far > 0:
            ends = range(self.topology.nodes if self.cluster.far_shared else self.rails)
            ports |= {(way, end): far / longest for end in ends for way in ("in", "out")}
        return ports

    def _by_node(self, elements_W: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks of each node."""
        nodes_W = torch.arange(self.topology.world) // self.topology.ranks_per_node
        return torch.zeros(self.topology.nodes, dtype=torch.int64).index_add_(0, nodes_W, elements_W)

    def exchange(self, name: str, lane: str, loads: Loads, size: float, after: Iterable[Task | None]) -> Task:
        """An operation of all ranks of a node (or of several): as long as its busiest link."""
        busiest = loads.busiest_far
        if self.cluster.far_shared and busiest:
            busiest = max(int(self._by_node(x).max()) for x in loads.parts()[1::2]) // self.rails
        near, far = self.near_seconds(loads.busiest_near, size), self.far_seconds(busiest, size)
        latency = self.cluster.near_latency if near else 0.0
        latency += self.cluster.far_latency if far else 0.0
        return self.schedule.add(name, lane, max(near, far), after, self._ports(near, far), latency)

    # ---- FSDP2's part of a group ----

    def fsdp(
        self, phase: str, name: str, elements: int, after: Iterable[Task | None], bytes_each: int = 0
    ) -> Task | None:
        """All-gather, reduce-scatter or all-reduce of ``elements``; None where there is nothing to send."""
        if not elements:
            return None
        c, w = bytes_each or self.options.compute_bytes, self.options.reduce_bytes
        loads = fsdp_traffic(elements, self.topology, replace(self._micro, compute_bytes=c, reduce_bytes=w))[phase]
        if not loads.near and not loads.far:
            return None
        blocks = phase == "all_reduce" and self.cluster.blocking_all_reduce
        return self.exchange(name, "compute" if blocks else f"fsdp {phase}", loads, 1, after)

    # ---- a step ----

    def run(
        self,
        own: Placed | None,
        update: Callable[[int, Task], tuple[Task, list[list[Task]]]],
    ) -> Simulated:
        """Several steps, one after the other. ``update(step, norm)`` adds the update and returns the task after which
        the next forward may begin, and for each group the publishes that its next gather waits for."""
        work, options = self.work, self.options
        groups, count = work.groups, len(work.groups)
        placed = own.groups if own is not None else groups
        loads = [own.loads(g.layout) if own is not None and g.layout is not None else None for g in placed]
        shares = [None if own is None or g.layout is None else own.counter.shares(g.layout) for g in placed]
        rest = [g.rest + (0 if loads[i] is not None else g.owned) for i, g in enumerate(groups)]
        add, c, w = self.schedule.add, options.compute_bytes, options.reduce_bytes
        ready: Task | None = None
        published: list[list[Task]] = [[] for _ in groups]
        ends, waits = [], []
        forward_rate, memory_rate = self.cluster.training_flops, self.cluster.memory_rate

        for step in range(STEPS):
            first = len(self.schedule.tasks)
            begin_with = ready
            for micro in range(options.micro_batches):
                is_last = micro == options.micro_batches - 1
                done: list[Task | None] = [None] * count
                # Forward: a group's gather is issued when the computation of the one before it begins.
                for i in range(count):
                    asked = done[i - 1 - options.prefetch] if i > options.prefetch else begin_with
                    needs: list[Task | None] = [begin_with if i == 0 else done[i - 1]]
                    if (load := loads[i]) is not None:
                        held = [*published[i], asked] if micro == 0 else [asked]
                        needs.append(self.exchange(f"gather {i}", "gather", load["gather"], c, held))
                    needs.append(self.fsdp("gather", f"all-gather {i}", rest[i], [asked]))
                    done[i] = add(
                        f"forward {i}", "compute", work.forward_flops[i] / forward_rate, needs, info=("gather", i, step)
                    )
                # Backward: again gathered, reduced as soon as it is over; few gradient buffers and node sums may be in
                # flight.
                back: list[Task | None] = [None] * count
                level_1: list[Task | None] = [None] * count
                level_2: list[list[Task | None]] = [[] for _ in range(count)]
                scattered: list[Task | None] = [None] * count
                last: list[Task | None] = []
                for i in reversed(range(count)):
                    ahead = i + 1 + options.prefetch
                    asked = back[ahead] if ahead < count else done[count - 1]
                    needs = [back[i + 1] if i + 1 < count else done[count - 1]]
                    if options.reshard and (load := loads[i]) is not None:
                        needs.append(self.exchange(f"gather {i}", "gather", load["gather"], c, [asked]))
                    if options.reshard and i < count - 1:
                        needs.append(self.fsdp("gather", f"all-gather {i}", rest[i], [asked]))
                    busy = i + 1 + CONTRIBUTIONS_IN_FLIGHT
                    needs += [level_1[busy]] if busy < count else []
                    busy = i + 1 + NODE_SUMS_IN_FLIGHT
                    needs += level_2[busy] if busy < count else []
                    needs += [scattered[i + 2]] if i + 2 < count else []
                    seconds = (2 + work.recompute) * work.forward_flops[i] / forward_rate
                    back[i] = add(f"backward {i}", "compute", seconds, needs, info=("reduce", i, step))
                    scattered[i] = self.fsdp("reduce_scatter", f"reduce-scatter {i}", rest[i], [back[i]])
                    last.append(self.fsdp("all_reduce", f"all-reduce {i}", rest[i], [back[i], scattered[i]]))
                    last.append(scattered[i])
                    if (load := loads[i]) is not None:
                        share = shares[i]
                        assert own is not None and share is not None
                        task = self.exchange(f"reduce {i}", "reduce", load["reduce_1"], w, [back[i]])
                        members = self.rails if own.topology.routing == "two_level" else own.topology.world
                        most = int(share.collected_W.max()) * members
                        if (
                            own.ring and (layout := placed[i].layout) is not None
                        ):  # every rank adds to what it passes on
                            most = layout.numel
                        # What was received is read, the total read and written.
                        added = most * 3 * w / memory_rate
                        level_1[i] = add(f"sum {i}", "reduce", added, [task])
                        if is_last or not options.defer_reduce:
                            level_2[i] = self._between(
                                own, f"level 2 {i}", "level 2", load["reduce_2"], w, [level_1[i]]
                            )
                            last += level_2[i]
                        else:
                            last.append(level_1[i])
                begin_with = back[0]
            norm = add(
                "norm", "compute", 0.0, [back[0], *last], latency=2 * self.cluster.far_latency, info=("reduce", 0, step)
            )
            ready, published = update(step, norm)
            ends.append(ready)
            waits.append((first, len(self.schedule.tasks)))
        self.schedule.run()
        begin, end = ends[-2].end, ends[-1].end
        tasks = self.schedule.tasks[waits[-1][0] : waits[-1][1]]
        return Simulated(end - begin, end - norm.end, self._exposed(tasks, begin), self.schedule.tasks)

    def _between(
        self,
        own: Placed,
        name: str,
        lane: str,
        loads: Loads,
        size: int,
        after: Sequence[Task | None],
        relay: Sequence[Sequence[Task]] = (),
    ) -> list[Task | None]:
        """An operation along each rail: every rank of it takes part, in order, until the busiest of them is through."""
        made: list[Task | None] = []
        nodes, is_reduce = own.topology.nodes, lane == "level 2"
        for rail, at in enumerate(self._by_rail):
            sent, received = int(loads.sent_far_W[at].max()), int(loads.received_far_W[at].max())
            near = self.near_seconds(int(torch.maximum(loads.sent_near_W[at], loads.received_near_W[at]).max()), size)
            if not sent and not received and not near:
                continue
            waits = [*after, *(relay[rail] if relay else ())]
            key: tuple[object, ...] = (name, rail) if own.overlap else (lane, rail)  # overlap: a lane for each unit
            latency, summed = self.cluster.far_latency, received * 3 * MASTER_BYTES
            if own.ring:  # in pieces: the depth of the pipeline costs latency alone
                latency, summed = latency * nodes, received * 3 * size
            task: Task | None
            if self.cluster.far_shared and (sent or received):
                roots_W = (loads.received_far_W if is_reduce else loads.sent_far_W)[at]
                by_root = [(int(n), x) for n, x in enumerate(roots_W.tolist()) if x]
                if own.ring:
                    by_root = [(-1, max(sent, received))]
                task = self._through_ports(own, name, key, by_root, is_reduce, size, waits, latency)
            else:
                longest = max(sent, received)
                ports: dict[object, float] = {}
                if longest:
                    ports = {("in", rail): received / longest, ("out", rail): sent / longest}
                if own.overlap:  # the busiest rank's own port
                    busiest = int(at[int(torch.maximum(loads.sent_far_W[at], loads.received_far_W[at]).argmax())])
                    ports = {(*port, busiest): share for port, share in ports.items()}  # type: ignore[misc]
                task = self.schedule.add(name, key, self.far_seconds(longest, size), waits, ports, latency)
            tail = near + (summed / self.cluster.memory_rate if is_reduce else 0.0)
            made.append(self.schedule.add(f"{name}, inside", key, tail, [task]) if tail else task)
        return made

    def _through_ports(
        self,
        own: Placed,
        name: str,
        key: tuple[object, ...],
        by_root: Sequence[tuple[int, int]],
        is_reduce: bool,
        size: int,
        waits: Sequence[Task | None],
        latency: float,
    ) -> Task:
        """The same where the ranks of a node share one port, which a rail alone may fill. ``by_root``: (node, elements)
        of each owner's messages, which follow those of the operation before, whatever other owners wait for; node -1
        stands for a ring through all nodes."""
        nodes = own.topology.nodes
        flows = []
        for root, elements in by_root:
            ports: dict[object, float] = {(way, n): 1.0 for n in range(nodes) for way in ("in", "out")}
            if root >= 0:
                mine, theirs = ("in", "out") if is_reduce else ("out", "in")
                ports = {(mine, root): 1.0, **{(theirs, n): 1 / (nodes - 1) for n in range(nodes) if n != root}}
            seconds = self.far_seconds(elements, size) / self.rails
            flows.append(self.schedule.add(name, (*key, root), seconds, waits, ports, latency))
        return self.schedule.add(f"{name}, all", key, 0.0, flows)

    def _exposed(self, tasks: Sequence[Task], begin: float) -> dict[str, float]:
        """Seconds that the computation of these tasks stood still, by what it waited for last."""
        found = {"gather": 0.0, "reduce": 0.0, "publish": 0.0}
        at = begin
        for task in (t for t in tasks if t.lane == "compute"):
            gap = task.start - at
            if gap > 0 and task.info is not None:
                cause = max((t for t in task.after), key=lambda t: t.end)
                kind = task.info[0]
                if kind == "reduce" and ("gather" in cause.name):
                    kind = "gather"
                if kind == "gather":
                    behind = [t.end for t in cause.after if t.name.startswith("publish")]
                    late = min(gap, max(0.0, max(behind, default=at) - at))
                    found["publish"] += late
                    gap -= late
                found[kind] += gap
            at = max(at, task.end)
        return found

    # ---- updates ----

    def adamw_seconds(self, elements: int) -> float:
        return elements / self.topology.shard_size * ADAMW_BYTES / self.cluster.memory_rate

    def update_seconds(self, flop: float, elements: int) -> float:
        return flop / self.cluster.update_flops + elements * ELEMENTWISE_BYTES / self.cluster.memory_rate


def _nothing_published(groups: Sequence[Group]) -> list[list[Task]]:
    return [[] for _ in groups]


def simulate_adamw(cluster: Cluster, work: Work, topology: Topology) -> Simulated:
    """Stock FSDP2 in HSDP, its all-reduces beside the backward, AdamW for everything."""
    model = StepModel(cluster, work, topology)

    def update(step: int, norm: Task) -> tuple[Task, list[list[Task]]]:
        task = model.schedule.add("update", "compute", model.adamw_seconds(work.elements), [norm])
        return task, _nothing_published(work.groups)

    return model.run(None, update)


def simulate_gather_muon(cluster: Cluster, work: Work, topology: Topology) -> Simulated:
    """FSDP2; each update input is gathered in bf16 and every rank repeats all Newton-Schulz work, in turn."""
    model = StepModel(cluster, work, topology)
    rest = sum(g.rest for g in work.groups)
    total = sum(ns_flops(g, work.options) for g in work.groups)
    owned = sum(g.owned for g in work.groups)

    def update(step: int, norm: Task) -> tuple[Task, list[list[Task]]]:
        task: Task | None = norm
        for i, group in enumerate(work.groups):
            if group.owned:
                gather = model.fsdp("gather", f"gather update {i}", group.owned, [task], bytes_each=2)
                seconds = ns_flops(group, work.options) / cluster.update_flops
                task = model.schedule.add(f"update {i}", "compute", seconds, [task, gather])
        elementwise = owned / topology.shard_size * ELEMENTWISE_BYTES / cluster.memory_rate
        seconds = elementwise + model.adamw_seconds(rest)
        return model.schedule.add("update rest", "compute", seconds, [task]), _nothing_published(work.groups)

    simulated = model.run(None, update)
    assert total > 0
    return simulated


def simulate_dist_muon(cluster: Cluster, work: Work, topology: Topology, largest_flops: float) -> Simulated:
    """FSDP2; each shard group updates every matrix once, ``largest_flops`` on its busiest rank: update inputs go to
    owners and updates come back in fp32, two buckets at a time, so that the longer of both counts."""
    model = StepModel(cluster, work, topology)
    owned, rest = sum(g.owned for g in work.groups), sum(g.rest for g in work.groups)
    loads = fsdp_traffic(owned, topology, replace(work.options, micro_batches=1, reshard=False))["reduce_scatter"]

    def update(step: int, norm: Task) -> tuple[Task, list[list[Task]]]:
        size = MASTER_BYTES / work.options.reduce_bytes  # the loads are bytes in the reduce dtype
        there = model.exchange("updates to owners and back", "fsdp all-to-all", loads * 2, size, [norm])
        elementwise = owned / topology.shard_size * ELEMENTWISE_BYTES / cluster.memory_rate
        seconds = largest_flops / cluster.update_flops + elementwise
        ns = model.schedule.add("update", "compute", seconds, [norm])
        last = model.schedule.add("update rest", "compute", model.adamw_seconds(rest), [ns, there])
        return last, _nothing_published(work.groups)

    return model.run(None, update)


def simulate_dmuon(cluster: Cluster, work: Work, placed: Placed) -> Simulated:
    """Owners update in forward order; each unit is published along the rails when its owners have updated it."""
    topology, options = placed.topology, work.options
    model = StepModel(cluster, work, topology)
    rest = sum(g.rest for g in placed.groups)
    clock = dict.fromkeys(range(topology.world), 0.0)
    updated: list[list[float]] = []  # unit -> seconds after the norm at which each rail's owners have updated it
    for group in placed.groups:
        for piece in group.pieces:
            seconds = model.update_seconds(
                sum(flops(m, n, options.settings, options.device_type) for m, n in piece.matrices()), piece.numel
            )
            owner = placed.plan.owner_of(piece.key)
            if topology.ownership == "replica":
                for rank in topology.masters_of(owner):
                    clock[rank] += seconds
            else:
                clock[owner] += seconds
        roots = set() if group.layout is None else set(group.layout.ranges)
        updated.append(
            [max((clock[r] for r in roots if topology.local(r) == rail), default=0.0) for rail in range(model.rails)]
        )
    slowest = max(clock.values())

    def update(step: int, norm: Task) -> tuple[Task, list[list[Task]]]:
        add = model.schedule.add
        own = add("update", "compute", slowest, [norm])
        last: Task = add("update rest", "compute", model.adamw_seconds(rest), [own])
        published: list[list[Task]] = []
        for i, group in enumerate(placed.groups):
            made: list[Task | None] = []
            if group.layout is not None and topology.ownership == "global":
                loads = placed.loads(group.layout)["publish"]
                owners = [[add(f"updated {i}", None, updated[i][rail], [norm])] for rail in range(model.rails)]
                made = model._between(placed, f"publish {i}", "publish", loads, options.compute_bytes, (), owners)
            published.append([t for t in made if t is not None])
        if placed.sync:
            last = add(
                "publishes over", "compute", 0.0, [last, *(t for ts in published for t in ts)], info=("publish",)
            )
        return last, published

    return model.run(placed, update)


def ns_flops(group: Group, options: Options) -> int:
    """Newton-Schulz FLOPs of a group's matrices, once."""
    return sum(flops(m, n, options.settings, options.device_type) for p in group.pieces for m, n in p.matrices())
