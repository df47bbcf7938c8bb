"""How the throughput bench measures: interleaved rounds in the same processes, ratios pair by pair, exact bytes.

Decides: the order of runs and what a figure means. Does not decide variants (`variants.py`) or regimes
(`throughput.py`). Keeps: a disturbance of the machine hits all variants alike (a round runs each of them once, in an
order that turns), an asynchronous tail is paid (each block of steps follows one untimed step of its own variant, whose
tail it pays while its own last tail stays out), and no ratio exists unless the Muon variants make the same first
update.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scripts.netlab.bytes import ByteAccount

from .model import Settings, make_model, matrices
from .variants import ADAMW, MUON, PHASES, Variant, make_variant, newton_schulz_timed

# |dW - dW_ref| / |dW_ref| of a first update per matrix, and the norm's relative difference. Gradients of two variants
# differ by the order of sums alone (1e-6), which bfloat16 Newton-Schulz, where it is used, amplifies to 1e-2.
FIRST_UPDATE, FIRST_NORM = 3e-2, 1e-4
# Two-sided 95 % points of Student's t, by degrees of freedom; the last serves all beyond it.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)
_T95 += (2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


class UnequalUpdates(RuntimeError):
    """Two variants that must make the same first update do not: their times cannot be compared."""


@dataclass
class Series:
    """What one rank measured of one variant at one link rate, a figure per round."""

    step_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    ns_seconds: list[float] = field(default_factory=list)
    exposed: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PHASES})
    loss: float = float("nan")


class Bench:
    """All variants of one regime on one rank. Every method is a collective of the default group."""

    def __init__(self, settings: Settings, names: Sequence[str], replicas: int) -> None:
        self.settings, self.names = settings, list(names)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        shape = (replicas, self.world // replicas)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        self.index = 0
        self.variants: dict[str, Variant] = {n: make_variant(n, settings, self.mesh) for n in self.names}

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def mean(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / self.world

    # ---- before any figure ----

    def check_first_updates(self) -> dict[str, float]:
        """One step of every variant on the same batch. Returns each Muon variant's largest relative difference to the
        first one's update; raises :class:`UnequalUpdates` beyond the tolerances."""
        before = {name: p.detach().clone() for name, p in matrices(make_model(self.settings))}
        reference: dict[str, torch.Tensor] | None = None
        differences: dict[str, float] = {}
        norms: dict[str, float] = {}
        for name, variant in self.variants.items():
            variant.train_step(0)
            norms[name] = variant.norm
            if name in MUON:
                update = {k: w - before[k] for k, w in variant.masters().items()}
                reference = reference or update
                differences[name] = first_update_difference(update, reference)
            variant.drain()
        check_equal(norms, differences)
        self.index = 1
        return differences

    def bytes_per_step(self, ranks_per_node: int) -> dict[str, dict[str, int]]:
        """Exact bytes of one steady step of each variant, its asynchronous tail included."""
        figures = {}
        for name, variant in self.variants.items():
            variant.train_step(self.index)
            variant.drain()
            with ByteAccount(ranks_per_node) as account:
                variant.train_step(self.index + 1)
                variant.drain()
            figures[name] = {
                "internode_bytes_per_step": account.between_nodes,
                "intranode_bytes_per_step": account.inside_nodes,
                "busiest_link_bytes_per_step": account.busiest_link,
            }
        self.index += 2
        return figures

    def forward_backward_seconds(self, name: str, steps: int = 3) -> float:
        """Median forward and backward of a variant as the links are now, mean over ranks."""
        variant = self.variants[name]
        seconds = []
        for i in range(steps):
            dist.barrier()
            begin = time.perf_counter()
            variant.forward_backward(self.index + i)
            variant.fsdp.wait()
            seconds.append(time.perf_counter() - begin)
            for optimizer in variant.optimizers:
                optimizer.zero_grad(set_to_none=True)
        return self.mean(statistics.median(seconds))

    # ---- figures ----

    def rounds(self, count: int, steps: int) -> dict[str, Series]:
        """``count`` rounds of ``steps`` timed steps of each variant."""
        series = {name: Series() for name in self.names}
        with newton_schulz_timed() as ns:
            for turn in range(count):
                for name in order_of(turn, self.names):
                    self._block(self.variants[name], series[name], steps, ns)
                self.index += steps + 1
        return series

    def _block(self, variant: Variant, series: Series, steps: int, ns: Any) -> None:
        dist.barrier()
        variant.train_step(self.index)
        variant.exposed()
        ns.clear()
        begin, cpu = time.perf_counter(), time.process_time()
        for i in range(steps):
            variant.train_step(self.index + 1 + i)
        series.step_seconds.append((time.perf_counter() - begin) / steps)
        series.cpu_seconds.append((time.process_time() - cpu) / steps)
        series.ns_seconds.append(ns["seconds"] / steps)
        exposed = variant.exposed()
        for phase, values in series.exposed.items():
            values.append(exposed[phase] / steps if exposed else float("nan"))
        series.loss = variant.loss
        variant.drain()

    def close(self) -> None:
        for variant in self.variants.values():
            variant.close()


def order_of(turn: int, names: Sequence[str]) -> list[str]:
    """Of the variants in a round: each comes first as often as any other, and both ways round."""
    at = turn % len(names)
    order = [*names[at:], *names[:at]]
    return order[::-1] if turn // len(names) % 2 else order


def first_update_difference(update: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Largest |dW - dW_ref| / |dW_ref| over matrices."""
    return max(float((update[k] - reference[k]).norm() / reference[k].norm()) for k in reference)


def check_equal(norms: dict[str, float], differences: dict[str, float]) -> None:
    """Raises :class:`UnequalUpdates` naming the variant that is off."""
    first = next(iter(norms))
    for name, norm in norms.items():
        if not abs(norm - norms[first]) <= FIRST_NORM * norms[first]:
            raise UnequalUpdates(
                f"{name}: the first step's gradient norm is {norm:.6g}, that of {first} {norms[first]:.6g}; "
                f"allowed is a relative difference of {FIRST_NORM:g}. No ratio is printed"
            )
    for name, difference in differences.items():
        if not difference <= FIRST_UPDATE:
            raise UnequalUpdates(
                f"{name}: the first update differs by {difference:.3g} of itself from that of "
                f"{next(iter(differences))}; allowed is {FIRST_UPDATE:g}. No ratio is printed"
            )


# ---- statistics of the parent ----


def paired_ratio(base: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high) of base / other over pairs of one round: the median ratio, and the 95 % interval of the mean
    logarithm (Student's t). One round has no interval: nan."""
    ratios = [b / o for b, o in zip(base, other, strict=True)]
    logs = [math.log(r) for r in ratios]
    n = len(logs)
    if n < 2:
        return ratios[0], math.nan, math.nan
    t = _T95[min(n - 2, len(_T95) - 1)]
    center, half = statistics.fmean(logs), t * statistics.stdev(logs) / math.sqrt(n)
    return statistics.median(ratios), math.exp(center - half), math.exp(center + half)


def summarize(
    by_rank: list[dict[str, Series]],
    settings: Settings,
    constant: dict[str, dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """The JSON names of one point, from every rank's series; ``constant`` holds what does not depend on the rate.

    A round's step time is the mean over ranks. The best AdamW is the one with the least median."""
    world, names = len(by_rank), list(by_rank[0])

    def per_round(name: str, get: Callable[[Series], list[float]]) -> list[float]:
        return [statistics.fmean(values) for values in zip(*(get(rank[name]) for rank in by_rank))]

    steps = {name: per_round(name, lambda s: s.step_seconds) for name in names}
    adamws = [n for n in names if n in ADAMW]
    best = min(adamws, key=lambda n: statistics.median(steps[n])) if adamws else None
    out: dict[str, dict[str, Any]] = {}
    for name in names:
        median = statistics.median(steps[name])
        ns = statistics.fmean(per_round(name, lambda s: s.ns_seconds))
        row: dict[str, Any] = {
            "step_seconds": median,
            "step_seconds_min": min(steps[name]),
            "tokens_per_second": world * settings.tokens_per_rank() / median,
            "tokens_per_step": world * settings.tokens_per_rank(),
            "ratio_to_adamw": None,
            "ratio_low": None,
            "ratio_high": None,
            "best_adamw": best,
            "ratio_to_gather_muon": None,
            "ns_share": ns / statistics.fmean(steps[name]),
            "exposed_seconds": {
                phase: _or_none(statistics.fmean(v for rank in by_rank for v in rank[name].exposed[phase]))
                for phase in PHASES
            },
            "cpu_seconds": world * statistics.median(per_round(name, lambda s: s.cpu_seconds)),
            "loss": statistics.fmean(rank[name].loss for rank in by_rank) * world,
            "round_seconds": steps[name],
            **constant.get(name, {}),
        }
        if best is not None:
            ratio, low, high = paired_ratio(steps[best], steps[name])
            row |= {"ratio_to_adamw": ratio, "ratio_low": _or_none(low), "ratio_high": _or_none(high)}
        if "gather_muon" in names:
            ratio, low, high = paired_ratio(steps["gather_muon"], steps[name])
            row |= {
                "ratio_to_gather_muon": ratio,
                "gather_ratio_low": _or_none(low),
                "gather_ratio_high": _or_none(high),
            }
        out[name] = row
    return out


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def describe(settings: Settings) -> dict[str, Any]:
    return asdict(settings)
