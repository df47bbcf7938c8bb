"""Throughput of DMuon against FSDP2+AdamW and other Muons: same model, data, batch and dtype, one command.

Decides: what the user may ask for, and how figures are shown. How they are measured is `measure.py`'s, on which network
`regimes.py`'s. Regimes a, b and sweep run 2 x 2 ranks in two namespaces whose links are shaped; regime g runs 8 ranks
on one node. Timings need a quiet machine; the share that was idle before the run is reported.

    python -m scripts.bench.throughput --regime a|b|g|sweep [--rounds 5] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401  (the runtime's hooks use it: imported once, before ranks are forked)

from scripts.netlab.lab import Lab, LabForbidden, RankFailed, run_on_loopback
from torchtitan_dmuon.outputs import add_output_arguments, parse_args, save_picture, write_json

from . import regimes
from .measure import describe, summarize
from .memory import peak_bytes
from .model import Settings, product_dtype
from .variants import NAMES

DEFAULT = {
    "a": ("adamw", "adamw_tuned", "adamw_async", "gather_muon", "dmuon", "dmuon_flat", "dmuon_sync"),
    "b": ("adamw", "adamw_tuned", "adamw_async", "gather_muon", "dmuon", "dmuon_flat", "dmuon_sync"),
    # adamw_tuned lies between the other two; leaving it out keeps a sweep near ten minutes.
    "sweep": ("adamw", "adamw_async", "gather_muon", "dmuon"),
    "g": ("adamw_tuned", "gather_muon", "dmuon"),
}
# Few tokens and wide matrices: Newton-Schulz weighs more than messages do. At a fixed quotient of Newton-Schulz to
# forward-backward, tokens grow with the width, so the share of messages falls with it: the real case is wider still.
NODE_SETTINGS = Settings(dim=512, layers=2, heads=8, hidden=1536, vocab=512, batch=4, length=228)
QUICK_SETTINGS = Settings(dim=64, layers=2, heads=2, hidden=96, vocab=64, batch=1, length=32)
_IDLE_WANTED = 0.9


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.throughput", description=__doc__.split("\n\n")[0])
    parser.add_argument("--regime", choices=sorted(DEFAULT), required=True)
    parser.add_argument("--rounds", type=int, default=5, help="of each variant, interleaved (default 5)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a round, after one untimed (default 2)")
    parser.add_argument("--variants", help=f"comma-separated, of {', '.join(NAMES)}")
    parser.add_argument("--mesh", help="replicas x shards, default 2x2 (1x8 in regime g)")
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--ratios", help="wire over compute, comma-separated, instead of the regime's")
    parser.add_argument("--quick", action="store_true", help="a tiny model and 2 rounds: that it works, no figures")
    parser.add_argument(
        "--no-memory", action="store_true", help="leave out the peak memory, which needs runs of its own"
    )
    parser.add_argument("--limit", type=float, default=1800, help="seconds until all ranks are ended (default 1800)")
    add_output_arguments(parser)
    for f in fields(Settings):
        if f.type == "bool":
            parser.add_argument(f"--{f.name}", action="store_true", default=None)
        else:
            parser.add_argument(f"--{f.name.replace('_', '-')}", type=int if f.type == "int" else float)
    args = parse_args(parser, argv)
    if args.rounds < 1 or args.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    names = args.variants.split(",") if args.variants else list(DEFAULT[args.regime])
    if unknown := [n for n in names if n not in NAMES]:
        parser.error(f"--variants: unknown {unknown[0]!r}; choose among {', '.join(NAMES)}")
    args.variants = names
    mesh = args.mesh or ("1x8" if args.regime == "g" else "2x2")
    try:
        args.replicas, args.shards = (int(n) for n in mesh.split("x"))
    except ValueError:
        parser.error(f"--mesh {mesh!r}: must look like 2x2")
    if args.regime != "g" and args.replicas * args.shards % args.ranks_per_node:
        parser.error(f"--mesh {mesh} does not fill nodes of {args.ranks_per_node} ranks")
    if args.quick:
        args.rounds, args.steps, args.no_memory = min(args.rounds, 2), 1, True
    return args


def settings_from(args: argparse.Namespace) -> Settings:
    base = QUICK_SETTINGS if args.quick else NODE_SETTINGS if args.regime == "g" else Settings()
    given = {f.name: getattr(args, f.name) for f in fields(Settings)}
    return replace(base, **{k: v for k, v in given.items() if v is not None})


def idle_share(seconds: float = 1.0) -> float:
    """Of all processors, over the next ``seconds``."""

    def read() -> tuple[int, int]:
        ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)

    idle, total = read()
    time.sleep(seconds)
    later_idle, later_total = read()
    return (later_idle - idle) / max(1, later_total - total)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The JSON of one run. Raises LabForbidden, RankFailed."""
    settings, world = settings_from(args), args.replicas * args.shards
    about: dict[str, Any] = {
        "regime": args.regime,
        "mesh": f"{args.replicas}x{args.shards}",
        "rounds": args.rounds,
        "steps_per_round": args.steps,
        "products": str(product_dtype()).removeprefix("torch."),
        "idle_before": idle_share(),
    }
    if args.regime == "g":
        length, quotient = run_on_loopback(regimes.calibrate, world, settings, limit=300)[0]
        settings = replace(settings, length=length)
        print(
            f"{settings.tokens_per_rank()} tokens per rank: replicated NS is {quotient:.2f} times the forward-backward"
        )
        jobs = run_on_loopback(
            regimes.one_node, world, settings, args.variants, args.rounds, args.steps, limit=args.limit
        )
    else:
        ratios: tuple[float, ...] = regimes.SWEEP if args.regime == "sweep" else (regimes.RATIO[args.regime],)
        if args.ratios:
            ratios = tuple(float(r) for r in args.ratios.split(","))
        elif args.quick:
            ratios = ratios[:1]
        with Lab(world // args.ranks_per_node) as lab:
            jobs = lab.run(
                regimes.cluster,
                args.ranks_per_node,
                lab,
                settings,
                args.variants,
                args.replicas,
                args.ranks_per_node,
                ratios,
                args.rounds,
                args.steps,
                limit=args.limit,
            )
    constant: dict[str, dict[str, Any]] = {n: dict(v) for n, v in jobs[0]["bytes"].items()}
    per_node = world if args.regime == "g" else args.ranks_per_node
    for name in args.variants:
        constant[name]["first_update_difference"] = jobs[0]["first_update_difference"].get(name)
        memory: dict[str, Any] = {"peak_bytes_per_rank": None}
        if not args.no_memory:
            memory = run_on_loopback(
                peak_bytes, world, name, settings, args.replicas, ranks_per_node=per_node, limit=300
            )[0]
        constant[name] |= memory
    points = []
    for i, point in enumerate(jobs[0]["points"]):
        series = [job["points"][i]["series"] for job in jobs]
        shown = {k: v for k, v in point.items() if k != "series"}
        points.append({**shown, "variants": summarize(series, settings, constant)})
    about |= {"settings": describe(settings), "forward_backward_seconds": jobs[0]["forward_backward_seconds"]}
    if args.regime == "g":
        ns = jobs[0]["replicated_ns_seconds"]
        about |= {
            "replicated_ns_seconds": ns,
            "replicated_ns_over_forward_backward": ns / jobs[0]["forward_backward_seconds"],
        }
    if args.regime == "sweep":
        return {**about, "points": points}
    return {**about, **points[0]} if len(points) == 1 else {**about, "points": points}


def table(point: dict[str, Any]) -> str:
    """One point as text: medians with minima, ratios with their interval, megabytes between nodes, waits."""
    head = (
        "variant",
        "step s (min)",
        "tokens/s",
        "vs best AdamW [95 %]",
        "vs gather",
        "MB between",
        "peak MB",
        "NS",
        "wait g/r/p s",
    )
    rows = [head]
    for name, v in point["variants"].items():
        exposed = v["exposed_seconds"]
        rows.append(
            (
                name,
                f"{v['step_seconds']:.3f} ({v['step_seconds_min']:.3f})",
                f"{v['tokens_per_second']:.0f}",
                _ratio(v["ratio_to_adamw"], v["ratio_low"], v["ratio_high"]),
                _ratio(v["ratio_to_gather_muon"]),
                f"{v['internode_bytes_per_step'] / 1e6:.2f}",
                "-" if v["peak_bytes_per_rank"] is None else f"{v['peak_bytes_per_rank'] / 1e6:.1f}",
                "-" if v["ns_share"] is None else f"{100 * v['ns_share']:.1f} %",
                "/".join("-" if exposed[p] is None else f"{exposed[p]:.3f}" for p in exposed),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)


def _ratio(value: float | None, low: float | None = None, high: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" + ("" if low is None else f" [{low:.3f}, {high:.3f}]")


def plot(result: dict[str, Any], path: Path) -> None:
    """A sweep as ratios over wire / compute with their intervals; a single point as bars of step time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    points = result.get("points") or [result]
    names = list(points[0]["variants"])
    if len(points) > 1:
        for name in names:
            rows = [p["variants"][name] for p in points]
            y = [r["ratio_to_adamw"] for r in rows]
            below = [v - (r["ratio_low"] or v) for v, r in zip(y, rows)]
            above = [(r["ratio_high"] or v) - v for v, r in zip(y, rows)]
            errors = [[max(0.0, e) for e in side] for side in (below, above)]
            axes.errorbar([p["wire_over_compute"] for p in points], y, errors, label=name, marker="o", capsize=3)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(xscale="log", xlabel="wire time / compute time of AdamW", ylabel="throughput over the best AdamW")
        axes.legend()
    else:
        rows = [points[0]["variants"][n] for n in names]
        axes.bar(names, [r["step_seconds"] for r in rows], color="#7a9cc6", label="median")
        axes.plot(names, [r["step_seconds_min"] for r in rows], "k_", markersize=18, label="minimum")
        axes.set(ylabel="seconds per step")
        axes.tick_params(axis="x", rotation=25)
        axes.legend()
    save_picture(figure, path, dpi=150)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    try:
        result = run(args)
    except (LabForbidden, RankFailed) as error:
        print(f"throughput: {error}", file=sys.stderr)
        return 1
    for point in result.get("points") or [result]:
        if point.get("link_bits_per_second"):
            rate = point["link_bits_per_second"] / 1e6
            print(f"\nwire over compute {point['wire_over_compute']:g} ({rate:.1f} Mbit/s between nodes)")
        print(table(point))
    if "replicated_ns_over_forward_backward" in result:
        quotient = result["replicated_ns_over_forward_backward"]
        print(f"replicated NS over forward-backward, measured after the run: {quotient:.2f}")
        if abs(quotient - regimes.REPLICATED) > regimes.REPLICATED_SLACK:
            print(f"WARNING: not within {regimes.REPLICATED} +- {regimes.REPLICATED_SLACK}: this run is not regime G")
    if result["idle_before"] < _IDLE_WANTED:
        idle = 100 * result["idle_before"]
        print(f"WARNING: the machine was only {idle:.0f} % idle before the run: these times are no figures")
    if args.json:
        write_json(args.json, result)
    if args.plot:
        plot(result, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
