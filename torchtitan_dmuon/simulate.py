"""`dmuon simulate`: the step time of every variant on a described cluster, before it is rented.

Decides: which variants are simulated, how a cluster file is read, and how results are shown. Does not decide how a step
runs (`step_model.py`) nor what it moves (the plan). Keeps: the JSON names are stable; more may be added. What the model
leaves out is listed in docs/planning.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_dmuon.cli import BYTES, SENT, in_unit
from torchtitan_dmuon.events import trace_events
from torchtitan_dmuon.footprint import (
    MASTER_BYTES,
    Footprint,
    Group,
    Options,
    adamw_memory,
    footprint,
    fsdp_traffic,
    lay_out,
    uses_collectives,
)
from torchtitan_dmuon.newton_schulz import flops, workspace_bytes
from torchtitan_dmuon.outputs import save_picture, write_json
from torchtitan_dmuon.ownership import OwnershipPlan, assign
from torchtitan_dmuon.plan import add_config_arguments, config_first, run_with_config
from torchtitan_dmuon.step_model import (
    Cluster,
    Placed,
    Simulated,
    Work,
    simulate_adamw,
    simulate_dist_muon,
    simulate_dmuon,
    simulate_gather_muon,
)
from torchtitan_dmuon.topology import Topology

if TYPE_CHECKING:
    from torchtitan_dmuon.titan.planning import Planned

CLUSTERS = Path(__file__).parent / "clusters"
# Name -> (options of the topology, other options of `Placed`). "dmuon" follows the configuration.
DMUON: dict[str, tuple[dict[str, str], dict[str, bool]]] = {
    "dmuon": ({}, {}),
    "dmuon_flat": ({"routing": "flat"}, {}),
    "dmuon_sync": ({}, {"sync": True}),
    "dmuon_node_holders": ({"holders": "node"}, {}),
    "dmuon_direct": ({}, {"ring": False}),
    "dmuon_overlap": ({}, {"ring": False, "overlap": True}),
}
VARIANTS = ("adamw", "gather_muon", "dist_muon", *DMUON)
LEGEND = {
    "dmuon_direct": "point to point, as on irregular topologies; one unit after another, its worst case",
    "dmuon_overlap": "point to point; all units at once that may be in flight, its best case",
}


# Table of a cluster file -> its keys; those of "" stand above the first table.
_CLUSTER_KEYS = {
    "": ("ranks_per_node", "device", "inside", "between"),
    "device": (
        "peak_flops",
        "training_efficiency",
        "update_efficiency",
        "memory_bytes_per_second",
        "memory_efficiency",
        "memory_bytes",
    ),
    "inside": ("bytes_per_second", "efficiency", "latency_seconds"),
    "between": (
        "bits_per_second",
        "efficiency",
        "latency_seconds",
        "shared",
        "blocking_all_reduce",
        "burst_bytes",
    ),
}


# By the end of a key; other numbers are rates and sizes. Beyond these no step has an end, or a beginning.
_CLUSTER_RANGES = {"efficiency": (1e-4, 1.0), "seconds": (1e-12, 1e3), "ranks_per_node": (1.0, 1e5)}


class ClusterError(ValueError):
    """A cluster file that cannot be used."""


def read_cluster(name: str) -> Cluster:
    """The cluster of a file, or of a name among those that come with the package. Raises ClusterError, which names the
    file and the key."""
    import tomli

    path = Path(name)
    if not name.endswith(".toml"):
        path = CLUSTERS / f"{name}.toml"
        if not path.exists():
            known = ", ".join(sorted(p.stem for p in CLUSTERS.glob("*.toml")))
            raise ClusterError(f"--cluster {name}: no such cluster; known are {known}, or give a .toml file")
    try:
        data = tomli.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # also what is no text, or nested without end
        raise ClusterError(f"{path}: {error}") from None
    tables = {"": data, **{table: data.get(table, {}) for table in _CLUSTER_KEYS if table}}
    for table, keys in _CLUSTER_KEYS.items():
        if not isinstance(tables[table], dict):
            raise ClusterError(f"{path}: {table} must be a table, got {tables[table]!r}")
        for key in tables[table]:
            if key not in keys:
                raise ClusterError(f"{path}: unknown key {_place(table, key)}; known are {', '.join(keys)}")

    def number(table: str, key: str) -> float:
        value = tables[table].get(key)
        low, high = next((r for end, r in _CLUSTER_RANGES.items() if key.endswith(end)), (1.0, 1e24))
        if type(value) not in (int, float) or not low <= value <= high:
            raise ClusterError(f"{path}: {_place(table, key)} must be a number from {low:g} to {high:g}, got {value!r}")
        return float(value)

    def switch(key: str) -> bool:
        value = tables["between"].get(key, False)
        if not isinstance(value, bool):
            raise ClusterError(f"{path}: {_place('between', key)} must be true or false, got {value!r}")
        return value

    ranks = number("", "ranks_per_node")
    if ranks != int(ranks):
        raise ClusterError(f"{path}: ranks_per_node must be an integer, got {ranks!r}")
    peak = number("device", "peak_flops")
    return Cluster(
        name=path.stem,
        ranks_per_node=int(ranks),
        training_flops=peak * number("device", "training_efficiency"),
        update_flops=peak * number("device", "update_efficiency"),
        memory_rate=number("device", "memory_bytes_per_second") * number("device", "memory_efficiency"),
        memory_bytes=number("device", "memory_bytes"),
        near_rate=number("inside", "bytes_per_second") * number("inside", "efficiency"),
        near_latency=number("inside", "latency_seconds"),
        far_rate=number("between", "bits_per_second") / 8 * number("between", "efficiency"),
        far_latency=number("between", "latency_seconds"),
        far_shared=switch("shared"),
        blocking_all_reduce=switch("blocking_all_reduce"),
        far_burst_bytes=number("between", "burst_bytes") if "burst_bytes" in tables["between"] else 0.0,
    )


def _place(table: str, key: str) -> str:
    return f"[{table}] {key}" if table else key


# ---- from a plan to figures ----


def work_of(planned: Planned) -> Work:
    """FLOPs by group: the model's own count, shared out by elements; the embedding computes nothing."""
    from torchtitan_dmuon.titan.planning import recompute_share

    training = planned.config.training
    tokens = training.local_batch_size * training.seq_len
    computing = [0 if g.name == "tok_embeddings" else g.owned + g.rest for g in planned.groups]
    total = planned.model_flops_per_token * tokens / 3
    forward = [total * n / sum(computing) for n in computing]
    return Work(planned.groups, forward, recompute_share(planned.config), planned.options)


def placed(planned: Planned, name: str) -> Placed:
    """The plan on the topology of one variant of DMuon."""
    sync = planned.config.dmuon.publish == "sync"
    return place(planned.plan, planned.topology, planned.groups, name, planned.options.device_type, sync)


def place(
    plan: OwnershipPlan,
    topology: Topology,
    groups: Sequence[Group],
    name: str,
    device_type: str,
    sync: bool = False,
) -> Placed:
    """``plan`` and ``groups`` on what the variant ``name`` of DMuon makes of ``topology``."""
    changes, options = DMUON[name]
    topology = replace(topology, **changes)  # type: ignore[arg-type]
    made = {"sync": sync, "ring": uses_collectives(topology, device_type), **options}
    return Placed(plan, topology, lay_out(groups, topology, plan), **made)


def simulate(planned: Planned, cluster: Cluster, names: Sequence[str]) -> dict[str, tuple[Simulated, dict[str, Any]]]:
    """Variant -> (its tasks, its figures under the names of DESIGN section 5). Variants that this mesh does not tell
    apart from "dmuon" are left out."""
    work, topology = work_of(planned), planned.topology
    found: dict[str, tuple[Simulated, int, int | None]] = {}
    for name in names:
        if name in DMUON:
            mine = placed(planned, name)
            if name != "dmuon" and mine == placed(planned, "dmuon"):
                continue
            if name == "dmuon_node_holders" and topology.shard_size == topology.ranks_per_node:
                continue
            weighed = footprint(mine.topology, mine.groups, planned.options)
            peak = None if name in ("dmuon_direct", "dmuon_overlap") else int(weighed.peak_W.max())
            far = Footprint.total(weighed.traffic).far
            found[name] = (simulate_dmuon(cluster, work, mine), far, peak)
        elif name == "adamw":
            far = Footprint.total(planned.footprint.adamw_traffic).far
            found[name] = (simulate_adamw(cluster, work, topology), far, planned.footprint.adamw_peak)
        else:
            extra, peak = _sharded_muon(planned.groups, topology, planned.options, name)
            far = Footprint.total(planned.footprint.adamw_traffic).far + extra
            if name == "gather_muon":
                found[name] = (simulate_gather_muon(cluster, work, topology), far, peak)
            else:
                largest = _largest_in_shard_group(planned.plan, planned.options)
                found[name] = (simulate_dist_muon(cluster, work, topology, largest), far, peak)
    tokens = planned.tokens_per_step()
    seconds = {name: run.step_seconds for name, (run, *_) in found.items()}
    figures = {}
    for name, (run, far, peak) in found.items():
        ratio = seconds["adamw"] / seconds[name] if "adamw" in seconds else None
        figures[name] = (
            run,
            {
                "step_seconds": run.step_seconds,
                "step_seconds_min": run.step_seconds,
                "tokens_per_second": tokens / run.step_seconds,
                "ratio_to_adamw": ratio,
                "ratio_low": None,  # a model has no interval
                "ratio_high": None,
                "ratio_to_gather_muon": seconds["gather_muon"] / seconds[name] if "gather_muon" in seconds else None,
                "internode_bytes_per_step": far,
                "peak_bytes_per_rank": peak,
                "fits": None if peak is None else peak <= cluster.memory_bytes,
                "ns_share": 0.0 if name == "adamw" else run.update_seconds / run.step_seconds,
                "exposed_seconds": dict(run.exposed),
                "update_seconds": run.update_seconds,
            },
        )
    return figures


def _largest_in_shard_group(plan: OwnershipPlan, options: Options) -> float:
    """Newton-Schulz FLOPs of the busiest rank where every shard group shares all matrices out among its ranks."""
    shared = assign(
        plan.pieces, plan.mesh, ownership="replica", unit_of=dict(zip((p.key for p in plan.pieces), plan.units))
    )
    each = [0] * shared.n_owners
    for piece, owner in zip(shared.pieces, shared.owners, strict=True):
        each[owner] += sum(flops(m, n, options.settings, options.device_type) for m, n in piece.matrices())
    return max(each)


def _sharded_muon(groups: Sequence[Group], topology: Topology, options: Options, name: str) -> tuple[int, int]:
    """(bytes between nodes beyond FSDP2's, peak bytes per rank) of Muon over FSDP2's shards: AdamW's memory without its
    second moment, and in the step the largest matrix whole, with Newton-Schulz around it."""
    owned = sum(g.owned for g in groups)
    size = 2 if name == "gather_muon" else 2 * MASTER_BYTES  # gathered in bf16, or there and back in fp32
    once = replace(options, micro_batches=1, reshard=False, compute_bytes=size)
    extra = fsdp_traffic(owned, topology, once)["gather"].far
    _, peaks = adamw_memory([g.owned + g.rest for g in groups], topology.shard_size, options)
    shapes = {s for g in groups for p in g.pieces for s in p.matrices()}
    whole = max(
        (2 * MASTER_BYTES * m * n + workspace_bytes(m, n, options.settings, options.device_type) for m, n in shapes),
        default=0,
    )
    saved = MASTER_BYTES * owned // topology.shard_size
    return extra, max(peaks["forward"] - saved, peaks["backward"] - saved, peaks["step"] - saved + whole)


# ---- pictures ----


def print_table(world: int, cluster: Cluster, planned: Planned, figures: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    model, topology = planned.config.model_spec, planned.topology
    title = (
        f"{model.name} {model.flavor} on {world} ranks of {cluster.name}: {topology.replicas} x {topology.shard_size}, "
        f"{planned.tokens_per_step() // world:,} tokens a rank and step"
    )
    table = Table(title=title)
    second, one = in_unit(min(f["step_seconds"] for f in figures.values()), {"us": 1e-6, "ms": 1e-3, "s": 1.0})
    sent, byte = in_unit(max(f["internode_bytes_per_step"] for f in figures.values()), SENT)
    kept, held = in_unit(max(f["peak_bytes_per_rank"] or 0 for f in figures.values()), BYTES)
    headings = (f"step, {second}", "tokens/s", "x AdamW", "x gather_muon", f"update, {second}", "waits: gather")
    table.add_column("variant", no_wrap=True)
    for heading in (*headings, "reduce", "publish", f"{sent} between nodes", f"peak, {kept}"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, f in figures.items():
        exposed = f["exposed_seconds"]
        table.add_row(
            name,
            f"{f['step_seconds'] / one:,.3f}",
            f"{f['tokens_per_second']:,.0f}",
            *("-" if f[k] is None else f"{f[k]:.3f}" for k in ("ratio_to_adamw", "ratio_to_gather_muon")),
            f"{f['update_seconds'] / one:,.3f}",
            *(f"{exposed[k] / one:,.3f}" for k in ("gather", "reduce", "publish")),
            f"{f['internode_bytes_per_step'] / byte:,.1f}",
            "-" if f["peak_bytes_per_rank"] is None else f"{f['peak_bytes_per_rank'] / held:,.1f}",
        )
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(table)
    for name, text in LEGEND.items():
        if name in figures:
            console.print(f"  {name}: {text}", highlight=False, markup=False)
    for line in planned.assumed:
        console.print(f"  assumed: {line}", highlight=False, markup=False)
    if over := [name for name, f in figures.items() if f["fits"] is False]:
        console.print(
            f"warning: {', '.join(over)} {'does' if len(over) == 1 else 'do'} not fit: a rank of {cluster.name} has "
            f"{cluster.memory_bytes / held:,.1f} {kept}, and the peak is without activations. No such step runs",
            style="yellow",
            highlight=False,
            markup=False,
        )


def plot(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Step seconds and the ratio to AdamW over the world, one line per variant."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    worlds = [p["world"] for p in points]
    for axes, figure_of, title, unit in zip(
        figure.subplots(1, 2),
        ("step_seconds", "ratio_to_adamw"),
        ("predicted step", "predicted throughput over AdamW's"),
        ("seconds", ""),
    ):
        curves = {}
        for name in VARIANTS:
            at = [(p["world"], p["variants"][name][figure_of]) for p in points if name in p["variants"]]
            if at and all(value is not None for _, value in at):
                curves[name] = at
        low, high = view({name: [value for _, value in at] for name, at in curves.items()})
        for i, name in enumerate(VARIANTS):
            if name in curves:
                outside = [v for _, v in curves[name] if not low <= v <= high]
                note = f" ({min(outside):.3g} to {max(outside):.3g} not shown)" if outside else ""
                axes.plot(*zip(*curves[name]), marker="o", color=f"C{i}", label=name + note)
        axes.set(title=title, xlabel="ranks", ylabel=unit, xscale="log", ylim=(low / 1.03, high * 1.03))
        axes.set_xticks(worlds, [f"{world:,}" for world in worlds])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    axes.axhline(1, color="gray", linewidth=0.8)
    save_picture(figure, path, dpi=110)


def view(curves: dict[str, list[float]]) -> tuple[float, float]:
    """(low, high) of a picture of these positive curves: all of them, but no more than twice as far out as what is
    compared, so that one slow variant does not squash the others."""
    compared = [value for name in ("adamw", "dmuon") for value in curves.get(name, [])]
    values = [value for curve in curves.values() for value in curve]
    compared = compared or values
    return max(min(values), min(compared) / 2), min(max(values), max(compared) * 2)


# ---- command ----


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Predict the step time of a configuration on a cluster, for every variant. Configuration flags "
        "(--training.seq_len 4096, --dmuon.publish sync) as for training.",
        allow_abbrev=False,
    )
    add_config_arguments(parser)
    parser.add_argument("--world", required=True, metavar="N,...", help="data-parallel ranks, one or several worlds")
    parser.add_argument("--cluster", default="h100", metavar="NAME_OR_FILE", help="default: %(default)s")
    parser.add_argument("--variants", default=",".join(VARIANTS), metavar="NAME,...", help="default: all")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="timeline of the last world, for ui.perfetto.dev")
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "dmuon simulate") -> int:
    """Exit code 0, or 2 with one line on standard error when something cannot be simulated."""
    args, flags = build_parser(prog).parse_known_args(config_first(argv))
    names = args.variants.split(",")
    unknown = [n for n in names if n not in VARIANTS]
    if unknown:
        print(f"{prog}: --variants: unknown {unknown[0]!r}; known are {', '.join(VARIANTS)}", file=sys.stderr)
        return 2

    def body(config: Any, worlds: list[int]) -> None:
        import copy

        from torchtitan_dmuon.titan.config import ConfigError
        from torchtitan_dmuon.titan.planning import make_plan

        cluster = read_cluster(args.cluster)
        points: list[dict[str, Any]] = []
        results: dict[str, tuple[Simulated, dict[str, Any]]] = {}
        for world in worlds:
            planned = make_plan(
                copy.deepcopy(config),
                world,
                args.ranks_per_node,
                flavor=args.flavor,
                pattern=args.pattern,
                otherwise=cluster.ranks_per_node,
            )
            if not planned.options.is_muon:
                raise ConfigError("only DMuon is simulated; choose it as optimizer_name", "optimizer.param_groups")
            results = simulate(planned, cluster, names)
            figures = {name: f for name, (_, f) in results.items()}
            print_table(world, cluster, planned, figures)
            points.append({"world": world, "variants": figures})
        if args.json is not None:
            found = points[0] if len(points) == 1 else {"points": points}
            write_json(args.json, {"cluster": cluster.name, **found})
        if args.plot is not None:
            plot(points, args.plot)
        if args.trace is not None:
            tracks = [trace_events(s.tasks, name, i) for i, (name, (s, _)) in enumerate(results.items())]
            write_json(args.trace, {"traceEvents": [event for track in tracks for event in track]})

    return run_with_config(prog, args, flags, body, args.trace)


if __name__ == "__main__":
    sys.exit(main())
