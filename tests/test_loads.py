"""Counts of whole worlds at once equal the messages listed rank by rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_dmuon.loads import PHASES, LoadCounter
from torchtitan_dmuon.topology import Topology, UnitLayout, traffic

worlds = st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 4), (6, 2), (6, 3), (8, 2), (8, 4), (8, 8), (12, 4), (12, 6)])


@settings(max_examples=150, deadline=None)
@given(
    worlds,
    st.integers(1, 9),
    st.sampled_from(["two_level", "flat"]),
    st.sampled_from([("shard_group", "global"), ("node", "global"), ("shard_group", "replica")]),
    st.lists(st.integers(0, 11), min_size=1, max_size=9),
)
def test_counts_equal_the_messages_of_every_rank(world, per_node, routing, mode, roots) -> None:
    topology = Topology(*world, per_node, routing, *mode)
    pieces = [(f"p{i}[000000]", 5 + 3 * i, root % topology.world) for i, root in enumerate(roots)]
    layout = UnitLayout.build(topology, pieces)
    counter = LoadCounter(topology)
    loads, shares = counter.loads(layout), counter.shares(layout)
    for phase in PHASES:
        got = loads[phase]
        expected = [traffic(layout, phase, r) for r in range(topology.world)]
        assert got.sent_near_W.tolist() == [t.intra_node for t in expected], phase
        assert got.sent_far_W.tolist() == [t.inter_node for t in expected], phase
        received = [[0] * topology.world, [0] * topology.world]
        for r in range(topology.world):
            if phase in ("reduce_1", "reduce_2"):
                stages = layout.reduce(r)[phase == "reduce_2" :][:1]
            else:
                stages = layout.gather(r) if phase == "gather" else layout.publish(r)
            for m in (m for stage in stages for m in stage.recvs):
                received[topology.node(m.peer) != topology.node(r)][r] += m.stop - m.start
        assert got.received_near_W.tolist() == received[0], phase
        assert got.received_far_W.tolist() == received[1], phase
    for name in ("held", "collected", "rooted", "mastered"):
        ranges = [getattr(layout, name)(r) for r in range(topology.world)]
        got_W = getattr(shares, f"{name}_W")
        assert got_W.tolist() == [sum(b - a for a, b in spans) for spans in ranges], name
    assert isinstance(loads["gather"].sent_far_W, torch.Tensor)


@pytest.mark.parametrize(
    "world, shard, per_node, holders",
    [
        (8, 4, 4, "shard_group"),
        (6, 2, 2, "shard_group"),
        (12, 12, 4, "node"),
        (4, 4, 4, "shard_group"),
        (4, 1, 1, "node"),
    ],
)
def test_chains_pass_every_range_once_over_every_link(world, shard, per_node, holders) -> None:
    topology = Topology(world, shard, per_node, holders=holders)
    roots = [0, world - 1, 1, world // 2, 0, 2]
    layout = UnitLayout.build(topology, [(f"p{i}[000000]", 5 + 3 * i, root) for i, root in enumerate(roots)])
    chains, messages = LoadCounter(topology).chains(layout), LoadCounter(topology).loads(layout)
    sent = {phase: [0] * world for phase in PHASES}
    received = {phase: [0] * world for phase in PHASES}

    def walk(phase: str, line: list[int], elements: int) -> None:
        """``line``: the ranks of a chain in order."""
        for a, b in zip(line, line[1:], strict=False):
            sent[phase][a] += elements
            received[phase][b] += elements

    for root, (start, stop) in layout.ranges.items():
        rail = [topology.relay(root, n) for n in range(topology.nodes)]
        at = topology.node(root)
        onwards = rail[at:] + rail[:at]  # from the root once around
        walk("publish", onwards, stop - start)
        walk("reduce_2", onwards[1:] + onwards[:1], stop - start)
        for relay in rail:
            members = list(topology.node_members(topology.node(relay)))
            at = members.index(relay)
            onwards = members[at:] + members[:at]
            walk("gather", onwards, stop - start)
            walk("reduce_1", onwards[1:] + onwards[:1], stop - start)
    for phase in PHASES:
        got = chains[phase]
        far = phase in ("reduce_2", "publish")
        assert (got.sent_far_W if far else got.sent_near_W).tolist() == sent[phase], phase
        assert (got.received_far_W if far else got.received_near_W).tolist() == received[phase], phase
        assert (got.near, got.far) == (messages[phase].near, messages[phase].far), phase
