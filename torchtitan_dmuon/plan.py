"""`dmuon plan`: who will own what, what it will weigh and what will cross the network, before any process group exists.

Decides: how a plan is shown, what is worth a warning, and how costs are measured. Does not make the plan
(`titan/planning.py`) nor weigh it (`footprint.py`). Keeps: the JSON names are stable; more may be added.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchtitan_dmuon.cli import BYTES, SENT, SLOW_WORLD, in_unit, read_worlds
from torchtitan_dmuon.footprint import PHASES, Footprint, Options, footprint, lay_out
from torchtitan_dmuon.outputs import add_output_arguments, prepare_outputs, save_picture, write_json
from torchtitan_dmuon.packing import packing_bound
from torchtitan_dmuon.topology import Topology

if TYPE_CHECKING:
    from torchtitan_dmuon.titan.planning import Planned

# Newton-Schulz in bf16 on an H100: 990 TFLOP/s of dense peak, of which its products are taken to reach about half.
DEFAULT_FLOPS = 500e12
UNEVEN = 1.5  # largest owner over the mean, and busiest link over the mean: beyond it the plan warns
CALIBRATION_SECONDS = 2.0  # of repeated updates per shape


# ---- figures ----


def seconds_of(planned: Planned, cost: float, flops_per_second: float) -> float:
    """Seconds of a cost: FLOP equivalents at this rate, or measured picoseconds."""
    measured = planned.plan.cost_model.get("unit") == "picosecond"
    return cost / 1e12 if measured else cost / flops_per_second


def kinds(planned: Planned) -> list[dict[str, Any]]:
    """Pieces alike but for the numbers in their names, largest share of the cost first."""
    rows: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for piece, cost in zip(planned.plan.pieces, planned.plan.costs, strict=True):
        kind = re.sub(r"\.\d+\.", ".N.", piece.name)
        row = rows.setdefault(
            (kind, piece.shape),
            {"kind": kind, "shape": list(piece.shape), "matrices": [list(s) for s in piece.matrices()], "count": 0},
        )
        row["count"] += 1
        row["cost"] = cost
    return sorted(rows.values(), key=lambda row: -row["cost"] * row["count"])


def summary(planned: Planned, flops_per_second: float) -> dict[str, Any]:
    """The figures under the names of DESIGN section 5, and more. Bytes between nodes are sent by all ranks together;
    those of the busiest link pass one rank in its busier direction."""
    plan, weighed = planned.plan, planned.footprint
    traffic, adamw = Footprint.total(weighed.traffic), Footprint.total(weighed.adamw_traffic)
    ns = [n / flops_per_second for n in planned.ns_flops()]
    return {
        **plan.summary(),
        "world": planned.topology.world,
        "rest_bytes_per_rank": int(weighed.rest_W.max()),
        "peak_bytes_per_rank": int(weighed.peak_W.max()),
        "adamw_rest_bytes_per_rank": weighed.adamw_rest,
        "adamw_peak_bytes_per_rank": weighed.adamw_peak,
        "internode_bytes_per_step": traffic.far,
        "intranode_bytes_per_step": traffic.near,
        "busiest_link_bytes": traffic.busiest_far,
        "adamw_internode_bytes_per_step": adamw.far,
        "adamw_intranode_bytes_per_step": adamw.near,
        "adamw_busiest_link_bytes": adamw.busiest_far,
        "bytes_by_phase": {
            phase: {"intra_node": x.near, "inter_node": x.far, "busiest_link": x.busiest_far}
            for phase, x in weighed.traffic.items()
        },
        "peak_bytes_by_phase": {p: int(weighed.peaks[p].max()) for p in PHASES},
        "adamw_peak_bytes_by_phase": dict(weighed.adamw_peaks),
        "update_milliseconds": 1e3 * seconds_of(planned, plan.largest_cost, flops_per_second),
        "mean_update_milliseconds": 1e3 * seconds_of(planned, plan.mean_cost, flops_per_second),
        "ns_milliseconds": 1e3 * max(ns),
        "ns_milliseconds_replicated": 1e3 * sum(ns),
        "flops_per_second": flops_per_second,
        "micro_batches": planned.options.micro_batches,
        "defer_reduce": planned.options.defer_reduce,
        "mesh": {
            "replicas": planned.topology.replicas,
            "shards": planned.topology.shard_size,
            "ranks_per_node": planned.topology.ranks_per_node,
        },
        "assumed": planned.assumed,
        "warnings": warnings(planned, flops_per_second),
        "kinds": kinds(planned),
        "owners": {piece.key: owner for piece, owner in zip(plan.pieces, plan.owners, strict=True)},
    }


def warnings(planned: Planned, flops_per_second: float) -> list[str]:
    """What a user should know before renting the machines, one sentence each."""
    plan, topology, weighed = planned.plan, planned.topology, planned.footprint
    found = []
    if plan.idle_owners:
        pieces = plan.summary()["pieces"]
        found.append(
            f"{plan.idle_owners} of {plan.n_owners} owners are idle (there are {pieces} pieces): they wait for the "
            "others' updates"
        )
    if plan.imbalance > UNEVEN:
        lost = 1e3 * seconds_of(planned, plan.largest_cost - plan.mean_cost, flops_per_second)
        bound = packing_bound(plan.costs, plan.n_owners)
        why = (
            "no assignment of whole pieces is better"
            if plan.largest_cost <= 1.02 * bound
            else "the packing is not tight"
        )
        found.append(
            f"the largest owner has {plan.imbalance:.2f} times the mean cost, {lost:.1f} ms more than a perfect split "
            f"would take; {why}"
        )
    lone = []
    for group in planned.groups:
        layout = group.layout
        if layout is not None and len(group.pieces) > 1 and topology.shard_size > 1:
            cell = topology.cells[0]
            if len({topology.holder(root, cell) for root in layout.ranges}) == 1:
                lone.append(group.name)
    if lone:
        found.append(f"all gathers of {len(lone)} units come from one rank of the shard group ({lone[0]}, ...)")
    peak = int(weighed.peak_W.max())
    if peak > weighed.adamw_peak:
        phase = max(PHASES, key=lambda p: int(weighed.peaks[p].max()))
        unit, one = in_unit(peak, BYTES)
        rank = int(weighed.peak_W.argmax())
        found.append(
            f"the planned peak, {peak / one:.2f} {unit} on rank {rank} in {phase}, exceeds AdamW's "
            f"{weighed.adamw_peak / one:.2f} {unit}"
        )
        found += [f"{choice}: {need / one:.2f} {unit} at the peak" for choice, need in lighter(planned, peak)]
    if topology.nodes > 2 and planned.options.device_type == "cuda" and topology.irregularity:
        found.append(
            f"units travel point to point, straight between all nodes and an owner: {topology.irregularity}. An owner "
            f"receives {topology.nodes - 1} copies of its piece through its one link"
        )
    far = Footprint.total(weighed.traffic)
    if far.far and far.busiest_far > UNEVEN * far.far / topology.world:
        rank = int(torch.maximum(far.sent_far_W, far.received_far_W).argmax())
        unit, one = in_unit(far.busiest_far, SENT)
        found.append(
            f"rank {rank}'s link between nodes carries {far.busiest_far / one:.2f} {unit} a step, "
            f"{far.busiest_far * topology.world / far.far:.1f} times the mean (AdamW: "
            f"{Footprint.total(weighed.adamw_traffic).busiest_far / one:.2f} {unit})"
        )
    return found


def lighter(planned: Planned, peak: int) -> list[tuple[str, int]]:
    """(option, bytes) of what was chosen otherwise and would have a lower peak on the fullest rank."""
    topology, options = planned.topology, planned.options
    tries: list[tuple[str, Topology, Options]] = []
    if topology.holders == "node":
        tries.append(('dmuon.holders = "shard_group"', replace(topology, holders="shard_group"), options))
    elif topology.shard_size > topology.ranks_per_node and topology.ownership == "global":
        tries.append(('dmuon.holders = "node"', replace(topology, holders="node"), options))
    if options.defer_reduce and options.micro_batches > 1:
        tries.append(("dmuon.defer_reduce = false", topology, replace(options, defer_reduce=False)))
    needs = [
        (choice, int(footprint(t, lay_out(planned.groups, t, planned.plan), o).peak_W.max())) for choice, t, o in tries
    ]
    return [(choice, need) for choice, need in needs if need < peak]


# ---- measured costs ----


def calibrate(planned: Planned, path: Path, device: torch.device) -> dict[str, dict[str, float]]:
    """Time one whole update of each shape of the plan; of DMuon with ``ns_form`` "auto" in both forms of Newton-Schulz.
    Writes {"MxN": seconds, and "forms": {"MxN": form} where both were timed}; returns all seconds by shape and form.

    The Gram form is chosen where it saves a tenth or more: less is within the noise, and in 16 bits it costs accuracy.
    """
    from torchtitan_dmuon.titan.config import owned_group
    from torchtitan_dmuon.titan.planning import owned_optimizer

    shapes = sorted({s for piece in planned.plan.pieces for s in piece.matrices()})
    group = owned_group(planned.config)
    both = group.optimizer_name == "DMuon" and group.optimizer_kwargs.get("ns_form", "auto") == "auto"
    variants = {form: {"ns_form": form} for form in ("standard", "gram")} if both else {"update": {}}
    seconds: dict[str, dict[str, float]] = {}
    for m, n in shapes:
        param = torch.nn.Parameter(torch.randn(m, n, device=device) * 0.02)
        param.grad = torch.randn(m, n, device=device)
        steps: dict[str, Callable[[], Any]] = {
            name: owned_optimizer(planned.config, [param], **change).step for name, change in variants.items()
        }
        seconds[f"{m}x{n}"] = _time_in_turn(steps, device)
    table: dict[str, Any] = {shape: each.get("update") for shape, each in seconds.items()}
    if both:
        chosen = {
            shape: "gram" if each["gram"] <= 0.9 * each["standard"] else "standard" for shape, each in seconds.items()
        }
        table = {shape: seconds[shape][form] for shape, form in chosen.items()} | {"forms": chosen}
    path.write_text(json.dumps(table, indent=2) + "\n")  # no mark: hours of measuring are overwritten on demand alone
    return seconds


def _time_in_turn(calls: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Median seconds of each call, made in turn so that what else the machine does hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # makes state, warms up
    begin = time.perf_counter()
    while time.perf_counter() - begin < CALIBRATION_SECONDS and len(seconds[next(iter(calls))]) < 20:
        for name, call in calls.items():
            _settle(device)
            start = time.perf_counter()
            call()
            _settle(device)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- pictures ----


def print_tables(planned: Planned, figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=140)
    plan, topology, weighed = planned.plan, planned.topology, planned.footprint
    model = planned.config.model_spec
    console.print(
        f"{model.name} {model.flavor}: {topology.replicas} x {topology.shard_size} (replicas x shards) on "
        f"{topology.nodes} nodes of {topology.ranks_per_node}; routing {topology.routing}, holders {topology.holders}, "
        f"ownership {topology.ownership}; {planned.options.micro_batches} micro-batches a step",
        highlight=False,
    )
    for line in planned.assumed:
        console.print(f"  assumed: {line}", highlight=False, markup=False)

    table = Table(title=f"{figures['matrices']} matrices in {figures['pieces']} pieces, {figures['riders']} riders")
    for heading in ("kind", "shape", "matrices of a piece", "pieces", "elements", "share of cost", "update, ms"):
        table.add_column(heading, justify="left" if heading == "kind" else "right", no_wrap=True)
    total = sum(plan.costs)
    for row in figures["kinds"]:
        elements = row["count"] * math.prod(row["shape"])
        unit, one = in_unit(elements, {"": 1, "k": 1e3, "M": 1e6, "G": 1e9})
        shapes = Counter(tuple(s) for s in row["matrices"])
        inside = ", ".join(f"{k} x {m}x{n}" if k > 1 else f"{m}x{n}" for (m, n), k in shapes.items())
        table.add_row(
            row["kind"],
            "x".join(map(str, row["shape"])),
            inside or "a rider",
            str(row["count"]),
            f"{elements / one:,.4g} {unit}".rstrip(),
            f"{row['cost'] * row['count'] / total:.1%}",
            f"{1e3 * seconds_of(planned, row['cost'], figures['flops_per_second']):.3g}",
        )
    console.print(table)

    loads = plan.loads()
    table = Table(title="owners", show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    rate = (
        "measured costs"
        if plan.cost_model.get("unit") == "picosecond"
        else (f"at {figures['flops_per_second'] / 1e12:.0f} TFLOP/s")
    )
    for name, value in (
        ("owners, of which idle", f"{plan.n_owners}, {plan.idle_owners}"),
        ("largest cost / bound of any assignment of whole pieces", f"{plan.largest_cost / plan.lower_bound:.4f}"),
        ("largest cost / mean", f"{plan.imbalance:.3f}"),
        ("smallest cost / mean", f"{min(loads) / plan.mean_cost:.3f}"),
        (
            f"update of the largest owner, mean owner; ms, {rate}",
            f"{figures['update_milliseconds']:.3g}, {figures['mean_update_milliseconds']:.3g}",
        ),
        (
            f"its Newton-Schulz, that of every matrix; ms at {figures['flops_per_second'] / 1e12:.0f} TFLOP/s",
            f"{figures['ns_milliseconds']:.3g}, {figures['ns_milliseconds_replicated']:.3g}",
        ),
    ):
        table.add_row(name, value)
    console.print(table)

    unit, one = in_unit(max(weighed.adamw_peak, int(weighed.peak_W.max())), BYTES)
    table = Table(title=f"{unit} per rank, without activations")
    for heading in ("", "DMuon, most", "mean", "AdamW"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    rows: list[tuple[str, torch.Tensor, int]] = [("at rest", weighed.rest_W, weighed.adamw_rest)]
    rows += [(f"peak, {p}", weighed.peaks[p], weighed.adamw_peaks[p]) for p in PHASES]
    for name, each_W, adamw in rows:
        table.add_row(name, *(f"{float(x) / one:,.2f}" for x in (each_W.max(), each_W.double().mean(), adamw)))
    console.print(table)

    ours, theirs = Footprint.total(weighed.traffic), Footprint.total(weighed.adamw_traffic)
    unit, one = in_unit(max(ours.near, ours.far, theirs.near, theirs.far), SENT)
    table = Table(title=f"bytes sent per step, {unit}")
    for heading in ("", "inside nodes, all", "between nodes, all", "mean link between", "busiest link between"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)

    def add(name: str, loads: Any, **style: Any) -> None:
        figures = (loads.near, loads.far, loads.far / topology.world, loads.busiest_far)
        table.add_row(name, *(f"{x / one:,.3f}" for x in figures), **style)

    for phase, each in weighed.traffic.items():
        add({"rest": "AdamW's part (FSDP2)"}.get(phase, phase.replace("_", ", level ")), each)
    add("DMuon", ours, end_section=True)
    for phase, each in weighed.adamw_traffic.items():
        add(phase.replace("_", "-"), each)
    add("FSDP2+AdamW", theirs)
    console.print(table)
    for line in figures["warnings"]:
        console.print(f"warning: {line}", style="yellow", highlight=False, markup=False)


def plot(planned: Planned, path: Path) -> None:
    """Four pictures in one PNG: cost, memory and bytes between nodes per rank, and bytes per phase beside AdamW's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    plan, topology, weighed = planned.plan, planned.topology, planned.footprint
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    (cost, memory), (links, phases) = figure.subplots(2, 2)
    of_memory, byte = in_unit(max(weighed.adamw_peak, int(weighed.peak_W.max())), BYTES)
    loads = sorted(plan.loads(), reverse=True)
    cost.step(range(len(loads)), [x / plan.mean_cost for x in loads], where="post", color="C0")
    cost.axhline(1, color="gray", linestyle="--", linewidth=0.8)
    cost.axhline(plan.lower_bound / plan.mean_cost, color="C3", linestyle=":", linewidth=1, label="bound")
    cost.set(title="cost of the update per owner", xlabel="owners, by cost", ylabel="times the mean", ylim=(0, None))
    cost.legend()
    for label, values_W in (("at rest", weighed.rest_W), ("peak", weighed.peak_W)):
        memory.step(range(topology.world), sorted((values_W / byte).tolist(), reverse=True), where="post", label=label)
    for label, value in (("AdamW at rest", weighed.adamw_rest), ("AdamW peak", weighed.adamw_peak)):
        memory.axhline(value / byte, linestyle="--", color="C0" if "rest" in label else "C1", label=label)
    memory.set(title="memory without activations", xlabel="ranks, by bytes", ylabel=of_memory, ylim=(0, None))
    memory.legend()
    ours, theirs = Footprint.total(weighed.traffic), Footprint.total(weighed.adamw_traffic)
    of_links, each = in_unit(max(ours.busiest_far, theirs.busiest_far), SENT)
    for label, values_W in (("sent", ours.sent_far_W), ("received", ours.received_far_W)):
        links.step(range(topology.world), sorted((values_W / each).tolist(), reverse=True), where="post", label=label)
    links.axhline(theirs.busiest_far / each, linestyle="--", color="gray", label="AdamW")
    links.set(title="bytes between nodes per rank and step", xlabel="ranks, by bytes", ylabel=of_links, ylim=(0, None))
    links.legend()
    of_phases, each = in_unit(max(ours.far, theirs.far), SENT)
    for row, (name, traffic) in enumerate((("DMuon", weighed.traffic), ("AdamW", weighed.adamw_traffic))):
        left = 0.0
        for phase, sent in traffic.items():
            phases.barh(row, sent.far / each, left=left, label=f"{name}: {phase}", height=0.5)
            left += sent.far / each
    phases.set_yticks([0, 1], ["DMuon", "AdamW"])
    phases.set(title="bytes between nodes per step, all ranks", xlabel=of_phases)
    phases.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False)
    save_picture(figure, path, dpi=110)


# ---- command ----


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """What `plan` and `simulate` are told about the run; configuration flags follow as `train` takes them."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="TOML file, or with --module the name of a registry config; also as --config CONFIG",
    )
    parser.add_argument("--module", help="module of the registry config, such as llama3")
    parser.add_argument("--flavor", default="", help="another size of the model's family, such as 405B")
    parser.add_argument(
        "--pattern", default="", help="names of the matrices, for a configuration without a DMuon group"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        default=0,
        metavar="G",
        help="default: the file's, else 8 (simulate: the cluster's)",
    )
    add_output_arguments(parser)


def config_first(argv: Sequence[str] | None) -> list[str]:
    """The arguments with `--config CONFIG`, as training takes it, as the CONFIG that these commands begin with."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for index, arg in enumerate(argv):
        if arg == "--config" and index + 1 < len(argv):
            return [argv[index + 1], *argv[:index], *argv[index + 2 :]]
        if arg.startswith("--config="):
            return [arg.partition("=")[2], *argv[:index], *argv[index + 1 :]]
    return argv


def run_with_config(
    prog: str,
    args: argparse.Namespace,
    flags: Sequence[str],
    body: Callable[[Any, list[int]], None],
    *outputs: Path | None,
) -> int:
    """Call ``body`` with the Trainer.Config and the worlds that the arguments name; ``outputs``: files that it writes
    besides the common ones. Exit code 0, or 2 with one line on standard error, with the place in the file where it has
    one."""
    from torchtitan_dmuon.titan import toml_config
    from torchtitan_dmuon.titan.config import ConfigError
    from torchtitan_dmuon.titan.platform import PlatformError

    run = None
    try:
        worlds = read_worlds(args.world)
        if args.ranks_per_node < 0:
            raise ConfigError(f"--ranks-per-node {args.ranks_per_node}: expected at least 0")
        prepare_outputs(args.plot, args.json, *outputs, overwrite=args.overwrite)
        module = ["--module", args.module] if args.module else []
        run = toml_config.parse([*module, "--config", args.config, *flags])
        if max(worlds) > SLOW_WORLD:
            print(f"{prog}: {max(worlds):,} ranks take a while", file=sys.stderr)
        body(run.config, worlds)
    except (ConfigError, PlatformError, ValueError, OSError) as error:
        located = run.source.locate(error) if run is not None and isinstance(error, ConfigError) else error
        print(f"{prog}: {located}", file=sys.stderr)
        return 2
    return 0


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Owners, balance, memory and bytes of a configuration; nothing is trained. Configuration flags "
        "(--training.seq_len 4096, --dmuon.routing flat) as for training.",
        allow_abbrev=False,
    )
    add_config_arguments(parser)
    parser.add_argument("--world", required=True, metavar="N", help="data-parallel ranks")
    parser.add_argument(
        "--flops", type=float, default=DEFAULT_FLOPS, help="FLOP/s of the update (default: %(default).0e)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="kind of device to plan for")
    parser.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="time the updates on this machine, for cost_file"
    )
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "dmuon plan") -> int:
    """Exit code 0, or 2 with one line on standard error when the configuration cannot be planned."""
    args, flags = build_parser(prog).parse_known_args(config_first(argv))

    def body(config: Any, worlds: list[int]) -> None:
        from torchtitan_dmuon.titan.planning import make_plan

        if len(worlds) > 1:
            raise ValueError(f"--world {args.world}: expected one number; `dmuon simulate` takes several")
        if not 1 <= args.flops <= 1e30:
            raise ValueError(f"--flops {args.flops}: expected a number from 1 to 1e30")
        begin = time.perf_counter()
        planned = make_plan(config, worlds[0], args.ranks_per_node, args.device, args.flavor, args.pattern)
        figures = summary(planned, args.flops)
        figures["plan_seconds"] = time.perf_counter() - begin
        print_tables(planned, figures)
        if args.json is not None:
            write_json(args.json, figures)
        if args.plot is not None:
            plot(planned, args.plot)
            print(f"picture: {args.plot}")
        if args.calibrate is not None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            for shape, both in calibrate(planned, args.calibrate, device).items():
                print(f"{shape:>12}: " + ", ".join(f"{form} {1e3 * each:.3f} ms" for form, each in both.items()))
            print(f"timed on {device.type}: {args.calibrate}; use it as dmuon.cost_file")

    return run_with_config(prog, args, flags, body, args.calibrate)


if __name__ == "__main__":
    sys.exit(main())
