"""Dynamic loss scaling where gradients have owners: torch's scaler, with one verdict for all ranks and optimizers.

Decides: when owned gradients are unscaled, and whose overflow counts. Does not decide the scale, which is torch's
rule. Keeps invariant 10, and scales equal: a rank that owns nothing, or nothing that overflowed, halves as others do.
"""

from __future__ import annotations

from typing import Any

import torch

from .optimizer import OwnedOptimizer
from .owned import OwnedMatrices


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for the optimizer of ``owned`` and those of the other parameters, FSDP2's included.

    An overflow in the gradients of one of them skips the steps of all that are unscaled before it is known: call
    `unscale_` on each before the first `step`, and clip in between. `unscale_` and `step` are collectives.
    ``options`` are torch's. What it overrides is what torch's own ShardedGradScaler does (2.11 to 2.14).
    """

    covers_owned_gradients = True  # so those of an optimizer of all parameters may be passed over

    def __init__(self, owned: OwnedMatrices, device: str = "cuda", **options: Any) -> None:
        super().__init__(device, **options)
        self._engine = owned.engine
        self._verdict: torch.Tensor | None = None  # above 0: an overflow, in any optimizer since the last update

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._engine.finish_reduces()  # whoever asks: the verdict travels over a group of theirs
        self._engine.early = None  # updates made during backward would be of scaled gradients
        found = super()._unscale_grads_(optimizer, *args, **kwargs)
        if self._verdict is None:
            self._verdict = torch.zeros((), device=self._engine.device)
        for each in found.values():  # none where this rank has no gradient
            self._verdict.copy_(torch.maximum(self._verdict, each.to(self._verdict.device).amax()))
        self._engine.control.all_reduce(self._verdict, torch.distributed.ReduceOp.MAX)
        return {self._verdict.device: self._verdict}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, OwnedOptimizer):
            optimizer.scaler_agrees = True
        return super().step(optimizer, *args, **kwargs)

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(optimizer, OwnedOptimizer) and self._verdict is not None and self._verdict.item():
            return optimizer.skip_step()
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        self._verdict = None
