"""The throughput bench: figures mean what they say, unequal variants are refused, and one command does it all."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path

import pytest
import torch
import torch._dynamo  # noqa: F401  (imported once, before ranks are forked)

from scripts.bench import throughput
from scripts.bench.measure import Bench, Series, UnequalUpdates, check_equal, order_of, paired_ratio, summarize
from scripts.bench.memory import peak_bytes
from scripts.bench.model import Settings, make_model, matrices
from scripts.bench.variants import make_variant, newton_schulz_timed
from scripts.netlab.lab import Lab, LabForbidden, run_on_loopback

TINY = Settings(dim=32, layers=2, heads=2, hidden=48, vocab=64, batch=1, length=16)
VARIANT_NAMES = {
    "step_seconds",
    "step_seconds_min",
    "tokens_per_second",
    "ratio_to_adamw",
    "ratio_low",
    "ratio_high",
    "ratio_to_gather_muon",
    "internode_bytes_per_step",
    "peak_bytes_per_rank",
    "ns_share",
    "exposed_seconds",
}


def test_every_variant_runs_before_every_other_as_often_as_after_it() -> None:
    for names in ("ab", "abc", "abcd"):
        orders = [order_of(turn, names) for turn in range(2 * len(names))]
        assert all(sorted(order) == list(names) for order in orders)
        for a, b in itertools.permutations(names, 2):
            assert sum(order.index(a) < order.index(b) for order in orders) == len(names)
        assert all([order[0] for order in orders].count(name) == 2 for name in names)


def test_paired_ratio() -> None:
    assert paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.0, 2.0))
    # Rounds twice as slow for both change nothing: pairs are of one round.
    noisy = paired_ratio([2.0, 8.8, 5.4], [1.0, 4.0, 3.0])
    assert noisy[0] == pytest.approx(2.0)
    logs = [math.log(r) for r in (2.0, 2.2, 1.8)]
    mean = sum(logs) / 3
    deviation = math.sqrt(sum((x - mean) ** 2 for x in logs) / 2)
    assert noisy[1] == pytest.approx(math.exp(mean - 4.303 * deviation / math.sqrt(3)))
    assert noisy[2] == pytest.approx(math.exp(mean + 4.303 * deviation / math.sqrt(3)))
    assert math.isnan(paired_ratio([1.0], [1.0])[1])
    twenty = [1.9, 2.1] * 10
    deviation = statistics.stdev(math.log(r) for r in twenty)
    center = statistics.fmean(math.log(r) for r in twenty)
    assert paired_ratio(twenty, [1.0] * 20)[2] == pytest.approx(math.exp(center + 2.093 * deviation / math.sqrt(20)))


def test_a_summary_takes_the_best_adamw_and_means_over_ranks() -> None:
    def rank(adamw: float, tuned: float, dmuon: float) -> dict[str, Series]:
        exposed = {"gather": [0.1, 0.3], "reduce": [0.0, 0.0], "publish": [0.0, 0.0]}
        series = {
            name: Series([s, s * 1.5], [s, s], [0.01, 0.01], exposed)
            for name, s in (("adamw", adamw), ("adamw_async", tuned), ("gather_muon", 4.0), ("dmuon", dmuon))
        }
        series["adamw"].exposed = {p: [math.nan] * 2 for p in exposed}
        return series

    out = summarize([rank(3.0, 2.0, 1.0), rank(3.0, 2.0, 2.0)], TINY, {"dmuon": {"internode_bytes_per_step": 7}})
    dmuon = out["dmuon"]
    assert dmuon["best_adamw"] == "adamw_async"
    assert dmuon["step_seconds"] == pytest.approx(1.875) and dmuon["step_seconds_min"] == pytest.approx(1.5)
    assert dmuon["ratio_to_adamw"] == pytest.approx(4 / 3) and dmuon["ratio_to_gather_muon"] == pytest.approx(8 / 3)
    assert dmuon["tokens_per_second"] == pytest.approx(2 * 16 / 1.875)
    assert dmuon["exposed_seconds"]["gather"] == pytest.approx(0.2)
    assert out["adamw"]["exposed_seconds"] == {"gather": None, "reduce": None, "publish": None}
    assert dmuon["internode_bytes_per_step"] == 7


@pytest.mark.parametrize(
    "norms, differences, message",
    [
        ({"adamw": 2.0, "dmuon": 2.001}, {"dmuon": 0.0}, "dmuon: the first step's gradient norm is 2.001"),
        ({"adamw": 2.0, "dmuon": math.nan}, {"dmuon": 0.0}, "dmuon: the first step's gradient norm"),
        ({"gather_muon": 2.0, "dmuon": 2.0}, {"gather_muon": 0.0, "dmuon": 0.04}, "dmuon: the first update differs"),
        ({"gather_muon": 2.0, "dmuon": 2.0}, {"gather_muon": 0.0, "dmuon": math.nan}, "dmuon: the first update"),
    ],
)
def test_what_is_unequal(norms: dict[str, float], differences: dict[str, float], message: str) -> None:
    with pytest.raises(UnequalUpdates, match=message):
        check_equal(norms, differences)
    check_equal(dict.fromkeys(norms, 2.0), dict.fromkeys(differences, 1e-6))


def first_updates(rank: int, world: int, settings: Settings, names: list[str], fault: str) -> str:
    bench = Bench(settings, names, world // 2)
    changed = bench.variants[names[-1]]
    if fault == "rate":
        changed.optimizers[0].param_groups[0]["lr"] *= 1.1
    if fault == "scale":  # what Muon itself would not show
        changed.owned.engine._divide_after = 2.0  # type: ignore[attr-defined]
    try:
        differences = bench.check_first_updates()
    except UnequalUpdates as error:
        return str(error)
    finally:
        bench.close()
    return f"equal {max(differences.values(), default=0.0) < 1e-3}"


@pytest.mark.parametrize(
    "fault, message", [("", "equal True"), ("rate", "the first update differs"), ("scale", "gradient norm")]
)
def test_an_unequal_variant_is_refused(fault: str, message: str) -> None:
    results = run_on_loopback(first_updates, 2, TINY, ["adamw", "gather_muon", "dmuon"], fault)
    assert all(message in r for r in results), results


def test_variants_agree_with_accumulation_and_fused_weights() -> None:
    settings = Settings(dim=32, layers=2, heads=2, hidden=48, vocab=64, batch=1, length=16, accumulation=2, fused=True)
    names = ["adamw", "adamw_tuned", "adamw_async", "gather_muon", "dmuon_flat", "dmuon"]
    assert run_on_loopback(first_updates, 4, settings, names, "", ranks_per_node=2) == ["equal True"] * 4


def two_adamw_steps(rank: int, world: int, name: str) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh

    settings = Settings(dim=32, layers=1, heads=2, hidden=48, vocab=64, batch=1, length=16, accumulation=2)
    variant = make_variant(name, settings, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
    for index in range(2):
        variant.train_step(index)
    return variant.masters()


def test_every_way_to_reduce_gives_the_same_adamw() -> None:
    """Accumulated sums and their all-reduce behind the backward end where FSDP2's own do."""
    stock, *others = (run_on_loopback(two_adamw_steps, 4, name)[0] for name in ("adamw", "adamw_tuned", "adamw_async"))
    start = {name: p.detach() for name, p in matrices(make_model(Settings(32, 1, 2, 48, 64)))}
    for other in others:
        for name, weight in stock.items():
            moved = (weight - start[name]).norm()
            # Adam turns a gradient of rounding size into a full step: a few elements may differ.
            assert moved > 0 and (other[name] - weight).norm() < 0.05 * moved


def ns_seconds(rank: int, world: int) -> tuple[float, bool]:
    from torch.distributed.device_mesh import init_device_mesh

    import torchtitan_dmuon.muon as module

    original = module.orthogonalize
    variant = make_variant("dmuon", TINY, init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
    with newton_schulz_timed() as spent:
        variant.train_step(0)
        seconds = spent["seconds"]
    variant.drain()
    return seconds, module.orthogonalize is original


def test_newton_schulz_is_timed_and_left_alone() -> None:
    assert all(seconds > 0 and restored for seconds, restored in run_on_loopback(ns_seconds, 2))


def test_memory_at_rest_is_the_formula() -> None:
    figures = run_on_loopback(peak_bytes, 2, "adamw", TINY, 1)[0]
    elements = sum(p.numel() for p in make_model(TINY).parameters())
    at_rest = figures["rest_bytes_per_rank"]
    assert 12 * elements / 2 <= at_rest <= 12 * elements / 2 + 4096  # fp32 master and two moments, halved
    assert figures["peak_bytes_per_rank"] >= at_rest


def test_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        Lab(1).namespaces.close()
    except LabForbidden as error:
        pytest.skip(f"THE BENCH IS NOT TESTED: {error}")
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    names = "adamw,adamw_async,gather_muon,dmuon"
    argv = ["--regime", "sweep", "--quick", "--ratios", "0.5,2", "--variants", names, "--json", str(out)]
    assert throughput.main([*argv, "--plot", str(picture)]) == 0
    result = json.loads(out.read_text())
    assert [p["wire_over_compute"] for p in result["points"]] == [0.5, 2.0]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    for point in result["points"]:
        assert list(point["variants"]) == names.split(",")
        for variant in point["variants"].values():
            assert set(variant) >= VARIANT_NAMES
            assert set(variant["exposed_seconds"]) == {"gather", "reduce", "publish"}
    rates = [p["link_bits_per_second"] for p in result["points"]]
    assert rates[0] == pytest.approx(4 * rates[1])
    # Between two nodes AdamW sends 8 bytes a parameter, owned ones take 6: 4 reduced and 2 published.
    shapes = dict(matrices(make_model(throughput.QUICK_SETTINGS)))
    owned = sum(p.numel() for p in shapes.values())
    every = sum(p.numel() for p in make_model(throughput.QUICK_SETTINGS).parameters())
    sent = {n: v["internode_bytes_per_step"] for n, v in result["points"][0]["variants"].items()}
    assert sent["adamw"] == pytest.approx(8 * every, rel=0.03) and sent["adamw"] == sent["adamw_async"]
    assert sent["dmuon"] == pytest.approx(6 * owned + 8 * (every - owned), rel=0.03)
    assert "vs best AdamW" in capsys.readouterr().out


def test_one_node_needs_no_lab(capsys: pytest.CaptureFixture[str]) -> None:
    assert throughput.main(["--regime", "g", "--quick", "--mesh", "1x2", "--variants", "adamw,gather_muon,dmuon"]) == 0
    assert "replicated NS over forward-backward" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--regime", "c"], "invalid choice"),
        (["--regime", "a", "--variants", "adamw,dmuom"], "unknown 'dmuom'"),
        (["--regime", "a", "--mesh", "2by2"], "must look like 2x2"),
        (["--regime", "a", "--mesh", "1x3"], "does not fill nodes of 2"),
        (["--regime", "a", "--rounds", "0"], "at least 1"),
    ],
)
def test_bad_arguments(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        throughput.parse(argv)
    assert message in capsys.readouterr().err
