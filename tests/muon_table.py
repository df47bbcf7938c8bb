"""The update rule beside torch.optim.Muon and beside the ten-line references: the largest difference of each rule.

Decides what is run: 20 steps of random gradients on square, wide, tall, one-row, one-column and odd shapes, of
ordinary, zero, tiny and huge scale. A difference is |dW - dW_ref| / |dW_ref| (Frobenius), dW being all that the weight
has moved so far; the largest over steps, shapes and scales is shown. torch's function computes in bfloat16, so ours
does too there.

    python -m tests.muon_table [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.reference import muon_step, newton_schulz, normalized_rows
from torchtitan_dmuon.lr_factors import lr_factor
from torchtitan_dmuon.muon import Muon
from torchtitan_dmuon.newton_schulz import COEFFICIENTS, NewtonSchulz

STEPS = 20
SHAPES = ((64, 64), (24, 96), (96, 24), (1, 16), (16, 1), (33, 65), (65, 33), (7, 5))
SCALES = (1.0, 0.0, 1e-12, 1e15)
LR, DECAY, MOMENTUM, BETA = 0.02, 0.1, 0.95, 0.95

Rule = dict[str, Any]
TORCH_RULES: dict[str, Rule] = {
    f"{rule}{'' if nesterov else ', plain momentum'}": {"adjust_lr_fn": rule, "nesterov": nesterov}
    for nesterov, rule in itertools.product((True, False), ("original", "match_rms_adamw", "spectral_unclamped"))
}
OWN_RULES: dict[str, Rule] = {
    **TORCH_RULES,
    "heavy ball": {"momentum_form": "heavy_ball"},
    "heavy ball, plain": {"momentum_form": "heavy_ball", "nesterov": False},
    "cautious weight decay": {"cautious_weight_decay": True},
    "NorMuon": {"row_beta": BETA, "adjust_lr_fn": "match_rms_adamw"},
    "a function": {"adjust_lr_fn": math.hypot},
    "table you": {"ns_coefficients": "you"},
    "table polar_express": {"ns_coefficients": "polar_express"},
    "table of the user, 7 steps": {"ns_coefficients": [[3.4445, -4.775, 2.0315], [1.5, -0.5, 0.0]], "ns_steps": 7},
}


def gradients(shape: tuple[int, int], scale: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator) * scale for _ in range(STEPS)]


def largest(step: Callable[[torch.Tensor], torch.Tensor], expected: Callable[[torch.Tensor], torch.Tensor],
            start: torch.Tensor, grads: list[torch.Tensor]) -> float:  # fmt: skip
    """Largest relative difference of the movement from ``start``; both take a gradient and return the weight."""
    worst = 0.0
    for grad in grads:
        moved, reference = step(grad).double() - start.double(), expected(grad).double() - start.double()
        worst = max(worst, float((moved - reference).norm() / reference.norm()))
    return worst


def stepping(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(grad: torch.Tensor) -> torch.Tensor:
        param.grad = grad.to(param.dtype)
        optimizer.step()
        return param.detach()

    return step


def against_torch(rule: Rule, shape: tuple[int, int], scale: float) -> float:
    start = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    options = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, **rule}
    a, b = Muon([ours], ns_dtype="bfloat16", **options), torch.optim.Muon([theirs], **options)
    return largest(stepping(a, ours), stepping(b, theirs), start, gradients(shape, scale))


def against_reference(rule: Rule, shape: tuple[int, int], scale: float, dtype: str) -> float:
    start = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=getattr(torch, dtype))
    param = torch.nn.Parameter(start.clone())
    options = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "ns_dtype": dtype, **rule}
    return largest(stepping(Muon([param], **options), param), reference(rule, start), start, gradients(shape, scale))


def reference(rule: Rule, start: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    m, n = start.shape
    steps = rule.get("ns_steps", 5)
    table = NewtonSchulz(steps=steps, coefficients=rule.get("ns_coefficients", "keller")).table
    form, nesterov = rule.get("momentum_form", "ema"), rule.get("nesterov", True)
    factor = lr_factor(rule.get("adjust_lr_fn"), m, n)
    w, buffer, moment = start.double(), torch.zeros(m, n, dtype=torch.float64), [0.0] * m

    def step(grad: torch.Tensor) -> torch.Tensor:
        nonlocal w, buffer, moment
        if "row_beta" not in rule:
            w, buffer = muon_step(w, grad, buffer, lr=LR, table=table, weight_decay=DECAY, momentum=MOMENTUM,
                                  nesterov=nesterov, form=form, factor=factor,
                                  cautious=rule.get("cautious_weight_decay", False))  # fmt: skip
            return w
        buffer = MOMENTUM * buffer + (1 - MOMENTUM) * grad.double()
        update = newton_schulz(MOMENTUM * buffer + (1 - MOMENTUM) * grad.double(), table)
        if update.any():
            update, moment = normalized_rows(update, moment, BETA)
        w = w * (1 - LR * DECAY) - LR * factor * update
        return w

    return step


def measure() -> dict[str, dict[str, float]]:
    """Rule -> largest difference, against torch in bfloat16 and against the references in float64 and float32."""
    assert COEFFICIENTS["keller"] == (tuple(torch.optim.Muon([torch.zeros(1, 1)]).defaults["ns_coefficients"]),)
    cases = list(itertools.product(SHAPES, SCALES))
    table: dict[str, dict[str, float]] = {}
    for name, rule in OWN_RULES.items():
        # A tiny gradient is scaled by 1 / eps, and one row of zeros by 1e-8: the same in both, rounding aside.
        table[name] = {d: max(against_reference(rule, s, x, d) for s, x in cases) for d in ("float64", "float32")}
        if name in TORCH_RULES:
            table[name]["torch"] = max(against_torch(rule, s, x) for s, x in cases)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = measure()
    print(f"{'rule':36} {'torch, bf16':>12} {'reference, fp64':>16} {'reference, fp32':>16}")
    for name, row in table.items():
        cell = f"{row['torch']:.1e}" if "torch" in row else "-"
        print(f"{name:36} {cell:>12} {row['float64']:>16.1e} {row['float32']:>16.1e}")
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
