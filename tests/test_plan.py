"""The plan that is shown is the one that trains: same owners, same bytes; what it weighs, against plain formulas."""

from __future__ import annotations

import json
import pathlib
import re
from dataclasses import replace

import pytest
import torch

from tests import titan_runs
from torchtitan_dmuon import footprint as fp
from torchtitan_dmuon import plan as plan_command
from torchtitan_dmuon.costs import CostModel
from torchtitan_dmuon.matrices import OwnedSpec
from torchtitan_dmuon.newton_schulz import choose_form
from torchtitan_dmuon.ownership import MeshSpec, OwnershipPlan, assign
from torchtitan_dmuon.titan import toml_config
from torchtitan_dmuon.titan.config import ConfigError
from torchtitan_dmuon.titan.planning import make_plan, owned_optimizer
from torchtitan_dmuon.topology import Topology, traffic

REPO = pathlib.Path(__file__).parents[1]


def small_groups(topology: Topology, layers: int = 4, rest: int = 64, head: int = 4096) -> list[fp.Group]:
    """Blocks of three matrices between an embedding and a head that FSDP2 keeps."""
    shapes = {"wo": (64, 64), "w1": (192, 64), "w2": (64, 192)}
    specs = {i: [OwnedSpec(f"layers.{i}.{n}.weight", s) for n, s in shapes.items()] for i in range(layers)}
    unit_of = {p.key: i for i in specs for s in specs[i] for p in s.pieces()}
    mesh = MeshSpec(topology.world, topology.shard_size, topology.ranks_per_node)
    pieces = [p for i in specs for s in specs[i] for p in s.pieces()]
    plan = assign(pieces, mesh, ownership=topology.ownership, unit_of=unit_of)
    blocks = [fp.Group(f"layers.{i}", rest, tuple(p for s in specs[i] for p in s.pieces())) for i in specs]
    return fp.lay_out([fp.Group("embed", head), *blocks, fp.Group("head", head)], topology, plan)


# ---- bytes per step ----


@pytest.mark.parametrize("routing", ["two_level", "flat"])
@pytest.mark.parametrize("micro, defer", [(1, True), (3, True), (3, False)])
def test_bytes_are_those_of_the_messages(routing, micro, defer) -> None:
    topology = Topology(8, 4, 4, routing)
    groups = small_groups(topology)
    weighed = fp.footprint(topology, groups, fp.Options(micro_batches=micro, defer_reduce=defer))
    times = {"gather": 2 * 2 * micro, "reduce_1": 4 * micro, "reduce_2": 4 * (1 if defer else micro), "publish": 2}
    for phase, factor in times.items():
        messages = [traffic(g.layout, phase, r) for g in groups if g.layout for r in range(8)]
        assert weighed.traffic[phase].far == factor * sum(m.inter_node for m in messages), phase
        assert weighed.traffic[phase].near == factor * sum(m.intra_node for m in messages), phase


@pytest.mark.parametrize("ownership", ["global", "replica"])
def test_riders_are_updated_where_their_masters_are(ownership) -> None:
    topology = Topology(8, 4, 4, ownership=ownership)
    specs = [OwnedSpec(f"w{i}", (8, 8)) for i in range(6)]
    specs += [OwnedSpec(f"norm{i}", (3 + i,), rider=True) for i in range(5)]
    pieces = [p for spec in specs for p in spec.pieces()]
    plan = assign(pieces, MeshSpec(8, 4, 4), ownership=ownership, unit_of=dict.fromkeys((p.key for p in pieces), 0))
    (group,) = fp.lay_out([fp.Group("block", 0, tuple(pieces))], topology, plan)
    slots, riders = group.layout.slots, [p for p in pieces if p.rider]
    expected = [
        sum(p.numel for p in riders if any(a <= slots[p.key] < b for a, b in group.layout.mastered(rank)))
        for rank in range(8)
    ]
    assert fp._rider_elements(topology, [group]).tolist() == expected
    assert sum(expected) == sum(p.numel for p in riders) * (2 if ownership == "replica" else 1)


@pytest.mark.parametrize(
    "world, shards, per_node", [(8, 4, 4), (16, 2, 8), (16, 4, 8), (8, 1, 4), (8, 8, 4), (4, 2, 4)]
)
def test_fsdp2_s_all_reduce_crosses_nodes_where_its_rings_do(world, shards, per_node) -> None:
    """A ring over the replicas of each shard, in rank order."""
    topology = Topology(world, shards, per_node)
    rings = [list(range(shard, world, shards)) for shard in range(shards)]
    links = [(a, b) for ring in rings if len(ring) > 1 for a, b in zip(ring, ring[1:] + ring[:1])]
    crossing = sum(topology.node(a) != topology.node(b) for a, b in links)
    elements = 3 * 2**16
    replicas = world // shards
    of_a_link = 4 * 2 * elements / shards * (replicas - 1) / replicas
    found = fp.fsdp_traffic(elements, topology, fp.Options())["all_reduce"]
    assert (found.near, found.far) == pytest.approx(((len(links) - crossing) * of_a_link, crossing * of_a_link))


def test_bytes_are_those_of_section_6() -> None:
    """HSDP with S = G: P owned elements, R replicas of S shards."""
    replicas, shards = 3, 4
    topology = Topology(replicas * shards, shards, shards)
    groups = small_groups(topology)
    owned = sum(g.owned for g in groups)
    weighed = fp.footprint(topology, groups, fp.Options())
    per_rank = {
        "gather": (2 * 2 * owned * (shards - 1) / shards, 0),
        "reduce_1": (4 * owned * (shards - 1) / shards, 0),
        "reduce_2": (0, 4 * owned / shards * (replicas - 1) / replicas),
        "publish": (0, 2 * owned / shards * (replicas - 1) / replicas),
    }
    for phase, (near, far) in per_rank.items():
        assert weighed.traffic[phase].near == pytest.approx(topology.world * near, rel=0.01), phase
        assert weighed.traffic[phase].far == pytest.approx(topology.world * far, rel=0.01), phase
    whole = owned + sum(g.rest for g in groups)
    all_reduce = fp.fsdp_traffic(whole, topology, fp.Options())["all_reduce"]
    assert all_reduce.far == pytest.approx(topology.world * 8 * whole / shards * (replicas - 1) / replicas, rel=1e-5)
    assert all_reduce.near == 0


def test_fsdp_over_two_nodes_crosses_once_per_node() -> None:
    topology = Topology(8, 8, 4)
    per_rank = fp.fsdp_traffic(80_000, topology, fp.Options())
    assert per_rank["gather"].far == 8 * 2 * 2 * 80_000 // 4 // 2
    assert per_rank["reduce_scatter"].far == 8 * 4 * 80_000 // 4 // 2
    assert per_rank["gather"].near + per_rank["gather"].far == 8 * 2 * 2 * 80_000 * 7 // 8
    assert per_rank["all_reduce"].far == per_rank["all_reduce"].near == 0


# ---- memory ----


def test_adamw_by_hand() -> None:
    rest, peaks = fp.adamw_memory([100, 1000, 1000, 400], 4, fp.Options())
    assert rest == 12 * 2500 // 4
    assert peaks["forward"] == rest + 2 * 2000
    # The second block: its gradients in bf16 and fp32, both blocks gathered, the fp32 shards from it on.
    assert peaks["backward"] == rest + (2 + 4) * 1000 + 2 * 2000 + 4 * 1400 // 4
    assert peaks["step"] == rest + 4 * 2500 // 4
    _, kept = fp.adamw_memory([100, 1000, 1000, 400], 4, fp.Options(reshard=False))
    assert kept["forward"] == rest + 2 * 2500


def test_owners_at_rest_hold_one_copy_in_the_cluster() -> None:
    topology = Topology(8, 4, 4)
    groups = small_groups(topology, rest=0, head=0)
    owned = sum(g.owned for g in groups)
    weighed = fp.footprint(topology, groups, fp.Options())
    assert int(weighed.rest_W.sum()) == pytest.approx(8 * owned + 2 * 2 * owned, rel=0.01)
    assert int(weighed.peaks["step"].min()) > int(weighed.rest_W.min())


def test_more_in_flight_needs_more() -> None:
    topology = Topology(8, 4, 4)
    groups = small_groups(topology, head=64)
    base = fp.footprint(topology, groups, fp.Options()).peaks
    wide = fp.footprint(topology, groups, fp.Options(prefetch=2)).peaks
    kept = fp.footprint(topology, groups, fp.Options(reshard=False)).peaks
    assert int(wide["forward"].max()) > int(base["forward"].max())
    assert int(kept["forward"].max()) > int(wide["forward"].max())
    deferred = fp.footprint(topology, groups, fp.Options(micro_batches=2)).peaks
    assert bool((deferred["backward"] >= base["backward"]).all())
    assert int(deferred["backward"].sum()) > int(base["backward"].sum())


def test_collectives_sum_in_place() -> None:
    topology = Topology(12, 4, 4)
    groups = small_groups(topology, layers=1, rest=0, head=0)
    messages, collectives = (fp.footprint(topology, groups, fp.Options(device_type=d)) for d in ("cpu", "cuda"))
    shares = fp.LoadCounter(topology).shares(groups[1].layout)
    # Level 1 of the unit from three others of the node, one of which becomes the sum; level 2 from two other nodes.
    saved_W = 4 * 2 * shares.collected_W + 4 * 2 * shares.rooted_W
    assert torch.equal(messages.peaks["backward"] - collectives.peaks["backward"], saved_W)
    assert fp.Footprint.total(messages.traffic).far == fp.Footprint.total(collectives.traffic).far
    flat = replace(topology, routing="flat")
    assert not fp.uses_collectives(flat, "cuda") and not fp.uses_collectives(topology, "cpu")


def test_deferring_stops_where_the_peak_would_pass_adamws() -> None:
    options = fp.Options(micro_batches=4)
    # Wide shard groups leave AdamW little at rest, while every node would keep partial sums of everything.
    wide, narrow = Topology(16, 16, 2), Topology(4, 2, 2)
    assert not fp.should_defer(wide, small_groups(wide, layers=12), options)
    many = small_groups(narrow, layers=40, head=65536)
    assert fp.should_defer(narrow, many, options)
    assert fp.should_defer(wide, small_groups(wide), replace(options, micro_batches=1))


# ---- the plan of a configuration ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return titan_runs.make_folder(tmp_path_factory.mktemp("plan"))


def _rest_bytes(made) -> tuple[str, int]:
    owned = made.owned
    ranges = [t for u in owned.engine.units for t in (*u.held.values(), *u.master.values())]
    states = [t for s in made.optimizers.owned_optimizer.state.values() for t in s.values()]
    return owned.plan.to_json(), sum(t.numel() * t.element_size() for t in (*ranges, *states))


@pytest.mark.parametrize("riders", ["--dmuon.riders", "--dmuon.no-riders"])
def test_a_training_run_has_this_plan_and_these_bytes(folder, riders) -> None:
    flags = ("--training.steps", "2", "--metrics.enable_tensorboard", riders)
    results = titan_runs.train(folder, "DMuon", 4, *flags, ranks_per_node=2, after=_rest_bytes)
    mesh = [f"--parallelism.data_parallel_{axis}_degree=2" for axis in ("replicate", "shard")]
    run = titan_runs.parse(["--config", str(folder / "DMuon.toml"), *mesh, riders])
    planned = make_plan(run.config, 4, 2, device_type="cpu")
    assert planned.plan.summary()["riders"] == (2 * titan_runs.LAYERS if riders == "--dmuon.riders" else 0)
    trained = OwnershipPlan.from_json(results[0]["after"][0])
    assert planned.plan.difference(trained) == [] and planned.plan.digest == trained.digest

    sent = [m for m in results[0]["metrics"] if m][-1]
    traffic = planned.footprint.traffic
    for distance, of in (("intra_node", "near"), ("inter_node", "far")):
        counted = sum(getattr(traffic[p], of) for p in ("gather", "reduce_1", "reduce_2", "publish"))
        assert 4 * sent[f"dmuon/owned_bytes/{distance}"] == pytest.approx(counted, rel=1e-6), distance

    shared = 12 * sum(g.rest for g in planned.groups) // 2
    for rank, (_, measured) in enumerate(r["after"] for r in results):
        assert int(planned.footprint.rest_W[rank]) - shared == pytest.approx(measured, rel=0.01)


def load(name: str, *flags: str):
    return toml_config.parse(["--config", str(REPO / "train_configs" / f"{name}.toml"), *flags]).config


def test_llama_8b_on_256_ranks() -> None:
    planned = make_plan(load("llama3_8b_dmuon"), 256)
    figures = plan_command.summary(planned, 500e12)
    assert (figures["matrices"], figures["pieces"], figures["idle_owners"]) == (224, 160, 96)
    assert figures["largest_cost"] == figures["lower_bound"]
    assert figures["ns_milliseconds"] == pytest.approx(5e3 * (4 * 4096**2 * 14336 + 2 * 4096**3) / 500e12)
    owned, rest = sum(g.owned for g in planned.groups), sum(g.rest for g in planned.groups)
    assert owned + rest == 8_030_261_248
    expected = 256 * (6 * owned + 8 * rest) / 8 * 31 / 32
    assert figures["internode_bytes_per_step"] == pytest.approx(expected, rel=0.001)
    assert figures["adamw_internode_bytes_per_step"] == pytest.approx(256 * 8 * (owned + rest) / 8 * 31 / 32, rel=1e-6)
    text = "\n".join(figures["warnings"])
    assert "96 of 256 owners are idle" in text and "2.12 times the mean cost" in text
    # By collectives along the rails: no owner collects from 31 nodes at once.
    assert figures["peak_bytes_per_rank"] < 0.8 * figures["adamw_peak_bytes_per_rank"]
    assert figures["busiest_link_bytes"] < figures["adamw_busiest_link_bytes"]
    assert "point to point" not in text and "exceeds AdamW" not in text


def test_warnings_name_the_option_that_would_need_less() -> None:
    wide = load("llama3_8b_dmuon", "--parallelism.data_parallel_shard_degree", "32")
    wide.parallelism.data_parallel_replicate_degree = 2
    wide.training.global_batch_size = 4 * 64 * wide.training.local_batch_size
    wide.dmuon.defer_reduce = True
    text = "\n".join(plan_command.summary(make_plan(wide, 64), 500e12)["warnings"])
    assert "units travel point to point" in text and "holders = 'node' would do" in text
    assert re.search(r'dmuon.holders = "node": [0-9.]+ GiB', text)
    # Then few units' sums are kept at a time, not all until the last micro-batch.
    assert re.search(r"dmuon.defer_reduce = false: [0-9.]+ GiB", text)


def test_other_worlds_keep_the_shards_and_say_so() -> None:
    planned = make_plan(load("llama3_8b_dmuon"), 64)
    assert (planned.topology.shard_size, planned.topology.replicas) == (8, 8)
    assert "32 x 8 -> 8 x 8" in planned.assumed[0]
    assert make_plan(load("llama3_8b_dmuon"), 4).topology.shard_size == 4
    assert make_plan(load("llama3_8b_dmuon"), 256).assumed == []
    with pytest.raises(ConfigError, match="100 ranks are no multiple of 8 shards"):
        make_plan(load("llama3_8b_dmuon"), 100)


def test_a_configuration_without_owners_is_planned_as_if(folder) -> None:
    planned = make_plan(load("llama3_8b_adamw"), 64)
    assert sum(not p.rider for p in planned.plan.pieces) == 160 and "no DMuon group" in planned.assumed[0]
    assert make_plan(load("llama3_8b_dmuon"), 64).plan.digest == planned.plan.digest


def test_an_owned_optimizer_is_planned_by_elements_and_its_own_state(folder) -> None:
    planned = make_plan(toml_config.parse(["--config", str(folder / "Owned:torch.optim.AdamW.toml")]).config, 4, 2)
    assert planned.options.momentum_bytes == 8 and "8 bytes an element" in planned.assumed[0]
    costs = zip(planned.plan.pieces, planned.plan.costs)
    assert len({cost / p.numel for p, cost in costs if not p.rider}) == 1
    figures = plan_command.summary(planned, 1e12)
    assert figures["ns_milliseconds"] == 0 < figures["update_milliseconds"]
    plan_command.print_tables(planned, figures)


def test_another_size_of_the_family() -> None:
    planned = make_plan(load("llama3_70b_dmuon"), 4096, flavor="405B")
    assert sum(g.owned + g.rest for g in planned.groups) == pytest.approx(405.85e9, rel=0.001)
    with pytest.raises(ValueError, match="405B"):
        make_plan(load("llama3_70b_dmuon"), 64, flavor="404B")


def test_the_command_writes_the_stable_names(tmp_path, capsys) -> None:
    config = str(REPO / "train_configs" / "llama3_8b_dmuon.toml")
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    code = plan_command.main([config, "--world", "16", "--json", str(out), "--plot", str(picture)])
    assert code == 0 and picture.stat().st_size > 10_000
    figures = json.loads(out.read_text())
    names = (
        "world matrices pieces largest_cost mean_cost lower_bound imbalance idle_owners rest_bytes_per_rank "
        "peak_bytes_per_rank adamw_peak_bytes_per_rank internode_bytes_per_step busiest_link_bytes "
        "adamw_internode_bytes_per_step"
    )
    assert set(names.split()) <= figures.keys()
    shown = capsys.readouterr().out
    assert "layers.N.feed_forward.w1.weight" in shown and "publish" in shown
    assert "\n" in shown and re.search(r"at rest", shown)


@pytest.mark.parametrize(
    ("module", "config", "matrices"),
    [
        ("gpt_oss", "gpt_oss_debugmodel", 4 * (4 + 8 * 3)),  # not its two-dimensional biases
        ("qwen3", "qwen3_moe_debug", 8 * (4 + 64 * 3)),
        ("deepseek_v3", "deepseek_v3_debugmodel", 6 * 4 + 3 + 5 * (8 * 3 + 3)),
        ("muse_glimmer", "muse_glimmer_debugmodel", 8 * 8),
        ("llama3", "llama3_debugmodel", 6 * 7),
    ],
)
def test_every_module_is_planned_with_no_flag(module, config, matrices, tmp_path) -> None:
    out = tmp_path / "plan.json"
    argv = ["--module", module, "--config", config, "--training.steps", "3", "--world", "8", "--json", str(out)]
    assert plan_command.main(argv) == 0
    assert json.loads(out.read_text())["matrices"] == matrices


def test_small_models_have_figures_too(folder, capsys) -> None:
    assert plan_command.main([str(folder / "DMuon.toml"), "--world", "4", "--ranks-per-node", "2"]) == 0
    shown = capsys.readouterr().out
    assert "MiB per rank" in shown and "bytes sent per step, MB" in shown
    assert not re.search(r"feed_forward.*\b0\.00\b", shown) and not re.search(r"at rest.*\b0\.00\b", shown)


def test_what_a_plan_is_asked_is_checked_before_any_work(folder, capsys) -> None:
    file, plain = str(folder / "DMuon.toml"), str(folder / "AdamW.toml")
    for argv, expected in (
        ([file, "--world", "1000000000000"], "--world 1000000000000: expected positive numbers up to 131,072"),
        ([file, "--world", "9" * 5000], "expected positive numbers"),
        ([file, "--world", "-1"], "expected"),
        ([file, "--world", "8,16"], "expected one number"),
        ([file, "--world", "8", "--pattern", "["], "--pattern is for configurations without a DMuon group"),
        ([plain, "--world", "8", "--pattern", "["], "--pattern '[' is not a regular expression"),
        ([file, "--world", "8", "--flavor", "9B"], "flavor = '9B': no size of this model"),
        ([file, "--world", "8", "--flops", "nan"], "--flops nan: expected a number"),
        (["qwen3_5_debug", "--module", "qwen3_5", "--world", "8"], "It needs the module 'fla'"),
    ):
        assert plan_command.main(argv) == 2
        said = capsys.readouterr().err
        assert expected in said and said.count("\n") == 1, said


def test_errors_end_with_one_line(tmp_path, capsys) -> None:
    config = str(REPO / "train_configs" / "llama3_8b_dmuon.toml")
    assert plan_command.main([config, "--world", "0"]) == 2
    assert plan_command.main([str(tmp_path / "none.toml"), "--world", "8"]) == 2
    assert plan_command.main([config, "--world", "8", "--parallelism.tensor_parallel_degree", "2"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3 and "tensor" in lines[-1]
    for output in ("--plot", "--json", "--calibrate"):
        (folder := tmp_path / "folder.png").mkdir(exist_ok=True)
        assert plan_command.main([config, "--world", "8", output, str(folder)]) == 2
        printed = capsys.readouterr()
        assert printed.err == f"dmuon plan: {folder} is a folder: expected a file to write\n" and not printed.out


def test_measured_costs_are_read_back(folder, tmp_path, monkeypatch) -> None:
    costs = tmp_path / "costs.json"
    config = toml_config.parse(["--config", str(folder / "DMuon.toml")]).config
    planned = make_plan(config, 4, 2, device_type="cpu")
    seconds = iter([0.5, 0.25] * 100)  # the Gram form twice as fast for every shape
    monkeypatch.setattr(plan_command.statistics, "median", lambda _seconds: next(seconds))
    monkeypatch.setattr(plan_command, "CALIBRATION_SECONDS", 1e-9)
    both = plan_command.calibrate(planned, costs, torch.device("cpu"))
    shapes = {f"{m}x{n}" for p in planned.plan.pieces for m, n in p.matrices()}
    assert both == {shape: {"standard": 0.5, "gram": 0.25} for shape in shapes}
    read = CostModel.from_file(costs)
    assert read.measured == dict.fromkeys(shapes, 0.25) and read.forms == dict.fromkeys(shapes, "gram")
    argv = ["--config", str(folder / "DMuon.toml"), "--dmuon.cost_file", str(costs)]
    again = make_plan(toml_config.parse(argv).config, 4, 2, device_type="cpu")
    wqkv = next(c for p, c in zip(again.plan.pieces, again.plan.costs) if "wqkv" in p.name)
    assert wqkv == 3 * 250_000_000_000 and again.plan.digest != planned.plan.digest
    assert plan_command.summary(again, 1e12)["update_milliseconds"] >= 750
    # The form that was measured to be faster is the one that plans count and training runs.
    assert choose_form(64, 64, planned.options.settings, "cpu") == "standard"
    square = next(m for p in again.plan.pieces for m in p.matrices() if m[0] == m[1])
    assert choose_form(*square, again.options.settings, "cpu") == "gram"
    asked = toml_config.parse(argv).config
    asked.optimizer.param_groups[0].optimizer_kwargs["ns_form"] = "standard"
    assert owned_optimizer(asked, [torch.zeros(1, 1)]).param_groups[0]["ns_form"] == "standard"
