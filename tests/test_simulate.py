"""The simulated step: an engine that shares links fairly, and steps whose seconds can be added up by hand."""

from __future__ import annotations

import json
import pathlib
from dataclasses import replace

import pytest

from tests.test_plan import small_groups
from torchtitan_dmuon import simulate as command
from torchtitan_dmuon.costs import ELEMENTWISE_BYTES
from torchtitan_dmuon.events import Schedule, Task, trace_events
from torchtitan_dmuon.footprint import Options
from torchtitan_dmuon.ownership import MeshSpec, assign
from torchtitan_dmuon.step_model import (
    ADAMW_BYTES,
    Cluster,
    Placed,
    Work,
    ns_flops,
    simulate_adamw,
    simulate_dist_muon,
    simulate_dmuon,
    simulate_gather_muon,
)
from torchtitan_dmuon.titan import toml_config
from torchtitan_dmuon.titan.planning import Planned, make_plan
from torchtitan_dmuon.topology import Topology

REPO = pathlib.Path(__file__).parents[1]

# ---- the engine ----


def test_lanes_keep_their_order_whatever_is_ready() -> None:
    schedule = Schedule()
    slow = schedule.add("slow", "a", 3.0)
    first = schedule.add("first", "b", 1.0, [slow])
    second = schedule.add("second", "b", 1.0)  # ready at once, but behind `first`
    assert schedule.run() == pytest.approx(5.0)
    assert (first.start, second.start) == pytest.approx((3.0, 4.0))


def test_ports_are_shared_by_what_each_task_takes() -> None:
    schedule = Schedule()
    both = schedule.add("both", "a", 2.0, ports={"link": 1.0})
    light = schedule.add("light", "b", 1.0, ports={"link": 0.5, "other": 1.0})
    alone = schedule.add("alone", "c", 1.0, ports={"third": 1.0})
    assert schedule.run() == pytest.approx(2.5)
    assert (light.end, both.end, alone.end) == pytest.approx((1.5, 2.5, 1.0))


def test_latency_shares_nothing_and_counts_once() -> None:
    schedule = Schedule()
    for name in "ab":
        schedule.add(name, name, 1.0, ports={"link": 1.0}, latency=0.25)
    assert schedule.run() == pytest.approx(2.25)


def test_an_idle_port_saves_up() -> None:
    schedule = Schedule(lambda port: 0.5 if port == "link" else 0.0)
    first = schedule.add("first", "a", 1.0, ports={"link": 1.0})
    pause = schedule.add("pause", "a", 0.2)
    second = schedule.add("second", "a", 1.0, ports={"link": 1.0})
    other = schedule.add("other", "b", 1.0, ports={"wire": 1.0})
    schedule.run()
    # Half a second's worth passes at 50 times the rate, during which the bucket fills by what it always does.
    at_once = 0.5 / 49
    assert first.end == pytest.approx(at_once + 1 - 50 * at_once)
    at_once = 0.2 / 49
    assert second.end - pause.end == pytest.approx(at_once + 1 - 50 * at_once)
    assert other.end == pytest.approx(1.0)


def test_a_task_that_can_never_run_is_named() -> None:
    schedule = Schedule()
    schedule.add("orphan", "a", 1.0, [Task("elsewhere", None, 1.0)])
    with pytest.raises(RuntimeError, match="orphan"):
        schedule.run()


def test_the_trace_has_a_track_per_lane() -> None:
    schedule = Schedule()
    schedule.add("x", "a", 1.0)
    schedule.add("y", ("rail", 1), 2.0)
    schedule.run()
    events = trace_events(schedule.tasks, "dmuon", 3)
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in spans] == [("x", 0.0, 1e6), ("y", 0.0, 2e6)]
    assert len({e["tid"] for e in spans}) == 2 and all(e["pid"] == 3 for e in events)


# ---- steps ----

FAST = Cluster("fast", 4, 1e9, 1e9, 1e30, 1e30, 1e30, 0.0, 1e30, 0.0)


def setup(nodes: int = 4, per_node: int = 2, **options: object) -> tuple[Work, Placed]:
    topology = Topology(nodes * per_node, per_node, per_node)
    groups = small_groups(topology, layers=4)
    pieces = [p for g in groups for p in g.pieces]
    unit_of = {p.key: i for i, g in enumerate(g for g in groups if g.pieces) for p in g.pieces}
    plan = assign(pieces, MeshSpec(topology.world, per_node, per_node), unit_of=unit_of)
    work = Work(groups, [0.0, *[1e9] * 4, 5e8], 0.0, Options(**options))  # type: ignore[arg-type]
    return work, Placed(plan, topology, groups)


def largest_update(work: Work, placed: Placed) -> float:
    load = [0] * placed.topology.world
    for group in work.groups:
        for piece in group.pieces:
            one = replace(group, pieces=(piece,))
            load[placed.plan.owner_of(piece.key)] += ns_flops(one, work.options)
    return max(load) / FAST.update_flops


def test_without_links_a_step_is_its_computation() -> None:
    work, placed = setup()
    compute = 3 * 4.5  # forward once, backward twice
    assert simulate_adamw(FAST, work, placed.topology).step_seconds == pytest.approx(compute)
    total = sum(ns_flops(g, work.options) for g in work.groups) / 1e9
    gather = simulate_gather_muon(FAST, work, placed.topology)
    assert gather.step_seconds == pytest.approx(compute + total)
    ours = simulate_dmuon(FAST, work, placed)
    assert ours.step_seconds == pytest.approx(compute + largest_update(work, placed))
    assert ours.update_seconds == pytest.approx(largest_update(work, placed))
    assert sum(ours.exposed.values()) == pytest.approx(0, abs=1e-9)
    assert simulate_dist_muon(FAST, work, placed.topology, 2e9).step_seconds == pytest.approx(compute + 2)


def test_recompute_and_micro_batches_add_computation() -> None:
    work, placed = setup(micro_batches=3)
    full = replace(work, recompute=1.0)
    assert simulate_adamw(FAST, work, placed.topology).step_seconds == pytest.approx(3 * 13.5)
    assert simulate_adamw(FAST, full, placed.topology).step_seconds == pytest.approx(3 * 18.0)


def test_memory_traffic_of_the_update() -> None:
    work, placed = setup()
    slow_memory = replace(FAST, memory_rate=1e3)
    shards = placed.topology.shard_size
    owned, rest = sum(g.owned for g in work.groups), sum(g.rest for g in work.groups)
    update = simulate_adamw(slow_memory, work, placed.topology).update_seconds
    assert update == pytest.approx((owned + rest) / shards * ADAMW_BYTES / 1e3)
    most = max(sum(p.numel for p in placed.plan.pieces_of(r)) for r in range(placed.topology.world))
    ours = simulate_dmuon(replace(slow_memory, update_flops=1e30), work, placed).update_seconds
    assert ours == pytest.approx((most * ELEMENTWISE_BYTES + rest / shards * ADAMW_BYTES) / 1e3)


def test_adamw_waits_for_the_last_all_reduce_of_a_slow_network() -> None:
    work, placed = setup()
    slow = replace(FAST, far_rate=1e3)
    bytes_each = 8 * work.elements / 2 * 3 / 4  # 8 (P/S)(R-1)/R
    run = simulate_adamw(slow, work, placed.topology)
    # All-reduces begin when the head's backward, a second long, is over, and are the longest thing from there on.
    assert run.step_seconds == pytest.approx(4.5 + 1.0 + bytes_each / 1e3, rel=0.01)
    assert run.exposed["reduce"] == pytest.approx(run.step_seconds - 13.5, rel=0.01)


def test_level_2_of_one_rail_is_serial_unless_it_is_a_ring() -> None:
    work, placed = setup(nodes=8)
    bare = [replace(g, rest=0) for g in work.groups]
    work, placed = replace(work, groups=bare), replace(placed, groups=bare)
    slow = replace(FAST, far_rate=2e3)
    direct, ring = simulate_dmuon(slow, work, placed), simulate_dmuon(slow, work, replace(placed, ring=True))
    rail = [0, 0]
    for group in bare:
        if group.layout is not None:
            for root, (start, stop) in group.layout.ranges.items():
                rail[placed.topology.local(root)] += 7 * 4 * (stop - start) / 2e3
    # Several roots of a unit on one rail receive at the same time: the sum is an upper bound.
    assert 0.5 * max(rail) < direct.exposed["reduce"] < max(rail)
    assert direct.exposed["publish"] == pytest.approx(
        direct.exposed["reduce"] / 2, rel=0.02
    )  # two bytes instead of four
    assert ring.step_seconds < 0.5 * direct.step_seconds
    free = simulate_dmuon(slow, work, replace(placed, overlap=True))
    assert ring.step_seconds < free.step_seconds < direct.step_seconds


def test_two_nodes_need_no_ring() -> None:
    work, placed = setup(nodes=2)
    slow = replace(FAST, far_rate=1e4)
    direct, ring = (simulate_dmuon(slow, work, replace(placed, ring=ring)).step_seconds for ring in (False, True))
    assert ring == pytest.approx(direct, rel=0.02)


def test_publishes_hide_behind_the_next_forward_unless_sync() -> None:
    work, placed = setup(nodes=2)
    slow = replace(FAST, far_rate=2e4)
    behind, sync = simulate_dmuon(slow, work, placed), simulate_dmuon(slow, work, replace(placed, sync=True))
    assert sync.step_seconds > behind.step_seconds + 1
    assert sync.exposed["publish"] > behind.exposed["publish"]


def test_deferring_saves_what_crosses_nodes() -> None:
    once, placed = setup(nodes=2, micro_batches=4)
    each = replace(once, options=replace(once.options, defer_reduce=False))
    slow = replace(FAST, far_rate=1e4)
    assert simulate_dmuon(slow, once, placed).step_seconds < simulate_dmuon(slow, each, placed).step_seconds - 1


def test_one_rail_may_use_the_whole_port_that_a_node_shares() -> None:
    work, placed = setup(nodes=4)
    own = replace(FAST, far_rate=1e4)
    shared = replace(own, far_shared=True)
    assert simulate_adamw(shared, work, placed.topology).step_seconds == pytest.approx(
        simulate_adamw(own, work, placed.topology).step_seconds
    )
    alone, together = (simulate_dmuon(c, work, placed).exposed["reduce"] for c in (own, shared))
    # Owners on different nodes receive at once, each node's from three others through a port of twice a rank's rate.
    port = 3 * 4 * sum(g.owned for g in work.groups) / 4 / 2e4
    assert together == pytest.approx(port, rel=0.1) and together < alone / 2


def test_rails_are_chains_on_gpus_and_regular_topologies() -> None:
    config = str(REPO / "train_configs" / "llama3_8b_dmuon.toml")

    def planned(device: str, *flags: str) -> Planned:
        return make_plan(toml_config.parse(["--config", config, *flags]).config, 64, 8, device)

    assert command.placed(planned("cuda"), "dmuon").ring
    assert not command.placed(planned("cuda"), "dmuon_direct").ring
    assert not command.placed(planned("cuda"), "dmuon_flat").ring
    assert not command.placed(planned("cpu"), "dmuon").ring
    wide = [f"--parallelism.data_parallel_{k}_degree={n}" for k, n in (("shard", 32), ("replicate", 2))]
    across = planned("cuda", *wide)
    assert not command.placed(across, "dmuon").ring
    assert command.placed(across, "dmuon_node_holders").ring


# ---- the command ----


def test_the_clusters_that_come_with_the_package() -> None:
    names = {p.stem for p in command.CLUSTERS.glob("*.toml")}
    assert {"h100", "h200", "a100", "gb200", "ethernet100"} <= names
    clusters = {n: command.read_cluster(n) for n in names}
    assert clusters["h100"].far_rate == pytest.approx(45e9) and clusters["gb200"].ranks_per_node == 72
    assert clusters["ethernet100"].far_shared


def test_a_cluster_that_cannot_be_used(tmp_path) -> None:
    with pytest.raises(command.ClusterError, match="known are a100"):
        command.read_cluster("h101")
    bad = tmp_path / "bad.toml"
    good = (command.CLUSTERS / "h100.toml").read_text()
    for old, new, message in (
        ("450e9", '"fast"', r"\[inside\] bytes_per_second must be a number from 1 to 1e\+24"),
        ("400e9", "nan", r"\[between\] bits_per_second must be a number from 1 to"),
        ("= 0.90", "= 1.1", r"\[between\] efficiency must be a number from 0.0001 to 1, got 1.1"),
        ("shared = false", "shard = false", r"unknown key \[between\] shard; known are bits_per_second"),
        ("shared = false", "shared = 3", r"\[between\] shared must be true or false, got 3"),
        ("ranks_per_node = 8", "ranks_per_node = 2.5", "ranks_per_node must be an integer, got 2.5"),
        ("ranks_per_node = 8", "ranks_per_nod = 8", "unknown key ranks_per_nod"),
        ("[inside]", "[outside]", "unknown key outside"),
    ):
        assert old in good
        bad.write_text(good.replace(old, new))
        with pytest.raises(command.ClusterError, match=message) as info:
            command.read_cluster(str(bad))
        assert str(info.value).startswith(f"{bad}: ")
    bad.write_bytes(b"\xff\xfe\0")
    with pytest.raises(command.ClusterError, match="bad.toml: "):
        command.read_cluster(str(bad))


def test_the_command_writes_the_stable_names(tmp_path, capsys) -> None:
    config = str(REPO / "train_configs" / "llama3_8b_dmuon.toml")
    out, trace = tmp_path / "s.json", tmp_path / "trace.json"
    picture = tmp_path / "s.png"
    argv = [config, "--world", "8,16", "--json", str(out), "--trace", str(trace), "--plot", str(picture)]
    assert command.main(argv) == 0
    points = json.loads(out.read_text())["points"]
    assert [p["world"] for p in points] == [8, 16] and picture.stat().st_size > 10_000
    wanted = (
        "step_seconds step_seconds_min tokens_per_second ratio_to_adamw ratio_low ratio_high ratio_to_gather_muon "
        "internode_bytes_per_step peak_bytes_per_rank ns_share exposed_seconds"
    )
    for point in points:
        for figures in point["variants"].values():
            assert set(wanted.split()) <= figures.keys()
            assert set(figures["exposed_seconds"]) == {"gather", "reduce", "publish"}
    variants = points[1]["variants"]
    assert variants["adamw"]["ratio_to_adamw"] == 1 and variants["gather_muon"]["ratio_to_adamw"] < 0.7
    assert variants["dmuon"]["internode_bytes_per_step"] < variants["adamw"]["internode_bytes_per_step"]
    assert {e["ph"] for e in json.loads(trace.read_text())["traceEvents"]} == {"M", "X"}
    assert "llama3 8B on 16 ranks of h100" in capsys.readouterr().out
    # The file's nodes come before the cluster's.
    assert command.main([config, "--world", "8", "--dmuon.ranks_per_node", "4", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["variants"]["adamw"]["internode_bytes_per_step"] > 0
    assert command.main([config, "--world", "8", "--variants", "dmuon,adamv"]) == 2
    assert command.main([config, "--world", "8", "--cluster", "none"]) == 2


def test_what_does_not_fit_is_said(tmp_path, capsys) -> None:
    out = tmp_path / "simulated.json"
    argv = ["train_configs/llama3_70b_dmuon.toml", "--world", "8", "--variants", "adamw,dmuon", "--json", str(out)]
    assert command.main([*argv, "--parallelism.data_parallel_shard_degree", "8"]) == 0
    assert "warning: adamw, dmuon do not fit: a rank of h100 has 74.5 GiB" in " ".join(capsys.readouterr().out.split())
    assert [f["fits"] for f in json.loads(out.read_text())["variants"].values()] == [False, False]


def test_one_slow_variant_does_not_squash_a_picture() -> None:
    curves = {"adamw": [1.0, 1.0], "dmuon": [0.9, 1.1], "gather_muon": [0.4, 0.5], "dmuon_flat": [0.1, 0.01]}
    assert command.view(curves) == (0.45, 1.1)
    assert command.view({"adamw": [1.0], "dmuon": [1.2], "dmuon_flat": [90.0]}) == (1.0, 2.4)
    assert command.view({"dist_muon": [1.0, 3.0]}) == (1.0, 3.0)
