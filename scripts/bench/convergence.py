"""Loss against steps and time: AdamW, Muon on one process, and DMuon, at tuned rates for both, over several seeds.

Decides what is trained: the quickstart's model and text in float32 on the CPU. Rates are tuned with the first seed:
AdamW's over a grid, then the matrices' over a grid with the rest at AdamW's best rate. Every method then runs every
seed. A loss is the mean of the last three steps' training losses, on the same batches for every method. Finished runs
are kept in the output folder, so that a call that was cut short (`--seconds`) is continued by the next.

    python scripts/bench/convergence.py [--out DIR --steps 30 --seeds 3 --seconds 200] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

# One process is enough for what is asked here, and gives every method the same batches.
FILES = {"adamw": "debug_adamw", "muon": "debug_gather_muon", "dmuon": "debug_dmuon"}
SEQUENCES = 4  # of a step
SMOOTH = 3


class Cut(Exception):
    """The time of this call is used up."""


class Runs:
    """Trainings by (method, rates, seed), each in a folder of its own, forked from one import."""

    def __init__(self, out: Path, steps: int, seconds: float) -> None:
        self.out, self.steps, self.end = out, steps, time.monotonic() + seconds

    def curve(self, method: str, adamw_lr: float, matrix_lr: float | None, seed: int) -> dict[str, list[float]]:
        """{"loss", "seconds"} by step; seconds since the run's first step began."""
        rates = f"{adamw_lr:g}" + ("" if matrix_lr is None else f"-{matrix_lr:g}")
        folder = self.out / f"{method.replace(' ', '-')}-{rates}-seed{seed}-steps{self.steps}"
        result = folder / "curve.json"
        if not result.exists():
            self._train(folder, method, adamw_lr, matrix_lr, seed)
            result.write_text(json.dumps(self._read(folder)))
        return json.loads(result.read_text())

    def _train(self, folder: Path, method: str, adamw_lr: float, matrix_lr: float | None, seed: int) -> None:
        if time.monotonic() > self.end:
            raise Cut
        import torch

        from torchtitan_dmuon import local

        flags = {
            "config": ROOT / "train_configs" / f"{FILES[method]}.toml",
            "dump_folder": folder,
            "training.steps": self.steps,
            "training.local_batch_size": SEQUENCES,
            "training.mixed_precision_param": "float32",
            "parallelism.data_parallel_replicate_degree": 1,
            "parallelism.data_parallel_shard_degree": 1,
            "debug.seed": seed,
            f"optimizer.param_groups.{0 if matrix_lr is None else 1}.optimizer_kwargs.lr": adamw_lr,
        }
        if matrix_lr is not None:
            flags["optimizer.param_groups.0.optimizer_kwargs.lr"] = matrix_lr
        argv = [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
        print(f"{folder.name} ...", flush=True)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        folder.mkdir(parents=True, exist_ok=True)
        log, kept = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT), (os.dup(1), os.dup(2))
        for stream in (1, 2):
            os.dup2(log, stream)
        try:
            code = local.main(["1", *argv])
        finally:
            sys.stdout.flush()
            for stream, own in zip((1, 2), kept):
                os.dup2(own, stream)
        if code:
            raise RuntimeError(f"a run ended with code {code}: python -m torchtitan_dmuon.local 1 {' '.join(argv)}")

    @staticmethod
    def _read(folder: Path) -> dict[str, list[float]]:
        from torchtitan_dmuon.compare import LOSS, STEP_SECONDS, read_series

        series = read_series(folder)
        seconds, passed = [], 0.0
        for _, value in series[STEP_SECONDS].values():
            passed += value
            seconds.append(passed)
        return {"loss": [value for _, value in series[LOSS].values()], "seconds": seconds}


def smoothed(losses: Sequence[float]) -> list[float]:
    """Mean of each step's loss and the two before it."""
    return [statistics.mean(losses[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(losses))]


def below_from(losses: Sequence[float], others: Sequence[float]) -> int | None:
    """The first step from which the smoothed loss stays below the other's on the same batches; None if it ends above.

    A loss of an earlier step is no goal: the text is read in order, and its batches differ more than the methods do.
    """
    above = [mine >= other for mine, other in zip(smoothed(losses), smoothed(others))]
    return None if above[-1] else max((i + 2 for i, is_above in enumerate(above) if is_above), default=1)


def measure(runs: Runs, adamw_grid: Sequence[float], matrix_grid: Sequence[float], seeds: int) -> dict:
    final = lambda curve: smoothed(curve["loss"])[-1]  # noqa: E731
    grid: dict[str, dict[str, float]] = {"adamw": {}, "dmuon": {}}
    for lr in adamw_grid:
        grid["adamw"][f"{lr:g}"] = final(runs.curve("adamw", lr, None, 0))
    adamw_lr = float(min(grid["adamw"], key=grid["adamw"].__getitem__))
    for lr in matrix_grid:
        grid["dmuon"][f"{lr:g}"] = final(runs.curve("dmuon", adamw_lr, lr, 0))
    matrix_lr = float(min(grid["dmuon"], key=grid["dmuon"].__getitem__))

    curves: dict[str, list[dict]] = {}
    for method in FILES:
        curves[method] = [
            runs.curve(method, adamw_lr, None if method == "adamw" else matrix_lr, seed) for seed in range(seeds)
        ]
    methods = {}
    for method, each in curves.items():
        needed = [below_from(curve["loss"], other["loss"]) for curve, other in zip(each, curves["adamw"])]
        ends = [final(curve) for curve in each]
        methods[method] = {
            "final_loss": statistics.mean(ends),
            "final_loss_by_seed": ends,
            "below_adamw_from_step": None if None in needed else statistics.mean(n for n in needed if n is not None),
            "below_adamw_from_step_by_seed": needed,
            "step_seconds": statistics.median(
                b - a for curve in each for a, b in zip(curve["seconds"], curve["seconds"][1:])
            ),
            "curves": each,
        }
    return {"steps": runs.steps, "adamw_lr": adamw_lr, "matrix_lr": matrix_lr, "grid": grid, "methods": methods}


def print_tables(figures: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110)
    for name, losses in figures["grid"].items():
        console.print(f"{name}, loss by rate: " + ", ".join(f"{lr}: {loss:.3f}" for lr, loss in losses.items()))
    table = Table(
        "method", f"loss at step {figures['steps']}", "by seed", "below AdamW from step", "by seed", "s / step"
    )
    for name, each in figures["methods"].items():
        needed = each["below_adamw_from_step"]
        table.add_row(
            name,
            f"{each['final_loss']:.3f}",
            " ".join(f"{x:.3f}" for x in each["final_loss_by_seed"]),
            "-" if needed is None else f"{needed:.1f}",
            " ".join("-" if x is None else str(x) for x in each["below_adamw_from_step_by_seed"]),
            f"{each['step_seconds']:.2f}",
        )
    console.print(table)


def plot(figures: dict, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    styles = {"adamw": ("C0", "-"), "muon": ("C1", "-"), "dmuon": ("C2", "--")}
    for name, each in figures["methods"].items():
        color, line = styles[name]
        for number, curve in enumerate(each["curves"]):
            losses = smoothed(curve["loss"])
            label = None if number else name
            by_step.plot(range(1, len(losses) + 1), losses, line, color=color, label=label, linewidth=1)
            by_time.plot([each["step_seconds"] * i for i in range(1, len(losses) + 1)], losses, line, color=color)
    by_step.axhline(figures["methods"]["adamw"]["final_loss"], color="gray", linewidth=0.6)
    by_step.set(xlabel="step", ylabel="training loss, mean of three steps")
    by_time.set(xlabel="seconds, one process, at the median step")
    by_step.legend()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [float(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "convergence")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--adamw-rates", type=numbers, default=[8e-4, 1.6e-3, 3.2e-3])
    parser.add_argument("--matrix-rates", type=numbers, default=[1e-2, 2e-2, 4e-2, 8e-2])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this long")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)

    os.chdir(ROOT)  # the configurations name the data relative to it
    try:
        figures = measure(
            Runs(args.out.resolve(), args.steps, args.seconds), args.adamw_rates, args.matrix_rates, args.seeds
        )
    except Cut:
        print("time is up: call again with the same arguments to go on")
        return 3
    print_tables(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    if args.plot:
        plot(figures, args.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
