"""One gradient norm over owned and FSDP2 parameters, and what is clipped by which norm.

Decides: how squares are added up, and the factor of each gradient in every mode. Keeps the clip equal to the
one-process clip: owned and FSDP2 gradients carry the same scale, every owned piece counts once, and squares are added
piece by piece in a fixed order, so the norm does not depend on who owns what.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .engine import Engine
from .parameter import FreedParameter

CLIPS = ("joint", "adamw_only", "per_matrix")


def sharded_square(parameters: Iterable[nn.Parameter]) -> torch.Tensor | None:
    """Squared norm of the gradients of FSDP2 parameters (and of plain ones, taken as equal on all ranks)."""
    by_mesh: dict[object, list[torch.Tensor]] = defaultdict(list)
    for p in parameters:
        if not isinstance(p, FreedParameter) and p.grad is not None:
            by_mesh[(p.grad.device_mesh, p.grad.placements) if isinstance(p.grad, DTensor) else None].append(p.grad)
    total: torch.Tensor | None = None
    for grads in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(grads, 2.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        total = norm.double() ** 2 if total is None else total + norm.double() ** 2
    return total


def piece_scale(grad: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Factor that clips one gradient by its own norm; a 0-dim tensor."""
    return torch.clamp(max_norm / (torch.linalg.vector_norm(grad) + 1e-6), max=1.0)


def _parameters_of(model: nn.Module | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    given = model.parameters() if isinstance(model, nn.Module) else model
    parameters: list[Any] = list(given) if isinstance(given, Iterable) and not torch.is_tensor(given) else [given]
    if stranger := [p for p in parameters if not isinstance(p, torch.Tensor)]:
        raise TypeError(f"clip_grad_norm_ takes the model, or its parameters, got a {type(stranger[0]).__qualname__}")
    return parameters


def clip_gradients(engine: Engine, model: nn.Module | Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients by min(1, max_norm / (norm + 1e-6)), as torch's `clip_grad_norm_`. Returns the norm of all of
    them before the clip, float32, the same on every rank; if it is not finite nothing is clipped: the step is skipped.
    ValueError for a ``max_norm`` that is negative or no number, TypeError for a ``model`` that is neither a module nor
    parameters.

    The norm that clips is, with ``engine.clip`` "joint", that of all gradients; with "adamw_only", that of FSDP2's
    and the riders' gradients, and those of owned matrices stay as they are; with "per_matrix" also, and each of
    these is clipped by its own.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm = {max_norm}: must be at least 0")
    parameters, mode = _parameters_of(model), engine.clip
    engine.max_norm = max_norm
    engine.finish_reduces()
    rest = sharded_square(parameters)
    complete = False
    while not complete:
        squares = engine.gradient_squares()
        total = squares.sum()
        if rest is not None:
            total = total + rest.to(total.device)
        norm = total.sqrt().float()
        engine.set_norm(norm)
        complete = engine.gradients_are_complete()
    finite = norm.isfinite()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0).where(finite, 1.0)
    if mode != "joint":  # riders are AdamW's
        others = (squares * engine.rider_mask).sum()
        others = others if rest is None else others + rest.to(others.device)
        scale = torch.clamp(max_norm / (others.sqrt().float() + 1e-6), max=1.0).where(finite, 1.0)
    masters = [(u.pieces[key].rider, m.grad) for u in engine.units for key, m in u.master_of.items()]
    if mode == "per_matrix":
        # Updates made ahead are of gradients clipped once, by nobody else.
        ours = [u for u in engine.units if engine.clipped_to is None and u.gradients_are_ours()]
        for grad in (grad for rider, grad in masters if grad is not None and not rider):
            grad.mul_(piece_scale(grad, max_norm).where(finite, 1.0))
        for unit in ours:
            unit.note_gradients()
        engine.clipped_to = max_norm
    together = [grad for rider, grad in masters if grad is not None and (rider or mode == "joint")]
    if together:
        torch._foreach_mul_(together, scale)
    grads = [p.grad for p in parameters if not isinstance(p, FreedParameter) and p.grad is not None]
    for grad in grads:
        (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(scale)
    return norm
