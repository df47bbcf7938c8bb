"""The simulator on the emulated network: a run describes its machine, and the steps can be added up by hand."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from scripts.bench import predict
from scripts.bench.model import Settings, make_model
from scripts.bench.regimes import PAYLOAD

FORWARD_BACKWARD, NS = 1.5, 0.04  # seconds; of Newton-Schulz on an owner
SETTINGS = Settings()
ELEMENTS = sum(p.numel() for p in make_model(SETTINGS).parameters())


def run(*ratios: float, variants: tuple[str, ...] = ("dmuon",)) -> dict[str, Any]:
    """What `throughput` writes, with steps of a second."""
    one = {"step_seconds": 1.0, "ns_share": NS}
    points = [
        {
            "wire_over_compute": ratio,
            # adamw_async sends 4 bytes a parameter over a node's link.
            "link_bits_per_second": 8 * 4 * ELEMENTS / (ratio * FORWARD_BACKWARD) / PAYLOAD,
            "variants": {name: dict(one) for name in variants},
        }
        for ratio in ratios
    ]
    about = {"regime": "sweep", "mesh": "2x2", "settings": asdict(SETTINGS)}
    return {**about, "forward_backward_seconds": FORWARD_BACKWARD, "points": points}


def seconds(found: dict[str, Any]) -> dict[str, float]:
    return {row["variant"]: row["predicted_seconds"] for row in found["rows"]}


def test_steps_add_up(monkeypatch) -> None:
    names = (
        "adamw",
        "adamw_async",
        "gather_muon",
        "dist_muon",
        "dmuon",
        "dmuon_flat",
        "dmuon_sync",
        "dmuon_node_holders",
    )
    result = run(2.0, variants=names)
    # Replicated Newton-Schulz is timed there and does four owners' work.
    result["points"][0]["variants"]["gather_muon"]["ns_share"] = 4 * NS
    real = seconds(predict.compare(result))
    base = predict.read_cluster(str(predict.MACHINE))
    monkeypatch.setattr(predict, "read_cluster", lambda _path: replace(base, far_burst_bytes=0.0))
    step = seconds(predict.compare(result))
    wire = 2 * FORWARD_BACKWARD
    # Computation between two blocking all-reduces fills the bucket of each link again.
    bucket = base.far_burst_bytes / (4 * ELEMENTS) * wire
    assert SETTINGS.layers * bucket < step["adamw"] - real["adamw"] < (SETTINGS.layers + 2) * bucket
    assert step["adamw"] == pytest.approx(FORWARD_BACKWARD + wire, rel=0.03)
    # Hidden behind the backward but for the forward and the head's part of the backward.
    head = 2 / 3 * predict.forward_flops_per_token(SETTINGS, "head") * FORWARD_BACKWARD
    head /= sum(predict.forward_flops_per_token(SETTINGS, g) for g in ("head", *["block"] * SETTINGS.layers))
    assert step["adamw_async"] == pytest.approx(FORWARD_BACKWARD / 3 + head + wire, rel=0.03)
    assert step["gather_muon"] - step["adamw_async"] == pytest.approx(4 * NS, rel=0.2)
    assert step["dist_muon"] - step["adamw_async"] == pytest.approx(2 * NS, rel=0.2)  # two ranks share every matrix out
    # Three quarters of the bytes of owned matrices, and a third of those behind the next forward.
    assert step["dmuon"] < 0.8 * step["adamw_async"]
    assert step["dmuon_sync"] > step["dmuon"] + 0.1
    assert step["dmuon_flat"] > step["dmuon"] + 0.1
    assert step["dmuon_node_holders"] == pytest.approx(step["dmuon"])


def test_without_a_wire_a_step_is_computation_and_newton_schulz() -> None:
    step = seconds(predict.compare(run(1e-3, variants=("adamw", "adamw_async", "dmuon"))))
    assert step["adamw"] == pytest.approx(FORWARD_BACKWARD, rel=0.04)
    assert step["adamw_async"] == pytest.approx(FORWARD_BACKWARD, rel=0.03)
    assert step["dmuon"] == pytest.approx(FORWARD_BACKWARD + NS, rel=0.03)


def test_the_command_holds_predictions_against_measurements(tmp_path, capsys) -> None:
    result = run(0.5, 1.0, variants=("adamw_async", "dmuon", "dmuon_riders"))
    found = predict.compare(result)
    assert {row["variant"] for row in found["rows"]} == {"adamw_async", "dmuon"}  # riders are not simulated
    exact = copy.deepcopy(result)
    rows = iter(found["rows"])
    for point in exact["points"]:
        for name in ("adamw_async", "dmuon"):
            share = point["variants"][name]["ns_share"] * point["variants"][name]["step_seconds"]
            measured = next(rows)["predicted_seconds"] / 1.1
            point["variants"][name] |= {"step_seconds": measured, "ns_share": share / measured}
    run_file, out = tmp_path / "run.json", tmp_path / "out.json"
    run_file.write_text(json.dumps(exact))
    assert predict.main([str(run_file), "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["median_error"] == pytest.approx(0.1, abs=1e-6) and len(written["rows"]) == 4
    assert "median error 10.0%" in capsys.readouterr().out
    run_file.write_text(json.dumps(result))
    assert predict.main([str(run_file)]) == 1
