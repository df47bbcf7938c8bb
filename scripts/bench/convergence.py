"""Held-out loss against steps and time: AdamW, Muon on one process, and DMuon, at tuned rates for both, over seeds.

Decides what is trained: the quickstart's model and text in float32 on the CPU. Rates are tuned with the first seed:
AdamW's over a grid, then the matrices' over a grid with the rest at AdamW's best rate. Every method then runs every
seed, which draws the initial weights; batches are the same in all runs. A loss is that of TorchTitan's validation, on
the same held-out documents each time. Finished runs are kept in the output folder, so that a call that was cut short
(`--seconds`) is continued by the next. Runs go seed by seed, and seconds a step are those of the last seed's runs, so
that these can be made alone on a quiet machine: first with one seed less, then with all.

    python scripts/bench/convergence.py [--out DIR --steps 30 --seeds 3 --seconds 200] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from torchtitan_dmuon.outputs import add_output_arguments, claim, parse_args, save_picture, write_json  # noqa: E402

# One process is enough for what is asked here, and gives every method the same batches.
FILES = {"adamw": "debug_adamw", "muon": "debug_gather_muon", "dmuon": "debug_dmuon"}
SEQUENCES = 4  # of a step
HELD_OUT_BATCHES = 4  # of as many sequences, in each validation


class Cut(Exception):
    """The time of this call is used up."""


class Runs:
    """Trainings by (method, rates, seed), each in a folder of its own, forked from one import."""

    def __init__(self, out: Path, steps: int, every: int, seconds: float) -> None:
        self.out, self.steps, self.every, self.end = out, steps, every, time.monotonic() + seconds

    def curve(self, method: str, adamw_lr: float, matrix_lr: float | None, seed: int) -> dict[str, list[float]]:
        """{"step", "held_out_loss"} of each validation, {"loss", "step_seconds"} of each step."""
        rates = f"{adamw_lr:g}" + ("" if matrix_lr is None else f"-{matrix_lr:g}")
        folder = self.out / f"{method}-{rates}-seed{seed}-steps{self.steps}-every{self.every}"
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
            "validator.freq": self.every,
            "validator.steps": HELD_OUT_BATCHES,
            f"optimizer.param_groups.{0 if matrix_lr is None else 1}.optimizer_kwargs.lr": adamw_lr,
        }
        if matrix_lr is not None:
            flags["optimizer.param_groups.0.optimizer_kwargs.lr"] = matrix_lr
        argv = [str(word) for key, value in flags.items() for word in (f"--{key}", value)] + ["--validator.enable"]
        print(f"{folder.name} ...", flush=True)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        claim(folder, "this bench")
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

        values = lambda tag: [value for _, value in series[tag].values()]  # noqa: E731
        series = read_series(folder)
        held_out = series["validation_metrics/loss"]
        return {
            "step": list(held_out),
            "held_out_loss": values("validation_metrics/loss"),
            "loss": values(LOSS),
            "step_seconds": values(STEP_SECONDS),  # without validations, where every step is logged
        }


def outcome(steps: Sequence[int], losses: Sequence[float], goal: float) -> int | str:
    """The first validated step from which the held-out loss stays at or below ``goal``; else "never", or "diverged"
    for a run that ends without a number or above where it began."""
    if not math.isfinite(losses[-1]) or losses[-1] > losses[0]:
        return "diverged"
    if not losses[-1] <= goal:
        return "never"
    above = [step for step, loss in zip(steps, losses) if not loss <= goal]
    return next(step for step in steps if not above or step > above[-1])


def measure(runs: Runs, adamw_grid: Sequence[float], matrix_grid: Sequence[float], seeds: int) -> dict:
    def final(curve: dict[str, list[float]]) -> float:
        return curve["held_out_loss"][-1]

    def best(losses: dict[str, float]) -> float:
        return float(min(losses, key=lambda lr: losses[lr] if math.isfinite(losses[lr]) else math.inf))

    grid: dict[str, dict[str, float]] = {"adamw": {}, "dmuon": {}}
    for lr in adamw_grid:
        grid["adamw"][f"{lr:g}"] = final(runs.curve("adamw", lr, None, 0))
    adamw_lr = best(grid["adamw"])
    for lr in matrix_grid:
        grid["dmuon"][f"{lr:g}"] = final(runs.curve("dmuon", adamw_lr, lr, 0))
    matrix_lr = best(grid["dmuon"])

    curves: dict[str, list[dict]] = {method: [] for method in FILES}
    for seed in range(seeds):
        for method, each in curves.items():
            each.append(runs.curve(method, adamw_lr, None if method == "adamw" else matrix_lr, seed))
    methods = {}
    for method, each in curves.items():
        reached = [outcome(c["step"], c["held_out_loss"], final(goal)) for c, goal in zip(each, curves["adamw"])]
        numbers = [r for r in reached if isinstance(r, int)]
        step_seconds = statistics.median(each[-1]["step_seconds"])
        mean_steps = statistics.mean(numbers) if len(numbers) == seeds else None
        ends = [final(curve) for curve in each]
        methods[method] = {
            "final_loss": statistics.mean(ends),
            "final_loss_by_seed": ends,
            "steps_to_adamw": mean_steps,
            "steps_to_adamw_by_seed": reached,
            "step_seconds": step_seconds,
            "seconds_to_adamw": None if mean_steps is None else mean_steps * step_seconds,
            "curves": each,
        }
    return {
        "steps": runs.steps,
        "every": runs.every,
        "adamw_lr": adamw_lr,
        "matrix_lr": matrix_lr,
        "grid": grid,
        "methods": methods,
    }


def print_tables(figures: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    for name, losses in figures["grid"].items():
        console.print(f"{name}, held-out loss by rate: " + ", ".join(f"{r}: {loss:.3f}" for r, loss in losses.items()))
    table = Table(
        "method",
        f"held-out loss at step {figures['steps']}",
        "by seed",
        "steps to AdamW's",
        "by seed",
        "s / step",
        "s to AdamW's",
    )
    number = lambda value: "-" if value is None else f"{value:.1f}"  # noqa: E731
    for name, each in figures["methods"].items():
        table.add_row(
            name,
            f"{each['final_loss']:.3f}",
            " ".join(f"{x:.3f}" for x in each["final_loss_by_seed"]),
            number(each["steps_to_adamw"]),
            " ".join(map(str, each["steps_to_adamw_by_seed"])),
            f"{each['step_seconds']:.2f}",
            number(each["seconds_to_adamw"]),
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
            label = None if number else name
            by_step.plot(curve["step"], curve["held_out_loss"], line, color=color, label=label, linewidth=1)
            seconds = [each["step_seconds"] * step for step in curve["step"]]
            by_time.plot(seconds, curve["held_out_loss"], line, color=color, linewidth=1)
    by_step.axhline(figures["methods"]["adamw"]["final_loss"], color="gray", linewidth=0.6)
    by_time.axhline(figures["methods"]["adamw"]["final_loss"], color="gray", linewidth=0.6)
    by_step.set(xlabel="step", ylabel="held-out loss")
    by_time.set(xlabel="seconds of training, one process, at the median step")
    by_step.legend()
    save_picture(figure, path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [float(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "convergence")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=2, help="validate after every so many steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--adamw-rates", type=numbers, default=[8e-4, 1.6e-3, 3.2e-3, 6.4e-3, 1.28e-2])
    parser.add_argument("--matrix-rates", type=numbers, default=[1e-2, 2e-2, 4e-2, 8e-2])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this long")
    add_output_arguments(parser)
    args = parse_args(parser, argv)

    os.chdir(ROOT)  # the configurations name the data relative to it
    try:
        figures = measure(
            Runs(args.out.resolve(), args.steps, args.every, args.seconds),
            args.adamw_rates,
            args.matrix_rates,
            args.seeds,
        )
    except Cut:
        print("time is up: call again with the same arguments to go on")
        return 3
    print_tables(figures)
    if args.json:
        write_json(args.json, figures)
    if args.plot:
        plot(figures, args.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
