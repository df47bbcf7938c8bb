"""What the throughput bench runs in each regime, on the ranks' side.

Decides: how a link rate, or a number of tokens, is derived from what is measured first. Keeps: the same processes train
all variants at all points of a run.

wire time over compute time: the bytes that `adamw_async` sends over the busiest link in a step, over that link's
payload rate, over its own forward and backward with unlimited links. The rate is set so that the quotient has the value
asked for. Real clusters: an 8B model in HSDP, S = 8 GPUs a node, sums 4 bytes a parameter between nodes, each rank
2 * 4 * (8.0e9 / 8) * 31 / 32 = 7.8 GB of which 0.16 s at 400 Gb/s a GPU; its forward and backward of 8,192 tokens take
6 * 8.0e9 * 8192 FLOP at about 400 TFLOP/s, 1 s: 0.15 (regime A). Where the 8 GPUs of a node share 200 Gb/s Ethernet at
longer sequences, or 400 Gb/s with small batches, the quotient is 2 and more (regime B).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from scripts.netlab.lab import Lab
from torchtitan_dmuon.matrices import MatrixLayout
from torchtitan_dmuon.muon import orthogonalized_updates
from torchtitan_dmuon.newton_schulz import NewtonSchulz

from .measure import Bench
from .model import Settings, batch, make_model, matrices

SWEEP = (0.1, 0.2, 0.35, 0.5, 1.0, 2.0)
RATIO = {"a": 0.15, "b": 2.0}
# Replicated Newton-Schulz over forward-backward in regime G: an 8B step at 8,192 tokens per GPU, in FLOPs.
REPLICATED, REPLICATED_SLACK = 1.7, 0.1
# Payload per byte that the shaper counts: frames of 1514 bytes carry 1448.
PAYLOAD = 0.956


def link_rate(bench: Bench, yardstick: str, ratio: float, ranks_per_node: int) -> float:
    """Bits per second of the link at which the yardstick's wire time over its compute time is ``ratio``; links must be
    unlimited now. 0 where nothing crosses: one node."""
    figures = bench.bytes_per_step(ranks_per_node)
    return _rate(figures[yardstick], bench.forward_backward_seconds(yardstick), ratio)


def _rate(figures: Mapping[str, int], compute: float, ratio: float) -> float:
    return figures["busiest_link_bytes_per_step"] * 8 / (ratio * compute) / PAYLOAD


def cluster(
    rank: int,
    world: int,
    lab: Lab,
    settings: Settings,
    names: Sequence[str],
    replicas: int,
    ranks_per_node: int,
    ratios: Sequence[float],
    rounds: int,
    steps: int,
) -> dict[str, Any]:
    """All variants at each ratio of wire over compute, in namespaces whose links rank 0 shapes."""
    bench = Bench(settings, names, replicas)
    differences = bench.check_first_updates()
    bench.say(f"first updates agree: { ({n: f'{d:.1e}' for n, d in differences.items()}) }")
    figures = bench.bytes_per_step(ranks_per_node)
    yardstick = "adamw_async" if "adamw_async" in names else names[0]
    compute = bench.forward_backward_seconds(yardstick)
    crossing = figures[yardstick]["busiest_link_bytes_per_step"]
    bench.say(f"forward and backward {compute:.3f} s, {crossing / 1e6:.2f} MB over the busiest link")
    points = []
    for ratio in ratios if crossing else (0.0,):  # one node: there is no link to shape
        rate = _rate(figures[yardstick], compute, ratio) if crossing else None
        dist.barrier()
        if rank == 0 and rate is not None:
            lab.shape(rate)
        dist.barrier()
        begin = time.perf_counter()
        series = bench.rounds(rounds, steps)
        bench.say(f"wire over compute {ratio}: {time.perf_counter() - begin:.0f} s")
        points.append({"wire_over_compute": ratio, "link_bits_per_second": rate, "series": series})
    bench.close()
    return {
        "points": points,
        "bytes": figures,
        "forward_backward_seconds": compute,
        "first_update_difference": differences,
    }


def one_node(
    rank: int, world: int, settings: Settings, names: Sequence[str], rounds: int, steps: int
) -> dict[str, Any]:
    """All variants on one node, without a lab."""
    bench = Bench(settings, names, 1)
    differences = bench.check_first_updates()
    figures = bench.bytes_per_step(world)
    series = bench.rounds(rounds, steps)
    compute, ns = forward_backward_and_ns(settings, rank)
    bench.close()
    return {
        "points": [{"wire_over_compute": 0.0, "series": series}],
        "bytes": figures,
        "forward_backward_seconds": bench.mean(compute),
        "replicated_ns_seconds": bench.mean(ns),
        "first_update_difference": differences,
    }


def forward_backward_and_ns(settings: Settings, rank: int, repeats: int = 3) -> tuple[float, float]:
    """Seconds of the model's own forward and backward, and of Newton-Schulz on every matrix, nothing sent, while all
    ranks do the same at once. Medians."""
    model = make_model(settings).to(torch.bfloat16)
    by_shape: dict[torch.Size, list[tuple[torch.Tensor, MatrixLayout]]] = {}
    for name, p in matrices(model):
        by_shape.setdefault(p.shape, []).append((torch.randn(p.shape), settings.layout_of(name)))
    compute, ns = [], []
    for turn in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        model(*batch(settings, rank, turn)).backward()
        compute.append(time.perf_counter() - begin)
        model.zero_grad(set_to_none=True)
        dist.barrier()
        begin = time.perf_counter()
        with torch.no_grad():
            for group in by_shape.values():
                inputs_MN, layouts = map(list, zip(*group))
                orthogonalized_updates(inputs_MN, layouts, NewtonSchulz(), "match_rms_adamw")
        ns.append(time.perf_counter() - begin)
    return statistics.median(compute[1:]), statistics.median(ns[1:])


def calibrate(rank: int, world: int, settings: Settings, tries: int = 6) -> tuple[int, float]:
    """The sequence length at which replicated Newton-Schulz takes 1.7 times the forward and backward, and the quotient
    measured there."""
    length, quotient = settings.length, 0.0
    for _ in range(tries):
        pair = torch.tensor(forward_backward_and_ns(replace(settings, length=length), rank), dtype=torch.float64)
        dist.all_reduce(pair)
        quotient = float(pair[1] / pair[0])
        if abs(quotient - REPLICATED) < REPLICATED_SLACK / 2:
            break
        # Time is near linear in tokens; a small fixed part makes the step slightly too large, and the loop ends.
        length = max(16, round(length * quotient / REPLICATED))
    return length, quotient
