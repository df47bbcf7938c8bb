"""Newton-Schulz throughput: ours against torch.optim.Muon's function and a plain batched `bmm` loop, in one run.

Decides only what is timed and how: every implementation of a case gets the same input, must give the same update (the
bench stops otherwise), and is timed in turn, round by round, so that a disturbance hits all alike. Seconds are the best
round, since what else the machine does can only add to it; on a CPU with one thread (OMP_NUM_THREADS=1) they are the
process's own CPU seconds. FLOPs per second count what the implementation executes, 2 per multiply-add; the peak is the
best square matmul of this run in the same dtype. torch's function computes in bfloat16 whatever it is given, so it
appears in bfloat16 cases alone.

    python scripts/bench/newton_schulz.py [--sizes 64,256 --aspects 1,4 --batches 1,8] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.optim._muon import _zeropower_via_newtonschulz

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torchtitan_dmuon.newton_schulz import NewtonSchulz, compute_dtype, flops, orthogonalize  # noqa: E402

# Largest relative difference between two implementations of one case that is rounding: float32, bfloat16.
AGREE = {torch.float32: 1e-4, torch.bfloat16: 8e-2}


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


def best_seconds(calls: dict[str, Callable[[], object]], device: torch.device, budget: float) -> dict[str, float]:
    """Seconds of each call's best round: all calls in turn, for 3 rounds or ``budget`` seconds, whichever is more."""
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    start = None
    while start is None or len(rounds[next(iter(calls))]) < 3 or time.perf_counter() - start < budget:
        for name, call in calls.items():
            _wait(device)
            begin = clock()
            call()
            _wait(device)
            rounds[name].append(clock() - begin)
        if start is None:  # the first round warms up and is dropped
            start = time.perf_counter()
            rounds = {name: [] for name in calls}
    return {name: min(times) for name, times in rounds.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bench_case(stack_BMN: torch.Tensor, settings: NewtonSchulz, budget: float) -> list[dict]:
    """Rows of one case. Raises RuntimeError when two implementations disagree."""
    batch, m, n = stack_BMN.shape
    device = stack_BMN.device
    dtype = compute_dtype(settings, device)
    standard = NewtonSchulz(**{**vars(settings), "form": "standard"})
    gram = NewtonSchulz(**{**vars(settings), "form": "gram"})
    # The name that is ours is what "auto" runs; the two forms are there to see whether it chose well.
    calls: dict[str, tuple[Callable[[], torch.Tensor], NewtonSchulz]] = {
        "dmuon": (lambda: orthogonalize(stack_BMN, settings), settings),
        "dmuon_standard": (lambda: orthogonalize(stack_BMN, standard), standard),
        "dmuon_gram": (lambda: orthogonalize(stack_BMN, gram), gram),
        "bmm_loop": (lambda: bmm_loop(stack_BMN, settings), standard),
    }
    if dtype == torch.bfloat16:
        calls["torch"] = (lambda: torch_function(stack_BMN, settings), standard)
    expected = bmm_loop(stack_BMN.float(), NewtonSchulz(**{**vars(settings), "dtype": "float32"}))
    for name, (call, _) in calls.items():
        difference = float((call().float() - expected).norm() / expected.norm())
        if not difference <= AGREE[dtype]:
            raise RuntimeError(f"{name} at {tuple(stack_BMN.shape)} {dtype} is {difference:.2e} off the fp32 update")
    seconds = best_seconds({name: call for name, (call, _) in calls.items()}, device, budget)
    return [
        {
            "shape": [m, n],
            "batch": batch,
            "dtype": str(dtype).removeprefix("torch."),
            "implementation": name,
            "seconds": seconds[name],
            "flops_per_second": batch * flops(m, n, executed, device.type) / seconds[name],
            "ratio_to_best": seconds[name] / min(seconds.values()),
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


def print_table(rows: Sequence[dict], peaks: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "dtype", "implementation", "ms", "GFLOP/s", "of peak", "to best")
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
        )
    Console().print(table)


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
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [float(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--sizes", type=numbers, default=[64, 128, 256], help="smaller dimension, comma separated")
    parser.add_argument("--aspects", type=numbers, default=[1, 2, 4], help="larger over smaller dimension")
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--dtypes", default="auto", help="comma separated: auto, float32, bfloat16")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds of timing per case, at least 3 rounds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)

    device = torch.device(args.device)
    rows, peaks = [], {}
    for wanted in args.dtypes.split(","):
        settings = NewtonSchulz(steps=args.steps, dtype=wanted)
        dtype = compute_dtype(settings, device)
        peak_sizes = (1024, 4096, 8192) if device.type == "cuda" else (256, 512)
        peaks[str(dtype).removeprefix("torch.")] = matmul_peak(peak_sizes, dtype, device, args.budget)
        for size in args.sizes:
            for aspect in args.aspects:
                for batch in args.batches:
                    generator = torch.Generator().manual_seed(0)
                    stack = torch.randn(int(batch), int(size), int(size * aspect), generator=generator).to(device)
                    rows += bench_case(stack, settings, args.budget)
    print_table(rows, peaks)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "matmul_peak_flops_per_second": peaks}, indent=1))
    if args.plot:
        plot(rows, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
