"""Collectives against messages: the same updates, the same operations on every rank, each range once over each link.

Two ranks add up alike in any order, so where nodes and rails have two the results are equal to the last bit; elsewhere
gloo's own order counts as equal within the limits of `parity_table`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from torchtitan_dmuon.runtime.transport import Collectives, check_transport
from torchtitan_dmuon.runtime.unit import Unit
from torchtitan_dmuon.runtime.wires import LogEntry, Logged, Parcel
from torchtitan_dmuon.topology import Topology, UnitLayout

from .parity_table import Case, NotEqual, check, check_equal, run_cases
from .ranks import run_ranks
from .test_runtime import _log_of, backward, masters, merged, own, same, tower

# ---- on ranks ----


@pytest.mark.parametrize(
    "base", [Case(2, 2, 2, micros=3, steps=2), Case(1, 4, 2, micros=3, steps=2).but(holders="node")]
)
def test_bit_equal_where_two_ranks_sum(base: Case) -> None:
    variants = [
        base.but(transport="collective"),
        base.but(transport="collective", reshard_after_forward=False),
        base.but(transport="padded", prefetch=2),
    ]
    first, *others = run_cases([base, *variants])
    for variant, other in zip(variants, others):
        check_equal(first, other, f"{dict(variant.options)} against messages")


def test_replica_ownership_is_bit_equal() -> None:
    base = Case(2, 2, 2, steps=2).but(ownership="replica")
    first, other = run_cases([base, base.but(transport="collective")])
    check_equal(first, other, "collectives against messages")


@pytest.mark.parametrize("mesh", [(4, 1, 1), (1, 4, 4)])  # four ranks on a rail, four in the node
def test_as_one_process_where_the_library_orders_the_sums(mesh: tuple[int, int, int]) -> None:
    cases = [replace(Case(*mesh), micros=3, steps=2).but(transport=t) for t in ("collective", "padded")]
    for case, outcome in zip(cases, run_cases(cases)):
        check(case, outcome)


def test_a_range_summed_on_the_wrong_rank_is_seen() -> None:
    sound = UnitLayout.rails.func
    case = Case(2, 2, 2, steps=1).but(transport="collective")
    UnitLayout.rails.func = lambda self: tuple(  # type: ignore[attr-defined]
        tuple((1 - node, span) for node, span in rail) for rail in sound(self)
    )
    try:
        outcome = run_cases([case])[0]
    finally:
        UnitLayout.rails.func = sound  # type: ignore[attr-defined]
    with pytest.raises(NotEqual):
        check(case, outcome)


@pytest.mark.parametrize("uneven", ["all but one", "at once, a layer"])
def test_a_rank_that_skips_units_joins_the_same_collectives(uneven: str) -> None:
    options = {"transport": "collective"}
    even, logs = (run_ranks(_log_of, 4, 2, 2, u, options, ranks_per_node=2, limit=20) for u in ("nothing", uneven))
    for rank in range(4):
        for phase, operations in even[rank][0].items():
            assert operations and logs[rank][0][phase] == operations, f"rank {rank}, {phase}"
            peer = rank ^ 1 if phase in ("gather", "reduce") else rank ^ 2
            assert logs[peer][0][phase] == operations, f"ranks {rank} and {peer}, {phase}"
    assert not same(merged([m for _, m in logs]), merged([m for _, m in even]))


def _reads(rank: int, world: int) -> tuple[list[str], bool]:
    """Which methods read a value on the host in a step with a clip, and whether the unused layer alone kept still."""
    model = tower()
    owned = own(model, 2, 1, per_node=1, transport="collective")
    matrix = owned.build_optimizer(torch.optim.SGD, lr=0.1, weight_decay=0.1, foreach=True)
    backward(model, 0, rank)
    matrix.step()  # the first one agrees on an order
    before = masters(owned)
    seen: list[str] = []

    def noted(name: str) -> Callable[..., object]:
        method = getattr(torch.Tensor, name)
        return lambda self, *args: (seen.append(name), method(self, *args))[1]

    sound = {n: getattr(torch.Tensor, n) for n in ("item", "tolist", "__bool__", "__float__", "__int__")}
    for name in sound:
        setattr(torch.Tensor, name, noted(name))
    backward(model, 1, rank, skip=("1",))
    owned.clip_grad_norm_(model, 1e-3)
    matrix.step()
    for name, method in sound.items():
        setattr(torch.Tensor, name, method)
    after = masters(owned)
    kept = all(torch.equal(before[k], after[k]) == ("layers.1" in k) for k in after)
    owned.close()
    return seen, kept


def test_the_host_reads_the_device_once_in_a_step() -> None:
    assert run_ranks(_reads, 2, ranks_per_node=1) == [(["tolist"], True)] * 2


def _two_backwards(rank: int, world: int) -> list[bool]:
    """Both go between nodes, the first still on its way when the second reduces. Are the sums those without delay?"""
    found = []
    for transport in ("point_to_point", "collective"):
        grads: list[dict[str, torch.Tensor]] = []
        for delay in (0.0, 0.1):
            model = tower(1)  # fewer units than node sums may be in flight
            owned = own(model, 2, 2, transport=transport)
            level_2 = owned.engine.transport.reduce_between_nodes
            owned.engine.transport.reduce_between_nodes = lambda *a, go=level_2, d=delay: (time.sleep(d), go(*a))[1]
            backward(model, 0, rank)
            backward(model, 1, rank)
            owned.engine.finish_reduces()
            grads.append({k: p.grad.clone() for u in owned.engine.units for k, p in u.master_of.items()})
            owned.close()
        found.append(same(*grads))
    return found


def test_a_reduce_adds_nothing_to_sums_that_are_on_their_way() -> None:
    assert run_ranks(_two_backwards, 4, ranks_per_node=2, limit=30) == [[True, True]] * 4


# ---- in one process ----


@pytest.mark.parametrize(
    ("topology", "reason"),
    [
        (Topology(12, 4, 8), "the last node has 4 ranks, the others 8"),
        (Topology(8, 2, 4), "shard groups of 2 ranks are not nodes of 4"),
        (Topology(16, 16, 8), "shard groups of 16 ranks are not nodes of 8; holders = 'node' would do"),
        (Topology(8, 4, 4, routing="flat"), "routing is 'flat', not 'two_level'"),
    ],
)
def test_topologies_that_collectives_cannot_carry_say_why(topology: Topology, reason: str) -> None:
    assert topology.irregularity == reason
    with pytest.raises(ValueError, match="needs another topology"):
        check_transport(topology, "collective")
    with pytest.raises(ValueError, match="must be one of 'auto', 'point_to_point', 'collective', 'padded'"):
        check_transport(topology, "nccl")
    check_transport(topology, "auto")


def test_regular_topologies() -> None:
    for topology in (Topology(256, 8, 8), Topology(16, 16, 8, holders="node"), Topology(4, 4, 8), Topology(4, 1, 1)):
        check_transport(topology, "collective")


class Meeting:
    """An in-process group: what its ranks bring is exchanged when all have come."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._brought: list[Sequence[Parcel]] = [()] * size

    def meet(self, position: int, parcels: Sequence[Parcel], act: Callable[[list[Sequence[Parcel]]], list]) -> None:
        """``act`` makes this rank's new values from what all brought; they are written when all have read."""
        self._brought[position] = parcels
        self._barrier.wait(30)
        kinds = {tuple((root, t.numel(), t.dtype) for root, t in each) for each in self._brought}
        values = act(list(self._brought))
        self._barrier.wait(30)
        assert len(kinds) == 1, f"ranks of one group issued different operations: {kinds}"
        for (_, tensor), value in zip(parcels, values, strict=True):
            tensor.copy_(value)
        self._barrier.wait(30)


class MeetingWire:
    def __init__(self, meeting: Meeting, position: int) -> None:
        self._meeting, self._position = meeting, position

    def broadcast(self, parcels: Sequence[Parcel]) -> None:
        roots = [root for root, _ in parcels]
        self._meeting.meet(self._position, parcels, lambda b: [b[r][i][1].clone() for i, r in enumerate(roots)])

    def reduce(self, parcels: Sequence[Parcel]) -> None:
        def sums(brought: list[Sequence[Parcel]]) -> list[torch.Tensor]:  # undefined but at the root
            at_root = [root == self._position for root, _ in parcels]
            return [
                sum(b[i][1] for b in brought) if here else torch.tensor(torch.nan) for i, here in enumerate(at_root)
            ]

        self._meeting.meet(self._position, parcels, sums)


def _one_step(layout: UnitLayout, rank: int, transport: Collectives) -> str:
    """Gather, both levels, publish; what is wrong."""
    truth = torch.arange(layout.numel, dtype=torch.float32)
    unit = Unit(0, "unit", [], layout, rank, torch.device("cpu"), torch.float32, torch.float32)
    for (a, b), tensor in unit.held.items():
        tensor.copy_(truth[a:b])
    unit.allocate()
    unit.flat.fill_(torch.nan)
    unit.fill_held()
    transport.gather(unit)
    if not torch.equal(unit.flat, truth):
        return "gather"
    contrib = truth + rank
    sums = {n: {s: t.clone() for s, t in r.items()} for n, r in transport.reduce_in_node(unit, contrib).items()}
    world = layout.topology.world
    totals = transport.reduce_between_nodes(unit, sums)
    expected = {(a, b): truth[a:b] * world + world * (world - 1) // 2 for a, b in layout.rooted(rank)}
    if totals.keys() != expected.keys() or any(not torch.equal(totals[s], expected[s]) for s in totals):
        return "reduce"
    for (a, _), tensor in unit.held.items():
        tensor.fill_(torch.nan)
        for start, stop in layout.rooted(rank):
            tensor[start - a : stop - a] = -truth[start:stop]
    transport.spread(unit, unit.held, "publish")
    return "" if all(torch.equal(t, -truth[a:b]) for (a, b), t in unit.held.items()) else "publish"


@pytest.mark.parametrize(("shard", "holders"), [(8, "shard_group"), (64, "node")])
def test_256_ranks_get_every_piece_once_over_every_link(shard: int, holders: str) -> None:
    topology = Topology(256, shard, 8, holders=holders)
    roots = [(37 * i) % 256 for i in range(7)] + [8, 16]
    layout = UnitLayout.build(topology, [(f"piece {i}", 5 + i, root) for i, root in enumerate(roots)])
    node_groups = {p: [Meeting(8) for _ in range(32)] for p in ("gather", "reduce")}
    rail_groups = {p: [Meeting(32) for _ in range(8)] for p in ("reduce_between_nodes", "publish")}
    logs: list[list[LogEntry]] = [[] for _ in range(256)]
    transports, found = [], [""] * 256
    for rank in range(256):
        node, local = divmod(rank, 8)
        inner = {p: MeetingWire(groups[node], local) for p, groups in node_groups.items()}
        inner |= {p: MeetingWire(groups[local], node) for p, groups in rail_groups.items()}
        wires = {p: Logged(p, logs[rank], wire) for p, wire in inner.items()}
        transports.append(Collectives(topology, rank, wires))

    def run(rank: int) -> None:
        found[rank] = "raised"
        found[rank] = _one_step(layout, rank, transports[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(256)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [""] * 256

    per_rank = [Counter((phase, op, root, numel) for phase, op, root, numel, _ in log) for log in logs]
    for rank, operations in enumerate(per_rank):
        local = rank % 8
        rail = {(topology.node(root), b - a) for root, (a, b) in layout.ranges.items() if topology.local(root) == local}
        moved = {(root, numel) for phase, _, root, numel in operations if phase == "publish"}
        assert moved == rail and set(operations.values()) == {1}
    sent: Counter[tuple[str, str]] = Counter()
    for transport in transports:
        sent.update(transport.sent)
    size = 4 * layout.numel
    assert sent == {  # into every rank of a node but the holder, and over every link of a rail but one
        ("gather", "intra_node"): 7 * 32 * size,
        ("reduce", "intra_node"): 7 * 32 * size,
        ("reduce_between_nodes", "inter_node"): 31 * size,
        ("publish", "inter_node"): 31 * size,
    }
