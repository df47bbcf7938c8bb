"""The tables of the planning page: their own sums; all else is `plan`'s and `simulate`'s."""

from __future__ import annotations

import json

import pytest

from scripts import plan_table
from torchtitan_dmuon.plan import DEFAULT_FLOPS
from torchtitan_dmuon.simulate import read_cluster


def test_splitting_by_hand() -> None:
    cluster = read_cluster("h100")
    planned = plan_table.plan_of("llama3 8B", 1024, "shard_group")
    now, split, sent = plan_table.splitting(planned, cluster, 8)
    s, l = 4096, 14336  # noqa: E741
    assert now == pytest.approx(5 * (4 * s * s * l + 2 * s**3) / DEFAULT_FLOPS)
    # Owners abound, so all is split eightfold: products with X by eight, those of [s, s] repeated, and the messages.
    messages = 2 * 7 / 8 * (5 * s * s + s * l) * 2 / cluster.near_rate + 12 * cluster.near_latency
    assert sent == pytest.approx(messages)
    assert split == pytest.approx(5 * (4 * s * s * l / 8 + 2 * s**3) / DEFAULT_FLOPS + messages)
    assert plan_table.splitting(planned, cluster, 1) == (now, now, 0.0)
    few = plan_table.plan_of("llama3 8B", 8, "shard_group")
    assert plan_table.splitting(few, cluster, 8)[1] == max(few.ns_flops()) / DEFAULT_FLOPS  # nobody is idle


def test_one_command_prints_both_tables(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(plan_table, "VARIANTS", ("adamw", "gather_muon", "dmuon"))
    out = tmp_path / "out.json"
    assert plan_table.main(["--models", "8B", "--worlds", "16", "--json", str(out)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [len(line.split("|")) for line in lines] == [13, 13, 13, 8, 8, 8]
    (row,) = json.loads(out.read_text())["rows"]
    assert row["mesh"] == "2 x 8" and f"| {row['variants']['dmuon']['ratio_to_adamw']:.2f} |" in lines[-1]
