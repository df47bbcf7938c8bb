"""One gradient norm over owned and FSDP2 parameters, and the clip by it.

Decides: how squares are added up. Keeps the clip equal to the one-process clip: owned and FSDP2 gradients carry the
same scale, every owned piece counts once, and squares are added piece by piece in a fixed order, so the norm does not
depend on who owns what.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .engine import Engine
from .parameter import FreedParameter


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


def clip_joint(engine: Engine, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale every gradient by min(1, max_norm / (norm + 1e-6)), as torch's `clip_grad_norm_`. Returns the norm before
    the clip, float32, the same on every rank. A norm that is not finite clips nothing: the step will be skipped."""
    parameters = list(parameters)
    engine.finish_reduces()
    total = engine.gradient_squares().sum()
    rest = sharded_square(parameters)
    if rest is not None:
        total = total + rest.to(total.device)
    norm = total.sqrt().float()
    engine.set_norm(norm)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0).where(norm.isfinite(), 1.0)  # not read by the host
    owned = [m.grad for u in engine.units for m in u.master_of.values() if m.grad is not None]
    if owned:
        torch._foreach_mul_(owned, scale)
    grads = [p.grad for p in parameters if not isinstance(p, FreedParameter) and p.grad is not None]
    for grad in grads:
        (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(scale)
    return norm
