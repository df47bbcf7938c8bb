"""Newton-Schulz throughput: ours beside torch.optim.Muon's function, a batched `bmm` loop and gram-newton-schulz.

Decides only what is timed and how: every implementation of a case gets the same input, must give the same update (the
bench stops otherwise), and is timed in turn, round by round, so that a disturbance hits all alike. Seconds are the best
round, since what else the machine does can only add to it; on a CPU with one thread (OMP_NUM_THREADS=1) they are the
process's own CPU seconds. FLOPs per second count what the implementation executes, 2 per multiply-add; the peak is the
best square matmul of this run in the same dtype. torch's function computes in bfloat16 whatever it is given, so it
appears in bfloat16 cases alone; gram-newton-schulz's torch path in all, in the case's dtype, where the package is
installed (`pip install --no-deps gram-newton-schulz` is enough). Ours through torch.compile is timed with `--compiled`,
by quack's kernels where the device can run them. A case that would take longer than `--case-seconds` is left out and
named.

    python scripts/bench/newton_schulz.py [--quick] [--sizes 64,256 --aspects 1,4 --batches 1,8] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim._muon import _zeropower_via_newtonschulz

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torchtitan_dmuon.newton_schulz import NewtonSchulz, compute_dtype, flops  # noqa: E402
from torchtitan_dmuon.ns_execution import Execution, orthogonalize  # noqa: E402
from torchtitan_dmuon.outputs import add_output_arguments, parse_args, save_picture, write_json  # noqa: E402

# Largest relative difference between two implementations of one case that is rounding: float32, bfloat16.
AGREE = {torch.float32: 1e-4, torch.bfloat16: 8e-2, torch.float16: 8e-2}
OURS = ("dmuon", "dmuon_standard", "dmuon_gram", "dmuon_compiled", "dmuon_quack")
QUICK = {"sizes": [64, 256], "aspects": [1, 4], "batches": [1, 8]}


def bmm_loop(stack_BMN: torch.Tensor, settings: NewtonSchulz) -> torch.Tensor:
    """What one writes first: whole batches, each operation by itself."""
    x = stack_BMN.to(compute_dtype(settings, stack_BMN.device))
    x = x.mT if x.shape[1] > x.shape[2] else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=settings.eps)
    for a, b, c in settings.table:
        gram = torch.bmm(x, x.mT)
        x = a * x + torch.bmm(b * gram + c * torch.bmm(gram, gram), x)
    return x.mT if stack_BMN.shape[1] > stack_BMN.shape[2] else x


def torch_function(stack_BMN: torch.Tensor, settings: NewtonSchulz) -> torch.Tensor:
    """torch.optim.Muon's function, one matrix at a time as it is called there."""
    one = settings.table[0]
    return torch.stack([_zeropower_via_newtonschulz(x, one, settings.steps, settings.eps) for x in stack_BMN])


class _TorchWithHalfAs:
    """The torch that gram-newton-schulz sees: its float16 is another dtype, since it computes in nothing else."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.float16 = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def gram_newton_schulz(settings: NewtonSchulz, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The package's torch path, not compiled, in ``dtype``; None where it is not installed."""
    if importlib.util.find_spec("gram_newton_schulz") is None:
        return None
    module = importlib.import_module("gram_newton_schulz.gram_newton_schulz")
    module.torch = _TorchWithHalfAs(dtype)  # type: ignore[attr-defined]
    rows = [list(row) for row in settings.table]
    made = module.GramNewtonSchulz(
        ns_epsilon=settings.eps, ns_use_kernels=False, ns_coefficients=rows, compile_kwargs=None
    )

    def call(stack_BMN: torch.Tensor) -> torch.Tensor:
        module.torch.float16 = dtype  # type: ignore[attr-defined]
        return made(stack_BMN)

    return call


def implementations(
    stack_BMN: torch.Tensor, settings: NewtonSchulz, compiled: bool = False
) -> dict[str, tuple[Callable[[], torch.Tensor], NewtonSchulz]]:
    """Name -> (call, the settings whose FLOPs it executes). "dmuon" is what "auto" runs; its two forms are there to see
    whether it chose well. Symmetric kernels execute less than is counted for them."""
    m, n = stack_BMN.shape[1:]
    dtype = compute_dtype(settings, stack_BMN.device)
    standard, gram = replace(settings, form="standard"), replace(settings, form="gram")
    calls: dict[str, tuple[Callable[[], torch.Tensor], NewtonSchulz]] = {
        "dmuon": (lambda: orthogonalize(stack_BMN, settings), settings),
        "dmuon_standard": (lambda: orthogonalize(stack_BMN, standard), standard),
        "dmuon_gram": (lambda: orthogonalize(stack_BMN, gram), gram),
        "bmm_loop": (lambda: bmm_loop(stack_BMN, settings), standard),
    }
    if compiled:
        calls["dmuon_compiled"] = (lambda: orthogonalize(stack_BMN, settings, Execution(compile=True)), settings)
    if can_run(quack := Execution(kernels="quack"), stack_BMN.device):
        calls["dmuon_quack"] = (lambda: orthogonalize(stack_BMN, settings, quack), settings)
    if dtype == torch.bfloat16:
        calls["torch"] = (lambda: torch_function(stack_BMN, settings), standard)
    theirs = gram_newton_schulz(settings, dtype)
    if theirs is not None:  # the package takes its Gram form for every matrix that is not square
        calls["gram_newton_schulz"] = (lambda: theirs(stack_BMN), standard if m == n else gram)
    return calls


def can_run(execution: Execution, device: torch.device) -> bool:
    try:
        execution.check(device)
    except ValueError:
        return False
    return True


def best_seconds(
    calls: dict[str, Callable[[], object]], device: torch.device, budget: float, least: int = 4
) -> dict[str, float]:
    """Seconds of each call's best round, warm already: all calls in turn, for ``least`` rounds or ``budget`` seconds,
    whichever is more."""
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    start, count = time.perf_counter(), 0
    while count < least or time.perf_counter() - start < budget:
        for name, call in calls.items():
            _wait(device)
            begin = clock()
            call()
            _wait(device)
            rounds[name].append(clock() - begin)
        count += 1
    return {name: min(times) for name, times in rounds.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bench_case(
    stack_BMN: torch.Tensor, settings: NewtonSchulz, budget: float, least: int, compiled: bool
) -> list[dict]:
    """Rows of one case. Raises RuntimeError when two implementations disagree."""
    batch, m, n = stack_BMN.shape
    device = stack_BMN.device
    dtype = compute_dtype(settings, device)
    calls = implementations(stack_BMN, settings, compiled)
    expected = bmm_loop(stack_BMN.float(), replace(settings, dtype="float32"))
    for name, (call, _) in calls.items():
        difference = float((call().float() - expected).norm() / expected.norm())
        if not difference <= AGREE[dtype]:
            raise RuntimeError(f"{name} at {tuple(stack_BMN.shape)} {dtype} is {difference:.2e} off the fp32 update")
    seconds = best_seconds({name: call for name, (call, _) in calls.items()}, device, budget, least)
    return [
        {
            "shape": [m, n],
            "batch": batch,
            "dtype": str(dtype).removeprefix("torch."),
            "implementation": name,
            "seconds": seconds[name],
            "flops_per_second": batch * flops(m, n, executed, device.type) / seconds[name],
            "ratio_to_best": seconds[name] / min(seconds.values()),
            "ratio_to_best_other": seconds[name] / min(s for other, s in seconds.items() if other not in OURS),
        }
        for name, (_, executed) in calls.items()
    ]


def matmul_peak(sizes: Sequence[int], dtype: torch.dtype, device: torch.device, budget: float) -> float:
    """FLOPs per second of the best square matmul among ``sizes``."""
    best = 0.0
    for size in sizes:
        a = torch.randn(size, size, device=device).to(dtype)
        times = best_seconds({"matmul": functools.partial(torch.matmul, a, a)}, device, budget)
        best = max(best, 2 * size**3 / times["matmul"])
    return best


def print_table(rows: Sequence[dict], peaks: dict[str, float], left_out: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "dtype", "implementation", "ms", "GFLOP/s", "of peak", "to best", "to best other")
    for row in rows:
        rate = row["flops_per_second"]
        table.add_row(
            f"{row['batch']} x {row['shape'][0]}x{row['shape'][1]}",
            row["dtype"],
            row["implementation"],
            f"{row['seconds'] * 1e3:.3f}",
            f"{rate / 1e9:.1f}",
            f"{rate / peaks[row['dtype']]:.2f}",
            f"{row['ratio_to_best']:.2f}",
            f"{row['ratio_to_best_other']:.2f}",
        )
    console = Console(width=120)
    console.print(table)
    by_case: dict[str, dict[str, float]] = {}
    for row in rows:
        case = f"{row['batch']} x {row['shape'][0]}x{row['shape'][1]} {row['dtype']}"
        by_case.setdefault(case, {})[row["implementation"]] = row["ratio_to_best_other"]
    for what, names in (("auto", OURS[:1]), ("the faster form, as calibration chooses", OURS[1:3])):
        ratios = {case: min(each[name] for name in names) for case, each in by_case.items()}
        worst = max(ratios, key=ratios.__getitem__)
        slow = sum(ratio > 1.03 for ratio in ratios.values())
        console.print(
            f"dmuon, {what}, to the best other: at most {ratios[worst]:.3f} ({worst}); "
            f"{slow} of {len(ratios)} above 1.03"
        )
    if left_out:
        console.print(f"left out, too long for this machine: {', '.join(left_out)}")


def plot(rows: Sequence[dict], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["implementation"] for row in rows))
    cases = list(dict.fromkeys((*row["shape"], row["batch"], row["dtype"]) for row in rows))
    figure = Figure(figsize=(max(6.0, 0.6 * len(cases)), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name in names:
        by_case = {
            (*r["shape"], r["batch"], r["dtype"]): r["seconds"] * 1e3 for r in rows if r["implementation"] == name
        }
        axes.plot(range(len(cases)), [by_case.get(case, float("nan")) for case in cases], "o-", label=name)
    axes.set_xticks(range(len(cases)), [f"{b} x {m}x{n} {d}" for m, n, b, d in cases], rotation=90, fontsize=7)
    axes.set(yscale="log", ylabel="milliseconds", title="Newton-Schulz, one call")
    axes.legend()
    save_picture(figure, path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [float(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--sizes", type=numbers, default=[64, 128, 256, 512, 1024, 2048], help="smaller dimension")
    parser.add_argument("--aspects", type=numbers, default=[1, 2, 4], help="larger over smaller dimension")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument(
        "--quick", action="store_true", help="eight cases of a dtype: sizes 64 and 256, aspects 1 and 4"
    )
    parser.add_argument("--dtypes", default="auto", help="comma separated: auto, float32, bfloat16, float16 (CUDA)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, default=0.4, help="seconds of timing per case")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of timing per case, at least")
    parser.add_argument("--case-seconds", type=float, default=6.0, help="leave out cases that would take longer")
    parser.add_argument("--compiled", action="store_true", help="time ours through torch.compile too")
    add_output_arguments(parser)
    args = parse_args(parser, argv)
    if args.quick:
        vars(args).update(QUICK)

    device = torch.device(args.device)
    rows, peaks, left_out = [], {}, []
    for wanted in args.dtypes.split(","):
        settings = NewtonSchulz(steps=args.steps, dtype=wanted)
        dtype = compute_dtype(settings, device)
        peak_sizes = (1024, 4096, 8192) if device.type == "cuda" else (256, 512)
        peak = peaks[str(dtype).removeprefix("torch.")] = matmul_peak(peak_sizes, dtype, device, args.budget)
        for size in map(int, args.sizes):
            for aspect in args.aspects:
                for batch in map(int, args.batches):
                    shape = (batch, size, int(size * aspect))
                    # Five implementations, once to compare and then to time.
                    needed = (
                        5 * (1 + args.rounds) * batch * flops(*shape[1:], replace(settings, form="standard")) / peak
                    )
                    if needed > args.case_seconds:
                        left_out.append(f"{batch} x {shape[1]}x{shape[2]} {dtype}".replace("torch.", ""))
                        continue
                    generator = torch.Generator().manual_seed(0)
                    rows += bench_case(
                        torch.randn(*shape, generator=generator).to(device),
                        settings,
                        args.budget,
                        args.rounds,
                        args.compiled,
                    )
    print_table(rows, peaks, left_out)
    if args.json:
        write_json(args.json, {"rows": rows, "matmul_peak_flops_per_second": peaks, "left_out": left_out})
    if args.plot:
        plot(rows, args.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
