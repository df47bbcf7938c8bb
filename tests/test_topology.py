"""Routes: every piece reaches every rank that needs it exactly once, and bytes are those of DESIGN section 6.

The routes of whole worlds are followed in one process: who has what before a stage, what the stage moves, who has what
after it. The counters of a real run are compared with the pure prediction.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import torchtitan_dmuon as dmuon
from torchtitan_dmuon.topology import SLOT_ELEMENTS, Message, Stage, Topology, UnitLayout, merge_ranges, traffic

from .ranks import run_ranks

# ---- following a route ----


def layout_of(topology: Topology, roots: list[int], numel: int = 5) -> UnitLayout:
    """A unit of one piece per entry of ``roots``, of growing size."""
    return UnitLayout.build(topology, [(f"p{i}[000000]", numel + 3 * i, root) for i, root in enumerate(roots)])


def rounds(layout: UnitLayout, phase: str) -> list[list[Stage]]:
    """[stage][rank]."""
    by_rank = [getattr(layout, phase)(rank) for rank in range(layout.topology.world)]
    return [list(stage) for stage in zip(*by_rank, strict=True)]


def spans_of(layout: UnitLayout, message: Message) -> list[int]:
    """The roots whose ranges a message carries; it never cuts one."""
    roots = [r for r, (a, b) in layout.ranges.items() if message.start < b and a < message.stop]
    covered = merge_ranges(layout.ranges[r] for r in roots)
    assert covered == ((message.start, message.stop),), f"{message} cuts the ranges {covered}"
    return roots


def pairs(layout: UnitLayout, stage: list[Stage]) -> list[tuple[int, int, int]]:
    """(source, destination, root) moved by one stage, after checking that both ends list the same in the same order."""
    sent = {(src, m.peer): [] for src, s in enumerate(stage) for m in s.sends}
    received = {(m.peer, dst): [] for dst, s in enumerate(stage) for m in s.recvs}
    for rank, each in enumerate(stage):
        for m in each.sends:
            assert m.peer != rank, "a rank sends to itself"
            sent[rank, m.peer].append((m.start, m.stop))
        for m in each.recvs:
            received[m.peer, rank].append((m.start, m.stop))
    assert sent == received
    return [(src, m.peer, root) for src, s in enumerate(stage) for m in s.sends for root in spans_of(layout, m)]


def spread(layout: UnitLayout, phase: str, has: list[set[int]]) -> tuple[list[set[int]], Counter[tuple[int, int]]]:
    """Copies after a gather or publish from ``has`` (by rank: roots whose data it has), and entries of (root, node)."""
    entries: Counter[tuple[int, int]] = Counter()
    for stage in rounds(layout, phase):
        moved = pairs(layout, stage)
        for src, _, root in moved:
            assert root in has[src], f"{phase}: rank {src} passes on {root} before it has it"
        for src, dst, root in moved:
            assert root not in has[dst], f"{phase}: rank {dst} gets {root} twice"
            has[dst].add(root)
            if layout.topology.node(src) != layout.topology.node(dst):
                entries[root, layout.topology.node(dst)] += 1
    return has, entries


def held_roots(layout: UnitLayout, rank: int) -> set[int]:
    return {root for a, b in layout.held(rank) for root in spans_of(layout, Message(0, a, b))}


def check_gather(layout: UnitLayout) -> None:
    t = layout.topology
    has, entries = spread(layout, "gather", [held_roots(layout, r) for r in range(t.world)])
    assert all(each == set(layout.ranges) for each in has)
    if t.routing == "two_level":
        cells = Counter(node for cell in t.cells for node in {t.node(r) for r in cell})
        assert all(count <= cells[node] for (_, node), count in entries.items())
    if t.holders == "node":
        assert not entries


def check_publish(layout: UnitLayout) -> None:
    t = layout.topology
    start = [{r} & set(layout.ranges) for r in range(t.world)]
    has, entries = spread(layout, "publish", start)
    for rank in range(t.world):
        assert held_roots(layout, rank) <= has[rank]
        if t.routing == "flat":
            assert has[rank] == held_roots(layout, rank)
    if t.routing == "two_level":
        assert all(count == 1 for count in entries.values())
    for root in layout.ranges:  # one holder in each cell
        assert all(sum(root in held_roots(layout, r) for r in cell) == 1 for cell in t.cells)


def check_reduce(layout: UnitLayout) -> None:
    """Every rank's contribution is summed exactly once at the root."""
    t = layout.topology
    sums = [{root: Counter([rank]) for root in layout.ranges} for rank in range(t.world)]
    crossings: Counter[tuple[int, int]] = Counter()
    for index, stage in enumerate(rounds(layout, "reduce")):
        arrived = []
        for src, dst, root in pairs(layout, stage):
            arrived.append((dst, root, sums[src].pop(root)))
            if t.node(src) != t.node(dst):
                crossings[root, t.node(src)] += 1
                assert index == 1 or t.routing == "flat", "level 1 leaves the node"
        for dst, root, contribution in arrived:
            sums[dst][root] = sums[dst].get(root, Counter()) + contribution
    everyone = Counter(range(t.world))
    assert all(sums[root][root] == everyone for root in layout.ranges)
    if t.routing == "two_level":
        for root in layout.ranges:
            assert all(crossings[root, node] == (node != t.node(root)) for node in range(t.nodes))


def check_all(layout: UnitLayout) -> None:
    check_gather(layout)
    check_publish(layout)
    check_reduce(layout)


# ---- meshes ----


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    shard = draw(st.integers(1, 6))
    return Topology(
        world=shard * draw(st.integers(1, 4)),
        shard_size=shard,
        ranks_per_node=draw(st.integers(1, 9)),
        routing=draw(st.sampled_from(["two_level", "flat"])),
        holders=draw(st.sampled_from(["shard_group", "node"])),
    )


@settings(max_examples=150, deadline=None)
@given(topologies(), st.data())
def test_any_mesh_moves_everything_exactly_once(topology: Topology, data: st.DataObject) -> None:
    roots = data.draw(st.lists(st.integers(0, topology.world - 1), min_size=1, max_size=10))
    check_all(layout_of(topology, roots))


@pytest.mark.parametrize("routing", ["two_level", "flat"])
@pytest.mark.parametrize("holders", ["shard_group", "node"])
@pytest.mark.parametrize(
    ("world", "shard", "per_node"), [(256, 8, 8), (256, 64, 8), (1024, 8, 8), (1024, 32, 8), (12, 12, 8), (12, 4, 8)]
)
def test_large_and_ragged_worlds(world: int, shard: int, per_node: int, holders: str, routing: str) -> None:
    topology = Topology(world, shard, per_node, routing, holders)
    assert topology.nodes == -(-world // per_node)
    check_all(layout_of(topology, [(37 * i) % world for i in range(7 if world < 1000 else 3)]))


@pytest.mark.parametrize("change", ["lost", "twice", "cut"])
def test_a_wrong_route_is_seen(change: str) -> None:
    class Wrong(UnitLayout):
        def gather(self, rank: int) -> tuple[Stage, ...]:
            stages = list(super().gather(rank))
            if rank == 0:
                m = stages[0].sends[0]
                sends = {
                    "lost": stages[0].sends[1:],
                    "twice": (m, *stages[0].sends),
                    "cut": (Message(m.peer, m.start, m.stop - 8), *stages[0].sends[1:]),
                }[change]
                stages[0] = Stage(sends, stages[0].recvs)
            return tuple(stages)

    right = layout_of(Topology(4, 4, 2), [0, 1, 2, 3], numel=16)
    check_gather(right)
    with pytest.raises(AssertionError):
        check_gather(Wrong(right.topology, right.slots, right.sizes, right.ranges, right.numel, right.order))


@pytest.mark.parametrize(
    ("shard", "holders"), [(8, "shard_group"), (64, "shard_group"), (64, "node"), (1, "shard_group")]
)
def test_messages_are_one_range_for_each_peer_on_regular_meshes(shard: int, holders: str) -> None:
    layout = layout_of(Topology(64, shard, 8, "two_level", holders), list(range(64)))
    for phase in ("gather", "reduce", "publish"):
        for stage in rounds(layout, phase):
            for each in stage:
                for messages in (each.sends, each.recvs):
                    repeated = {p: n for p, n in Counter(m.peer for m in messages).items() if n > 1}
                    assert not repeated, f"{phase}: messages per peer {repeated}"


def test_layout_covers_every_piece_once_with_a_spare_element() -> None:
    layout = layout_of(Topology(4, 2, 2), [3, 0, 0, 2, 1], numel=8)
    taken: Counter[int] = Counter()
    for key, start in layout.slots.items():
        assert start % SLOT_ELEMENTS == 0
        taken.update(range(start, start + layout.sizes[key] + 1))
    assert max(taken.values()) == 1 and max(taken) < layout.numel


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((6, 4, 2), "world size 6 is not a positive multiple of the shard size 4"),
        ((4, 2, 0), "ranks_per_node must be at least 1, got 0"),
        ((4, 2, 2, "ring"), "routing = 'ring': must be one of 'two_level', 'flat'"),
        ((4, 2, 2, "flat", "rank"), "holders = 'rank': must be one of 'shard_group', 'node'"),
    ],
)
def test_bad_topologies_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(*arguments)


# ---- bytes ----


def mean_elements(topology: Topology, phase: str) -> tuple[float, float, int]:
    """Elements a rank sends inside and between nodes, on average, for one unit with a piece on every rank; and P."""
    layout = UnitLayout.build(topology, [(f"p{r}", 7999, r) for r in range(topology.world)])
    sent = [traffic(layout, phase, rank) for rank in range(topology.world)]
    near, far = (sum(getattr(s, where) for s in sent) / topology.world for where in ("intra_node", "inter_node"))
    return near, far, 7999 * topology.world


@pytest.mark.parametrize(("nodes", "per_node"), [(8, 8), (4, 2), (2, 8), (1, 8), (8, 1)])
@pytest.mark.parametrize("mesh", ["hsdp", "node holders", "shard_group holders"])
def test_bytes_of_every_phase_are_those_of_the_table(mesh: str, nodes: int, per_node: int) -> None:
    m, g = nodes, per_node
    shard, holders = {"hsdp": (g, "shard_group"), "node holders": (m * g, "node")}.get(mesh, (m * g, "shard_group"))
    topology = Topology(m * g, shard, g, "two_level", holders)
    inside, between = (g - 1) / g, (m - 1) / m / g
    table = {
        "gather": (inside, between if mesh == "shard_group holders" else 0),
        "reduce_1": (inside, 0),
        "reduce_2": (0, between),
        "publish": (0, 0 if mesh == "shard_group holders" else between),
    }
    for phase, (near, far) in table.items():
        found_near, found_far, p = mean_elements(topology, phase)
        assert found_near == pytest.approx(near * p, rel=0.01, abs=1e-9), phase
        assert found_far == pytest.approx(far * p, rel=0.01, abs=1e-9), phase


def test_flat_routes_send_more_between_nodes() -> None:
    """What two levels are for: flat, each of a node's ranks sends its own contribution across."""
    for phase in ("reduce_1", "gather"):
        near, far, p = mean_elements(Topology(32, 32, 8, "flat"), phase)
        assert far == pytest.approx(p * 24 / 32, rel=0.01) and near == pytest.approx(p * 7 / 32, rel=0.01)


@pytest.mark.parametrize("shard", [1, 4, 8])
def test_what_enters_a_node_is_shared_by_its_ranks(shard: int) -> None:
    layout = UnitLayout.build(Topology(64, shard, 8), [(f"p{r}", 7999, r) for r in range(64)])
    entering: Counter[int] = Counter()
    for rank in range(64):
        for stage in layout.publish(rank):
            entering[rank] += sum(m.stop - m.start for m in stage.recvs if m.peer // 8 != rank // 8)
    assert max(entering.values()) == min(entering.values()) > 0


# ---- a real run's counters ----

LAYERS, SIDE, MICROS = 2, 32, 2


def _counted(rank: int, world: int, replicas: int, shards: int, options: dict[str, Any]) -> tuple[dict, dict, int]:
    """(measured, predicted) bytes sent by this rank in one step by (phase, where), and the owned elements."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(4))) for _ in range(LAYERS))
    )
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("dp_replicate", "dp_shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"select": "weight", "units": model, "ranks_per_node": 2, **options}
    owned = dmuon.own_matrices(model, mesh, mp_policy=policy, **options)
    matrix = owned.build_optimizer(functools.partial(torch.optim.SGD, lr=0.1))
    engine = owned.engine
    for step in range(2):
        if step == 1:
            engine.await_publishes()
            engine.sent.clear()
        for micro in range(MICROS):
            owned.set_is_last_backward(micro == MICROS - 1)
            model(torch.ones(2, SIDE, dtype=torch.bfloat16)).sum().backward()
        matrix.step()
    engine.await_publishes()
    gathers = MICROS * (2 if options.get("reshard_after_forward", True) else 1)
    bytes_per_element = {  # each phase's element size times how often it runs in a step
        ("gather", "gather"): 2 * gathers,
        ("reduce", "reduce_1"): 4 * MICROS,
        ("reduce_between_nodes", "reduce_2"): 4,
        ("publish", "publish"): 2,
    }
    predicted: Counter[tuple[str, str]] = Counter()
    for (name, phase), factor in bytes_per_element.items():
        for unit in engine.units:
            t = traffic(unit.layout, phase, rank)
            predicted[name, "intra_node"] += factor * t.intra_node
            predicted[name, "inter_node"] += factor * t.inter_node
    numel = sum(p.numel for p in owned.plan.pieces)
    measured = dict(engine.sent)
    owned.close()
    return measured, {k: v for k, v in predicted.items() if v}, numel


@pytest.mark.parametrize(
    ("replicas", "shards", "options", "copies"),
    [
        (2, 2, {}, 1),
        (2, 2, {"reshard_after_forward": False, "prefetch": 2}, 1),
        (1, 4, {}, 2 * MICROS),
        (1, 4, {"holders": "node"}, 1),
        (1, 4, {"routing": "flat", "prefetch": 0}, None),
        (4, 1, {}, 1),
    ],
)
def test_counters_of_a_run_equal_the_prediction(replicas: int, shards: int, options: dict, copies: int | None) -> None:
    """``copies``: how often a compute-dtype copy crosses to the other node in one step, by publish or gather."""
    found = run_ranks(_counted, 4, replicas, shards, options, ranks_per_node=2)
    for measured, predicted, _ in found:
        assert {k: v for k, v in measured.items() if v} == predicted
    if copies is None:
        return
    # The table of section 6 with 4 equal matrices a unit on 4 owners; slots are padded by 8 elements of 1024.
    between = sum(v for measured, *_ in found for (_, where), v in measured.items() if where == "inter_node") / 4
    nodes, per_node, numel = 2, 2, found[0][2]
    assert between == pytest.approx((4 + 2 * copies) * (numel / per_node) * (nodes - 1) / nodes, rel=0.01)
