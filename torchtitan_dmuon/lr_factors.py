"""Factors on the learning rate of a matrix, from its own shape: by rule, by a function, by a function's import path.

Decides: the factor, and what is accepted as a rule. Keeps: the shape is always the matrix's own, never a shard's or the
fused weight's.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

LrFactor = Callable[[int, int], float]

# Of m rows and n columns. Sources: Keller Jordan's post; Moonlight, arXiv 2502.16982; Bernstein, "Deriving Muon".
LR_FACTORS: dict[str, LrFactor] = {
    "original": lambda m, n: math.sqrt(max(1, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "spectral_unclamped": lambda m, n: math.sqrt(m / n),
}


def lr_factor(adjust_lr_fn: str | LrFactor | None, m: int, n: int) -> float:
    """Factor for a matrix of m rows and n columns; None is "original", as in torch.optim.Muon.

    A function is a callable (rows, columns) -> factor or its import path "package.module:function". Raises ValueError
    for an unknown rule, for a function that raises, and for a factor that is no positive number.
    """
    rule = factor_rule(adjust_lr_fn)
    try:
        factor = rule(m, n)
    except Exception as error:
        raise ValueError(f"adjust_lr_fn {adjust_lr_fn!r} failed for a matrix of {m} x {n}: {error}") from error
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise ValueError(f"adjust_lr_fn gave {factor!r} for a matrix of {m} x {n}, expected a positive number")
    return factor


def factor_rule(adjust_lr_fn: Any) -> LrFactor:
    if callable(adjust_lr_fn):
        return adjust_lr_fn
    if isinstance(adjust_lr_fn, str) and ":" in adjust_lr_fn:
        return _imported_factor(adjust_lr_fn)
    if adjust_lr_fn is None or adjust_lr_fn in list(LR_FACTORS):
        return LR_FACTORS[adjust_lr_fn or "original"]
    raise ValueError(
        f"adjust_lr_fn must be one of {', '.join(LR_FACTORS)}, a function of (rows, columns) or its import path "
        f'"package.module:function", got {adjust_lr_fn!r}'
    )


@functools.cache
def _imported_factor(path: str) -> LrFactor:
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"adjust_lr_fn {path!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"adjust_lr_fn {path!r} is a {type(found).__name__}, expected a function of (rows, columns)")
    return found
