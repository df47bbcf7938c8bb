"""A picture of one DMuon step on the emulated network: what each lane of one rank does while the model computes.

Decides: what is recorded and how it is drawn. Figures are host times of one rank: a lane's bar begins when its task may
run and ends when its messages are through; the red bars are where the computation stood still for a lane.

    python -m scripts.bench.timeline --plot FILE.png [--wire-over-compute 0.5] [--variant dmuon]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401  (the runtime's hooks use it: imported once, before ranks are forked)
import torch.distributed as dist

from scripts.netlab.lab import Lab, LabForbidden, RankFailed
from torchtitan_dmuon.outputs import OVERWRITE, parse_args, save_picture
from torchtitan_dmuon.runtime.transport import PHASES
from torchtitan_dmuon.runtime.unit import Unit

from .measure import Bench
from .model import Settings
from .regimes import link_rate
from .variants import MUON, Owned

Span = tuple[str, str, float, float]  # row, label, begin, end
ROWS = ("computation", "waits", "gather", "reduce, in the node", "reduce, between nodes", "publish")
ROW_OF = dict(zip(PHASES, ROWS[2:]))
COLORS = dict(zip(ROWS, ("#7a9cc6", "#c0392b", "#8fb98b", "#d9b26f", "#c98a4b", "#9b7fb5")))
VARIANTS = tuple(n for n in MUON if n.startswith("dmuon"))
STEPS = 3  # the last is drawn


def record(rank: int, world: int, lab: Lab, name: str, settings: Settings, ratio: float) -> list[Span]:
    """Spans of the last of several steps on this rank, seconds from its begin."""
    bench = Bench(settings, ["adamw_async", name], 2)
    rate = link_rate(bench, "adamw_async", ratio, ranks_per_node=2)
    dist.barrier()
    if rank == 0:
        lab.shape(rate)
    dist.barrier()
    variant = bench.variants[name]
    assert isinstance(variant, Owned)
    spans: list[Span] = []

    def timed(row: str, label: Callable[..., str], fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                spans.append((row, label(*args), begin, time.perf_counter()))

        return call

    engine: Any = variant.owned.engine
    submit = engine._submit

    def traced(phase: str, unit: Unit, task: Callable[[], Any], *after: Any) -> Any:
        return submit(phase, unit, timed(ROW_OF[phase], lambda: str(unit.index), task), *after)

    engine._submit = traced
    engine.exposure.wait = timed("waits", lambda phase, _ticket: phase, engine.exposure.wait)
    variant.fsdp.wait = timed("waits", lambda: "FSDP2", variant.fsdp.wait)  # type: ignore[method-assign]
    for optimizer in variant.optimizers:
        optimizer.step = timed("computation", lambda *_: "update", optimizer.step)  # type: ignore[method-assign]
    for index, layer in enumerate(variant.model.layers):
        layer.forward = timed("computation", lambda *_, i=index: str(i), layer.forward)
    begin = 0.0
    for step in range(STEPS):
        spans.clear()
        dist.barrier()
        begin = time.perf_counter()
        variant.train_step(bench.index + step)
    forwards = [end for row, label, _, end in spans if row == "computation" and label.isdigit()]
    updates = [start for row, label, start, _ in spans if label == "update"]
    spans.append(("computation", "backward", max(forwards), min(updates)))
    variant.drain()
    bench.close()
    return [(row, label, a - begin, b - begin) for row, label, a, b in spans]


def draw(spans: Sequence[Span], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 3.6), layout="constrained")
    for row, label, begin, end in spans:
        y = len(ROWS) - ROWS.index(row)
        axes.broken_barh([(begin, end - begin)], (y - 0.4, 0.8), color=COLORS[row], edgecolor="white", linewidth=0.5)
        if end - begin > 0.03 and row != "waits":
            axes.text((begin + end) / 2, y, label, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(ROWS), 0, -1), ROWS)
    axes.set(xlabel="seconds", title=title)
    save_picture(figure, path, dpi=150)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.timeline", description=__doc__.split("\n\n")[0])
    parser.add_argument("--plot", type=Path, metavar="FILE.png", required=True)
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE)
    parser.add_argument("--wire-over-compute", type=float, default=0.5)
    parser.add_argument("--variant", choices=VARIANTS, default="dmuon")
    args = parse_args(parser, argv)
    torch.set_num_threads(1)
    try:
        with Lab(2) as lab:
            spans = lab.run(record, 2, lab, args.variant, Settings(), args.wire_over_compute, limit=300)[0]
    except (LabForbidden, RankFailed) as error:
        print(f"timeline: {error}", file=sys.stderr)
        return 1
    waited = sum(end - begin for row, _, begin, end in spans if row == "waits")
    last = max(end for row, _, _, end in spans if row == "computation")
    draw(spans, f"{args.variant}, one step of rank 0, wire over compute {args.wire_over_compute:g}", args.plot)
    print(f"step {last:.3f} s, of which {waited:.3f} s waiting; {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
