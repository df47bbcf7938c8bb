"""Predicted against measured step times: the simulator on the emulated network, held against a run of `throughput`.

Decides: what is read from the run to describe its machine: seconds of a forward and backward with unlimited links
(`adamw_async`), seconds of Newton-Schulz (one variant, fastest link), and the rate set for each point. All else is in
`emulated.toml`, and nothing is fitted to a variant. Keeps: plan, layouts and order are the simulator's own.

    python -m scripts.bench.throughput --regime sweep --json SWEEP.json
    python -m scripts.bench.predict SWEEP.json [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan_dmuon.footprint import Group, Options, lay_out
from torchtitan_dmuon.newton_schulz import NewtonSchulz
from torchtitan_dmuon.outputs import add_output_arguments, parse_args, write_json
from torchtitan_dmuon.ownership import MeshSpec, OwnershipPlan, assign
from torchtitan_dmuon.runtime.selection import group_units, parameter_slots, select_specs
from torchtitan_dmuon.simulate import DMUON, place, read_cluster
from torchtitan_dmuon.step_model import (
    Cluster,
    Work,
    ns_flops,
    simulate_adamw,
    simulate_dist_muon,
    simulate_dmuon,
    simulate_gather_muon,
)
from torchtitan_dmuon.topology import Topology

from .model import MATRICES, Settings, make_model
from .regimes import PAYLOAD

MACHINE = Path(__file__).parent / "emulated.toml"
BAR = 0.10  # of the median error
# In all others the all-reduce starts from FSDP2's hook and runs behind the backward (`fsdp.py`), whatever the backend.
BLOCKED = ("adamw", "adamw_tuned")


@dataclass(frozen=True)
class Benched:
    """The bench's model as the simulator takes it. ``work``: every parameter in its block; ``owned``: the blocks' norms
    in the model's own group, as the bench shards them beside owned matrices."""

    topology: Topology
    plan: OwnershipPlan
    work: Work
    owned: Work

    @staticmethod
    def of(settings: Settings, replicas: int, shards: int, ranks_per_node: int) -> Benched:
        topology = Topology(replicas * shards, shards, ranks_per_node)
        model = make_model(settings)
        slots = parameter_slots(model)
        specs = select_specs(slots, MATRICES, settings.layouts(), None)
        by_name = {spec.name: spec for spec in specs}
        grouped, _ = group_units(model, list(model.layers), {name: slots[name] for name in by_name})
        pieces = {unit: tuple(p for n in names for p in by_name[n].pieces()) for unit, names in grouped}
        unit_of = {p.key: i for i, (unit, _) in enumerate(grouped) for p in pieces[unit]}
        mesh = MeshSpec(topology.world, shards, ranks_per_node)
        plan = assign([p for ps in pieces.values() for p in ps], mesh, unit_of=unit_of)

        names = ["embed", *pieces, "head"]
        rest = {
            name: sum(p.numel() for n, p in model.named_parameters() if n.startswith(f"{name}.") and n not in by_name)
            for name in names
        }
        groups = [Group(name, rest[name], pieces.get(name, ())) for name in names]
        apart = [replace(g, rest=0) if g.pieces else g for g in groups]
        norms = Group("norms", sum(g.rest for g in groups if g.pieces))
        flops = [settings.batch * settings.length * forward_flops_per_token(settings, name) for name in names]
        options = Options(micro_batches=settings.accumulation, settings=NewtonSchulz(), device_type="cpu")
        return Benched(
            topology,
            plan,
            Work(groups, flops, 0.0, options),
            Work(lay_out([norms, *apart], topology, plan), [0.0, *flops], 0.0, options),
        )


def forward_flops_per_token(s: Settings, group: str) -> float:
    """2 per multiply-add: products with the weights, and causal attention, half of all pairs."""
    if group == "embed":
        return 0.0
    if group == "head":
        return 2.0 * s.dim * s.vocab
    return 2.0 * (4 * s.dim**2 + 3 * s.dim * s.hidden) + 2.0 * s.length * s.dim


def machine(result: dict[str, Any], point: dict[str, Any], benched: Benched, base: Cluster) -> Cluster:
    """``base`` with the rates that the run measured."""
    work, world = benched.work, benched.topology.world
    first = result["points"][0]["variants"]
    name = "gather_muon" if "gather_muon" in first else "dmuon"
    ns = sum(ns_flops(g, work.options) for g in work.groups) / (1 if name == "gather_muon" else world)
    return replace(
        base,
        training_flops=3 * sum(work.forward_flops) * work.options.micro_batches / result["forward_backward_seconds"],
        update_flops=ns / (first[name]["ns_share"] * first[name]["step_seconds"]),
        far_rate=point["link_bits_per_second"] * PAYLOAD / 8 / base.ranks_per_node,
    )


def predict(cluster: Cluster, benched: Benched, name: str) -> float | None:
    """Seconds of a step; None for a variant that is not simulated here."""
    if name not in BLOCKED:
        cluster = replace(cluster, blocking_all_reduce=False)
    if name.startswith("adamw"):
        return simulate_adamw(cluster, benched.work, benched.topology).step_seconds
    if name == "gather_muon":
        return simulate_gather_muon(cluster, benched.work, benched.topology).step_seconds
    if name == "dist_muon":  # inside a shard group matrices are taken to be shared out evenly
        whole = sum(ns_flops(g, benched.work.options) for g in benched.work.groups)
        share = whole / benched.topology.shard_size
        return simulate_dist_muon(cluster, benched.work, benched.topology, share).step_seconds
    if name not in DMUON:
        return None
    placed = place(benched.plan, benched.topology, benched.owned.groups, name, benched.owned.options.device_type)
    return simulate_dmuon(cluster, replace(benched.owned, groups=placed.groups), placed).step_seconds


def compare(result: dict[str, Any]) -> dict[str, Any]:
    """Rows of predicted and measured seconds, and the errors |predicted / measured - 1|."""
    points = result.get("points") or [result]
    result = {**result, "points": points}
    base = read_cluster(str(MACHINE))
    replicas, shards = (int(n) for n in result["mesh"].split("x"))
    benched = Benched.of(Settings(**result["settings"]), replicas, shards, base.ranks_per_node)
    rows = []
    for point in points:
        cluster = machine(result, point, benched, base)
        for name, measured in point["variants"].items():
            predicted = predict(cluster, benched, name)
            if predicted is not None:
                seconds = measured["step_seconds"]
                rows.append(
                    {
                        "wire_over_compute": point["wire_over_compute"],
                        "variant": name,
                        "predicted_seconds": predicted,
                        "measured_seconds": seconds,
                        "ratio": predicted / seconds,
                    }
                )
    errors = [abs(row["ratio"] - 1) for row in rows]
    return {"rows": rows, "median_error": statistics.median(errors), "largest_error": max(errors)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.predict", description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path, help="JSON of throughput: regime a, b or sweep")
    add_output_arguments(parser, picture=False)
    args = parse_args(parser, argv)
    result = json.loads(args.run.read_text())
    if result["regime"] == "g":
        parser.error("regime g has no links between nodes: give a run of regime a, b or sweep")
    found = compare(result)
    rows: list[dict[str, Any]] = found["rows"]
    ratios = list(dict.fromkeys(row["wire_over_compute"] for row in rows))
    print(f"predicted / measured seconds of a step, by wire over compute\n{'':20}", end="")
    print("".join(f"{ratio:>24g}" for ratio in ratios))
    for name in dict.fromkeys(row["variant"] for row in rows):
        cells = [
            f"{row['predicted_seconds']:9.3f} /{row['measured_seconds']:6.3f} {row['ratio']:6.2f}"
            for row in rows
            if row["variant"] == name
        ]
        print(f"{name:20}" + "".join(f"{cell:>24}" for cell in cells))
    print(f"median error {found['median_error']:.1%} (bar {BAR:.0%}), largest {found['largest_error']:.1%}")
    if args.json:
        write_json(args.json, found)
    return 0 if found["median_error"] <= BAR + 1e-9 else 1


if __name__ == "__main__":
    sys.exit(main())
