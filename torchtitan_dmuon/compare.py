"""`dmuon compare`: what the event files of finished runs say, side by side.

Decides how a run's figures are read from its TensorBoard event files (medians over the steps after a warm-up, the last
loss, the highest memory peak) and when two runs may be compared at all: the same model, sequence length and global
batch. Does not measure anything and never looks at a process. Keeps: a ratio is printed only between runs that did the
same work, and every figure is one that TorchTitan's or our own metrics wrote.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_dmuon.outputs import add_output_arguments, prepare_outputs, save_picture, write_json

# Scalar names of torchtitan 0.3.0 (components/metrics.py); tokens per second are per rank.
LOSS = "loss_metrics/global_avg_loss"
TOKENS_PER_SECOND = "throughput(tps)"
STEP_SECONDS = "time_metrics/end_to_end(s)"
DATA_PERCENT = "time_metrics/data_loading(%)"  # of all micro-batches; the scalar in seconds is of one
PEAK_GIB = "memory/max_active(GiB)"

# Our own scalars that are shown where a run has them: name in the JSON and in the table -> scalar.
UPDATE_SECONDS = "dmuon/update_seconds"
EXPOSED = {part: f"dmuon/exposed/{part}_seconds" for part in ("gather", "reduce", "publish")}
EXTRA = {
    "ns_share": "dmuon/ns_share",
    "owner_imbalance": "dmuon/owner_imbalance",
    "intra_node_bytes_per_step": "dmuon/bytes/intra_node",
    "internode_bytes_per_step": "dmuon/bytes/inter_node",
}


class CompareError(ValueError):
    """A run cannot be read; the message is one line that names the folder and what to do."""


Series = dict[int, tuple[float, float]]  # step -> (wall time in seconds, value)


@dataclass
class Run:
    """One run folder. Seconds, bytes, tokens per second per rank; None where the run did not write the figure."""

    name: str
    steps: int
    tokens_per_second: float
    step_seconds: float
    peak_memory_bytes: int | None
    final_loss: float
    ratio: float | None = None
    parts: dict[str, float] = field(default_factory=dict)  # seconds of the median step by where they went
    extra: dict[str, float] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)  # what must be equal for a ratio
    series: dict[str, Series] = field(default_factory=dict, repr=False)

    def as_json(self) -> dict[str, Any]:
        names = ("name", "tokens_per_second", "step_seconds", "peak_memory_bytes", "final_loss", "ratio", "steps")
        return {n: getattr(self, n) for n in names} | {"parts": self.parts} | self.extra


def read_series(run_dir: Path) -> dict[str, Series]:
    """All scalars below `run_dir`, by tag.

    A run that was resumed has several files: the later one replaces what the earlier one had from its first step on, as
    TensorBoard shows it. Raises CompareError when there is nothing to read.
    """
    if not run_dir.is_dir():
        raise CompareError(f"{run_dir}: no such run folder")
    files = sorted(run_dir.rglob("events.out.tfevents.*"))
    if not files:
        raise CompareError(
            f"{run_dir}: no TensorBoard event files below it (train with --metrics.enable_tensorboard, and name the "
            "run's dump folder)"
        )
    runs_below = sorted({c.parent for c in run_dir.glob("*/config.toml")})
    if len(runs_below) > 1 and not (run_dir / "config.toml").exists():
        raise CompareError(f"{run_dir}: holds several runs; name them one by one, e.g. {runs_below[0]} {runs_below[1]}")
    ranks = {p for f in files for p in f.parts[len(run_dir.parts) :] if p.startswith("rank_")}
    if ranks:  # metrics.save_for_all_ranks: one rank's view is the run's
        lowest = min(ranks, key=lambda r: (len(r), r))
        files = [f for f in files if lowest in f.parts]

    per_file = [read for f in files if (read := _read_file(f))]
    per_file.sort(key=lambda tags: min(t for series in tags.values() for t, _ in series.values()))
    merged: dict[str, Series] = {}
    for tags in per_file:
        first = min(step for series in tags.values() for step in series)
        for series in merged.values():
            for step in [s for s in series if s >= first]:
                del series[step]
        for tag, series in tags.items():
            merged.setdefault(tag, {}).update(series)
    return {tag: dict(sorted(series.items())) for tag, series in merged.items() if series}


def _read_file(path: Path) -> dict[str, Series]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0})  # 0: keep every point
    events.Reload()
    return {tag: {e.step: (e.wall_time, e.value) for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def read_workload(run_dir: Path) -> dict[str, Any]:
    """What a step computes, from the `config.toml` saved in the dump folder.

    Returns {"model", "seq_len", "global_batch", "ranks"}, or nothing when the run saved no configuration. `ranks` are
    the data-parallel ones, None where the file leaves their number to the launcher (a shard degree of -1); the global
    batch, in sequences, is then the text `N per rank` unless it is set.
    """
    path = run_dir / "config.toml"
    if not path.exists():
        return {}
    import tomli

    try:
        saved = tomli.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # no TOML, or no text
        raise CompareError(f"{path}: {error}") from None
    job, training, mesh = (saved.get(table, {}) for table in ("job", "training", "parallelism"))
    for table in (job, training, mesh):
        if not isinstance(table, dict):
            raise CompareError(f"{path}: job, training and parallelism must be tables, found {table!r}")

    def integer(table: dict[str, Any], key: str, default: int | None) -> Any:
        value = table.get(key, default)
        if value is not default and type(value) is not int:
            raise CompareError(f"{path}: {key} must be an integer, found {value!r}")
        return value

    defaults = {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1, "context_parallel_degree": 1}
    degrees = [integer(mesh, key, default) for key, default in defaults.items()]
    ranks = math.prod(degrees) if min(degrees) > 0 else None
    batch, local = integer(training, "global_batch_size", -1), integer(training, "local_batch_size", None)
    if batch <= 0:
        loaders = None if ranks is None else ranks // degrees[2]  # ranks of one context-parallel group share a batch
        batch = f"{local} per rank" if loaders is None or local is None else local * loaders
    model = "/".join(str(job[key]) for key in ("module", "config") if key in job)
    return {"model": model, "seq_len": training.get("seq_len"), "global_batch": batch, "ranks": ranks}


def read_run(run_dir: Path, skip: int, name: str | None = None) -> Run:
    """Figures of one run over its logged steps after step `skip`. Raises CompareError when none are left."""
    series = read_series(run_dir)
    missing = [tag for tag in (LOSS, TOKENS_PER_SECOND, STEP_SECONDS) if tag not in series]
    if missing:
        raise CompareError(f"{run_dir}: its event files have no scalar {missing[0]!r}: is this a TorchTitan run?")
    last = max(series[LOSS])
    if not any(step > skip for step in series[STEP_SECONDS]):
        raise CompareError(f"{run_dir}: its last logged step is {last}, but the first {skip} are skipped (--skip N)")

    def median(tag: str) -> float | None:
        values = [value for step, (_, value) in series.get(tag, {}).items() if step > skip]
        return statistics.median(values) if values else None

    step_seconds, tokens = median(STEP_SECONDS), median(TOKENS_PER_SECOND)
    assert step_seconds is not None and tokens is not None  # both tags have a step after `skip`, checked above
    peaks = [value for _, value in series.get(PEAK_GIB, {}).values() if value >= 0]  # -1: the device does not tell
    named = {"update": UPDATE_SECONDS} | {f"wait: {p}": t for p, t in EXPOSED.items()}
    parts = {"data loading": step_seconds * (median(DATA_PERCENT) or 0.0) / 100}
    parts |= {part: value for part, tag in named.items() if (value := median(tag)) is not None}
    parts = {"forward and backward": max(0.0, step_seconds - sum(parts.values()))} | parts
    if UPDATE_SECONDS not in series:  # nothing told the update apart
        parts["forward, backward and update"] = parts.pop("forward and backward")
    return Run(
        name=name or run_dir.resolve().name,
        steps=last,
        tokens_per_second=tokens,
        step_seconds=step_seconds,
        peak_memory_bytes=round(max(peaks) * 2**30) if peaks else None,
        final_loss=series[LOSS][last][1],
        parts=parts,
        extra={key: value for key, tag in EXTRA.items() if (value := median(tag)) is not None},
        workload=read_workload(run_dir),
        series=series,
    )


def compare(run_dirs: Sequence[Path], skip: int) -> tuple[list[Run], list[str]]:
    """The runs in the order given, and notes of one line each: why some have no ratio to the first one, and which ran
    another number of steps."""
    runs = [read_run(d, skip, name) for d, name in zip(run_dirs, _names(run_dirs), strict=True)]
    notes = []
    first = runs[0]
    for run in runs:
        unlike = [
            f"{what.replace('_', ' ')} {run.workload.get(what)} instead of {first.workload.get(what)}"
            for what in ("model", "seq_len", "global_batch", "ranks")
            if run.workload.get(what) != first.workload.get(what)
        ]
        if not first.workload or not run.workload:
            bare = first if not first.workload else run
            notes.append(f"no ratio for {run.name}: {bare.name} has no config.toml that says what it computed")
        elif unlike:
            notes.append(f"no ratio for {run.name}: {', '.join(unlike)} (as in {first.name})")
        else:
            run.ratio = run.tokens_per_second / first.tokens_per_second
            if run.steps != first.steps:
                notes.append(f"{run.name} ran {run.steps} steps, {first.name} {first.steps}: their losses are of those")
    return runs, notes


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """Each folder's last name, or as many trailing names as tell the folders apart."""
    parts = [d.resolve().parts for d in run_dirs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [str(d) for d in run_dirs]  # the same folder given twice


def print_table(runs: Sequence[Run], notes: Sequence[str], skip: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"medians of the steps after step {skip}")
    table.add_column("run", no_wrap=True)
    columns: list[tuple[str, list[str]]] = [
        ("tokens/s\nper rank", [f"{r.tokens_per_second:,.0f}" for r in runs]),
        ("ratio", ["-" if r.ratio is None else f"{r.ratio:.3f}" for r in runs]),
        ("step\ns", [f"{r.step_seconds:.3f}" for r in runs]),
    ]
    for part, heading in (("update", "update\ns"), *((f"wait: {p}", f"{p}\nwait s") for p in EXPOSED)):
        if any(part in r.parts for r in runs):
            columns.append((heading, [f"{r.parts[part]:.3f}" if part in r.parts else "-" for r in runs]))
    shown = [("ns_share", "NS\nshare", 1.0, ".1%"), ("owner_imbalance", "owner\nimbal.", 1.0, ".2f")]
    shown += [
        (f"{k}_bytes_per_step", f"{h}\nMB/step", 1e-6, ",.1f")
        for k, h in (("intra_node", "intra"), ("internode", "inter"))
    ]
    for key, heading, scale, form in shown:
        if any(key in r.extra for r in runs):
            columns.append((heading, [format(r.extra[key] * scale, form) if key in r.extra else "-" for r in runs]))
    peaks = ["-" if r.peak_memory_bytes is None else f"{r.peak_memory_bytes / 2**30:.2f}" for r in runs]
    columns += [("peak\nGiB", peaks), ("final\nloss", [f"{r.final_loss:.4f}" for r in runs])]
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for i, run in enumerate(runs):
        table.add_row(run.name, *(cells[i] for _, cells in columns))
    # A table that goes to a file or a pipe keeps every column; a terminal's own width is left alone.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(table)
    for note in notes:
        print(note)


def plot(runs: Sequence[Run], skip: int, path: Path) -> None:
    """Four pictures in one PNG: loss over steps and over time, step time, and where the time of a step went."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)  # no global state and no display
    (by_step, by_time), (step_time, where) = figure.subplots(2, 2)
    for i, run in enumerate(runs):
        color, line = f"C{i}", ("-", "--", ":", "-.")[i % 4]  # runs of the same mathematics lie on top of each other
        loss, seconds = run.series[LOSS], run.series[STEP_SECONDS]
        begin = min(t for t, _ in loss.values())
        by_step.plot(list(loss), [v for _, v in loss.values()], color=color, linestyle=line, label=run.name)
        since = [t - begin for t, _ in loss.values()]
        by_time.plot(since, [v for _, v in loss.values()], color=color, linestyle=line, label=run.name)
        after = {step: v for step, (_, v) in seconds.items() if step > skip}
        step_time.plot(list(after), list(after.values()), color=color, label=run.name, marker=".", linewidth=0.8)
        step_time.axhline(run.step_seconds, color=color, linestyle="--", linewidth=0.8)
    by_step.set(title="loss over steps", xlabel="step", ylabel="loss")
    by_time.set(title="loss over time", xlabel="seconds since the first logged step", ylabel="loss")
    step_time.set(title="time of a step (dashed: median)", xlabel="step", ylabel="seconds")
    step_time.set_ylim(0, 3 * max(run.step_seconds for run in runs))  # a saved checkpoint is off the scale
    for axes in (by_step, by_time, step_time):
        axes.legend()
        axes.grid(alpha=0.3)

    order = ["forward and backward", "forward, backward and update", "data loading", "update"]
    order += [f"wait: {part}" for part in EXPOSED]
    left = [0.0] * len(runs)
    rows = range(len(runs))
    for i, part in enumerate(p for p in order if any(p in r.parts for r in runs)):
        widths = [run.parts.get(part, 0.0) for run in runs]
        where.barh(rows, widths, left=left, label=part, color=f"C{(i + 3) % 10}", height=0.55)
        left = [a + b for a, b in zip(left, widths)]
    for row, end, run in zip(rows, left, runs):
        ratio = "" if run.ratio is None else f"  {run.ratio:.2f}x"
        where.annotate(f" {run.step_seconds:.3f} s{ratio}", (end, row), va="center")
    where.set_yticks(rows, [run.name for run in runs])
    where.invert_yaxis()
    where.set(title="where the time of a step went (x: tokens/s to the first)", xlabel="seconds")
    where.set_xlim(0, 1.35 * max(left))
    where.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False)
    save_picture(figure, path, dpi=110)


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Compare finished runs: throughput, step time, memory, loss, and ratios to the first run.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", type=Path, help="dump folder of a run")
    parser.add_argument("--skip", type=int, default=5, metavar="N", help="leave out the first N steps (default: 5)")
    add_output_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "dmuon compare") -> int:
    """Exit code 0, or 2 with one line on standard error when a run cannot be read or the arguments are wrong."""
    args = build_parser(prog).parse_args(argv)
    try:
        if args.skip < 0:
            raise CompareError(f"--skip {args.skip}: expected 0 or more steps")
        prepare_outputs(args.plot, args.json, overwrite=args.overwrite)
        runs, notes = compare(args.runs, args.skip)
        print_table(runs, notes, args.skip)
        if args.json is not None:
            write_json(args.json, {"runs": [run.as_json() for run in runs]})
        if args.plot is not None:
            plot(runs, args.skip, args.plot)
            print(f"picture: {args.plot}")
    except (ValueError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
