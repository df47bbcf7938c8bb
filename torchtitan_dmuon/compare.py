"""`dmuon compare`: what the event files of finished runs say, side by side.

Decides: how figures come from a run's scalars (medians over the steps after each start's warm-up, the spread of ratios
step by step, which losses) and when two runs may be compared at all: the same model, sequence length and global batch.
Does not find or read files (`run_files.py`), does not measure and never looks at a process. Keeps: a ratio is printed
only between runs that did the same work, and every figure is one that TorchTitan's or our own metrics wrote.
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
from torchtitan_dmuon.run_files import CompareError, Series, Stretch, differences, read_stretches

# Scalar names of torchtitan 0.3.0 (components/metrics.py); tokens per second are per rank.
LOSS = "loss_metrics/global_avg_loss"
HELD_OUT = "validation_metrics/loss"
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
LOSS_STEPS = 10  # logged steps whose mean loss is shown: one batch's is as easy as its text


@dataclass
class Run:
    """One configuration of a run folder. Seconds, bytes, tokens per second per rank; None where the run did not write
    the figure."""

    name: str
    steps: int
    tokens_per_second: float
    step_seconds: float
    peak_memory_bytes: int | None
    final_loss: float  # of the last logged step's batch
    ratio: float | None = None
    ratio_quartiles: tuple[float, float, float] | None = None  # of the ratios step by step: first, median, third
    ratio_steps: int = 0
    mean_loss: float = math.nan
    mean_loss_steps: int = 0  # the last logged ones
    held_out_loss: float | None = None
    held_out_step: int | None = None
    training_seconds: float = 0.0  # from the first logged step on, without the time between starts
    parts: dict[str, float] = field(default_factory=dict)  # seconds of the median step by where they went
    extra: dict[str, float] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)  # what must be equal for a ratio
    stretch: Stretch = field(default_factory=lambda: Stretch([]), repr=False)
    speeds: dict[int, float] = field(default_factory=dict, repr=False)  # step -> tokens per second, warm-up left out

    @property
    def series(self) -> dict[str, Series]:
        return self.stretch.series

    def as_json(self) -> dict[str, Any]:
        names: tuple[str, ...] = (
            "name",
            "tokens_per_second",
            "step_seconds",
            "peak_memory_bytes",
            "final_loss",
            "ratio",
            "steps",
        )
        names += ("ratio_quartiles", "ratio_steps", "mean_loss", "mean_loss_steps", "held_out_loss", "held_out_step")
        figures = {n: getattr(self, n) for n in (*names, "training_seconds")}
        # JSON knows no NaN: a loss that is none is null.
        finite = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in figures.items()}
        return finite | {"parts": self.parts} | self.extra


def read_series(run_dir: Path) -> dict[str, Series]:
    """All scalars of a run, by tag. Raises CompareError where there is none, or several configurations were run."""
    stretches, _ = read_stretches(run_dir)
    if len(stretches) > 1:
        raise CompareError(f"{run_dir}: was started with {len(stretches)} configurations")
    return stretches[0].series


def workload_of(saved: dict[str, Any] | None, where: str) -> dict[str, Any]:
    """What a step computes, from the tables of a saved `config.toml`.

    Returns {"model", "seq_len", "global_batch", "ranks"}, or nothing when the run saved no configuration. `ranks` are
    the data-parallel ones, None where the file leaves their number to the launcher (a shard degree of -1); the global
    batch, in sequences, is then the text `N per rank` unless it is set.
    """
    if not saved:
        return {}
    job, training, mesh = (saved.get(table, {}) for table in ("job", "training", "parallelism"))
    for table in (job, training, mesh):
        if not isinstance(table, dict):
            raise CompareError(f"{where}: job, training and parallelism must be tables, found {table!r}")

    def integer(table: dict[str, Any], key: str, default: int | None) -> Any:
        value = table.get(key, default)
        if value is not default and type(value) is not int:
            raise CompareError(f"{where}: {key} must be an integer, found {value!r}")
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


def read_runs(run_dir: Path, skip: int, name: str | None = None) -> tuple[list[Run], list[str]]:
    """The run in a folder, one `Run` for each configuration that it was started with, and notes of one line each.

    Figures are of the logged steps after the first ``skip`` of each start. Raises CompareError when none are left.
    """
    stretches, notes = read_stretches(run_dir)
    name = name or run_dir.resolve().name
    missing = [tag for tag in (LOSS, TOKENS_PER_SECOND, STEP_SECONDS) if not any(tag in s.series for s in stretches)]
    if missing:
        raise CompareError(f"{run_dir}: its event files have no scalar {missing[0]!r}: is this a TorchTitan run?")
    runs = []
    for stretch in stretches:
        row = name if len(stretches) == 1 else f"{name} ({_label(stretch)})"
        if not stretch.series.get(LOSS) or not any(stretch.warm(s, skip) for s in stretch.series.get(STEP_SECONDS, ())):
            last = max(stretch.series.get(LOSS, ()), default=0)
            problem = f"its last logged step is {last}, but the first {skip} of each start are skipped (--skip N)"
            if len(stretches) == 1:
                raise CompareError(f"{run_dir}: {problem}")
            notes.append(f"{row} is left out: {problem}")
            continue
        runs.append(_figures(stretch, skip, row, str(run_dir / "config.toml")))
        if (starts := len(stretch.starts)) > 1:
            notes.append(
                f"{row} was started {starts} times: {runs[-1].training_seconds:,.0f} s of training from its first "
                "logged step on, without the time in between"
            )
    if not runs:
        raise CompareError(f"{run_dir}: no start has more than the {skip} steps that are skipped (--skip N)")
    for before, after in zip(stretches, stretches[1:]):
        if changed := differences(after.starts[0].identity(), before.starts[0].identity()):
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            notes.append(
                f"{name} was started with another configuration: {_label(after)} has {', '.join(changed[:3])}{more}"
            )
    return runs, notes


def _label(stretch: Stretch) -> str:
    """What tells a configuration of a run apart, for people: its optimizers and its steps."""
    steps = list(stretch.series.get(LOSS, ())) or [stretch.starts[0].first]
    return f"{'+'.join(stretch.starts[0].optimizers) or 'start'}, steps {min(steps)} to {max(steps)}"


def _figures(stretch: Stretch, skip: int, name: str, where: str) -> Run:
    series = stretch.series

    def warm(tag: str) -> dict[int, float]:
        return {step: v for step, (_, v) in series.get(tag, {}).items() if stretch.warm(step, skip)}

    def median(tag: str) -> float | None:
        values = list(warm(tag).values())
        return statistics.median(values) if values else None

    step_seconds, tokens = median(STEP_SECONDS), median(TOKENS_PER_SECOND)
    if step_seconds is None or tokens is None:
        raise CompareError(f"{name}: no step after the first {skip} of a start has its seconds and tokens (--skip N)")
    peaks = [value for _, value in series.get(PEAK_GIB, {}).values() if value >= 0]  # -1: the device does not tell
    named = {"update": UPDATE_SECONDS} | {f"wait: {p}": t for p, t in EXPOSED.items()}
    parts = {"data loading": step_seconds * (median(DATA_PERCENT) or 0.0) / 100}
    parts |= {part: value for part, tag in named.items() if (value := median(tag)) is not None}
    parts = {"forward and backward": max(0.0, step_seconds - sum(parts.values()))} | parts
    if UPDATE_SECONDS not in series:  # nothing told the update apart
        parts["forward, backward and update"] = parts.pop("forward and backward")
    losses = [value for _, value in series[LOSS].values()]
    held_out = series.get(HELD_OUT, {})
    return Run(
        name=name,
        steps=max(series[LOSS]),
        tokens_per_second=tokens,
        step_seconds=step_seconds,
        peak_memory_bytes=round(max(peaks) * 2**30) if peaks else None,
        final_loss=losses[-1],
        mean_loss=statistics.fmean(losses[-LOSS_STEPS:]),
        mean_loss_steps=len(losses[-LOSS_STEPS:]),
        held_out_loss=held_out[max(held_out)][1] if held_out else None,
        held_out_step=max(held_out, default=None),
        training_seconds=max(stretch.training_seconds(LOSS).values()),
        parts=parts,
        extra={key: value for key, tag in EXTRA.items() if (value := median(tag)) is not None},
        workload=workload_of(stretch.starts[-1].config, where),
        stretch=stretch,
        speeds=warm(TOKENS_PER_SECOND),
    )


def compare(run_dirs: Sequence[Path], skip: int) -> tuple[list[Run], list[str]]:
    """The runs in the order given, and notes of one line each: what could not be read, why some have no ratio to the
    first one, whose ratio does not tell, and which ran another number of steps."""
    runs, notes = [], []
    for folder, name in zip(run_dirs, _names(run_dirs), strict=True):
        more, said = read_runs(folder, skip, name)
        runs += more
        notes += said
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
            notes += _set_ratio(run, first)
    return runs, notes


def _set_ratio(run: Run, first: Run) -> list[str]:
    """The ratio of the medians, and the quartiles of the ratios step by step (of steps that only one has: in order)."""
    run.ratio = run.tokens_per_second / first.tokens_per_second
    common = [(run.speeds[step], first.speeds[step]) for step in run.speeds if step in first.speeds]
    pairs = common or list(zip(run.speeds.values(), first.speeds.values()))
    ratios = [mine / theirs for mine, theirs in pairs if theirs > 0]
    if run is first or len(ratios) < 2:
        return []
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    run.ratio_quartiles, run.ratio_steps = (low, middle, high), len(ratios)
    notes = []
    if low <= 1 <= high:
        notes.append(
            f"{run.name}: the quartiles of its ratio over {len(ratios)} steps, {low:.3f} to {high:.3f}, include 1: "
            f"these runs do not tell which is faster, it or {first.name}"
        )
    if run.steps != first.steps:
        notes.append(f"{run.name} ran {run.steps} steps, {first.name} {first.steps}: their losses are of those")
    return notes


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """Each folder's last name, or as many trailing names as tell the folders apart."""
    parts = [d.resolve().parts for d in run_dirs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [str(d) for d in run_dirs]  # the same folder given twice


def print_table(runs: Sequence[Run], notes: Sequence[str], skip: int) -> None:
    """Two tables, so that neither is wider than a terminal: how fast and why, then bytes, memory and losses."""
    from rich.console import Console
    from rich.table import Table

    def known(run: Run, key: str, scale: float, form: str) -> str:
        return format(run.extra[key] * scale, form) if key in run.extra else "-"

    speed: list[tuple[str, list[str]]] = [
        ("tokens/s\nper rank", [f"{r.tokens_per_second:,.0f}" for r in runs]),
        ("ratio", ["-" if r.ratio is None else f"{r.ratio:.3f}" for r in runs]),
        ("its\nquartiles", [f"{q[0]:.2f}-{q[2]:.2f}" if (q := r.ratio_quartiles) else "-" for r in runs]),
        ("step\ns", [f"{r.step_seconds:.3f}" for r in runs]),
    ]
    for part, heading in (("update", "update\ns"), *((f"wait: {p}", f"{p}\nwait s") for p in EXPOSED)):
        if any(part in r.parts for r in runs):
            speed.append((heading, [f"{r.parts[part]:.3f}" if part in r.parts else "-" for r in runs]))
    rest: list[tuple[str, list[str]]] = []
    for columns, key, heading, scale, form in (
        (speed, "ns_share", "NS\nshare", 1.0, ".1%"),
        (speed, "owner_imbalance", "owner\nimbal.", 1.0, ".2f"),
        (rest, "intra_node_bytes_per_step", "intra\nMB/step", 1e-6, ",.1f"),
        (rest, "internode_bytes_per_step", "inter\nMB/step", 1e-6, ",.1f"),
    ):
        if any(key in r.extra for r in runs):
            columns.append((heading, [known(r, key, scale, form) for r in runs]))
    peaks = ["-" if r.peak_memory_bytes is None else f"{r.peak_memory_bytes / 2**30:.2f}" for r in runs]
    rest += [("peak\nGiB", peaks), ("loss of last\nbatch", [f"{r.final_loss:.4f}" for r in runs])]
    counts = {r.mean_loss_steps for r in runs}
    told = f"mean of\nlast {max(counts)}" if len(counts) == 1 else "mean of\nlast (N)"
    of = [f" ({r.mean_loss_steps})" if len(counts) > 1 else "" for r in runs]
    rest.append((told, [f"{r.mean_loss:.4f}{n}" for r, n in zip(runs, of, strict=True)]))
    if any(r.held_out_loss is not None for r in runs):
        rest.append(("held-out\nloss", ["-" if r.held_out_loss is None else _held_out(r) for r in runs]))
    # A table that goes to a file or a pipe keeps every column; a terminal's own width is left alone.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for title, columns in ((f"medians of the steps after the first {skip} of each start", speed), (None, rest)):
        table = Table(title=title)
        table.add_column("run", no_wrap=True)
        for heading, _ in columns:
            table.add_column(heading, justify="right", no_wrap=True)
        for i, run in enumerate(runs):
            table.add_row(run.name, *(cells[i] for _, cells in columns))
        console.print(table)
    for note in notes:
        print(note)


def _held_out(run: Run) -> str:
    """The loss, and its step where that is not the last."""
    at = "" if run.held_out_step == run.steps else f" @{run.held_out_step}"
    return f"{run.held_out_loss:.4f}{at}"


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
        since = run.stretch.training_seconds(LOSS)
        by_step.plot(list(loss), [v for _, v in loss.values()], color=color, linestyle=line, label=run.name)
        by_time.plot(list(since.values()), [v for _, v in loss.values()], color=color, linestyle=line, label=run.name)
        held_out = {step: v for step, (_, v) in run.series.get(HELD_OUT, {}).items()}
        if held_out:
            by_step.plot(list(held_out), list(held_out.values()), color=color, marker="o", linestyle="", alpha=0.6)
            at = {step: since[step] for step in held_out if step in since}
            by_time.plot(list(at.values()), [held_out[s] for s in at], color=color, marker="o", linestyle="", alpha=0.6)
        after = {step: v for step, (_, v) in seconds.items() if run.stretch.warm(step, skip)}
        step_time.plot(list(after), list(after.values()), color=color, label=run.name, marker=".", linewidth=0.8)
        step_time.axhline(run.step_seconds, color=color, linestyle="--", linewidth=0.8)
    dots = " (dots: held-out text)" if any(HELD_OUT in run.series for run in runs) else ""
    by_step.set(title=f"loss over steps{dots}", xlabel="step", ylabel="loss")
    by_time.set(title="loss over training time", xlabel="seconds since the first logged step", ylabel="loss")
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
