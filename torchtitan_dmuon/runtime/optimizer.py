"""Any whole-matrix optimizer over the pieces a rank owns, as one `torch.optim.Optimizer`.

Decides: the order of a step (finite check, update unit by unit in forward order, publish each unit as soon as it is
updated). Does not decide the update rule, which is the inner optimizer's. Keeps invariant 10: a step whose gradients
are not finite on any rank changes nothing on any rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .engine import Engine

logger = logging.getLogger(__name__)

OptimizerFactory = Callable[..., torch.optim.Optimizer]


class OwnedOptimizer(torch.optim.Optimizer):
    """Steps ``factory(groups, **defaults)`` over the fp32 masters this rank owns and publishes the result.

    Every rank has the same parameter groups, empty where it owns nothing. ``param_groups``, ``defaults`` and ``state``
    are the inner optimizer's own objects, so schedulers and checkpoints see an ordinary optimizer. Gradients exist from
    the last reduce to the end of `step`: a second step without a backward changes nothing.
    """

    def __init__(
        self,
        engine: Engine,
        factory: OptimizerFactory,
        groups: Sequence[Mapping[str, Any]],
        **defaults: Any,
    ) -> None:
        self.engine = engine
        # Rows on dim 0 of the parameters that have several pieces: their state is one tensor with that many rows.
        self.stack_sizes = {p.name: p.spec.shape[0] for u in engine.units for p in u.params if not p.whole}
        self.inner = factory([dict(g) for g in groups], **defaults)
        self._by_unit: list[list[nn.Parameter]] = [list(u.master_of.values()) for u in engine.units]
        mine = {p for g in self.inner.param_groups for p in g["params"]}
        self._by_unit = [[p for p in params if p in mine] for params in self._by_unit]
        self.skipped_steps = 0
        self.ns_calls = self.ns_flops = 0  # since construction, where the inner optimizer counts them
        self._update_seconds = 0.0
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.share()

    def share(self) -> None:
        """Take the inner optimizer's groups and state again, after it replaced them (a load)."""
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, self.inner.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # The base class adds the groups it is given; ours are the inner optimizer's, already complete.
        if not any(param_group is g for g in self.inner.param_groups):
            raise RuntimeError(
                "the groups of an owned optimizer are fixed when it is built: select the parameters then"
            )
        self.param_groups.append(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update owned masters and publish them. A collective. Returns the closure's value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = self.engine
        engine.free_all()
        if not engine.finish_reduces():
            return loss
        if not engine.gradients_are_finite():
            self.skipped_steps += 1
            logger.warning("a gradient is not finite on some rank: no owned weight is updated in this step")
            self.zero_grad()
            return loss
        grads = {p: p.grad for params in self._by_unit for p in params}
        for p in grads:
            p.grad = None
        # An optimizer that counts steps in its groups is called once for each unit, yet counts one step.
        groups = self.inner.param_groups
        options = [dict(group) for group in groups]
        begin = time.perf_counter()
        for index in engine.update_order():
            unit = engine.units[index]
            params = self._by_unit[index]
            for p in params:
                p.grad = grads.pop(p)
            if params:
                for group, option in zip(groups, options):
                    group.clear()
                    group.update(option)
                self.inner.step()
                if (stats := getattr(self.inner, "stats", None)) is not None:
                    self.ns_calls += stats.ns_calls
                    self.ns_flops += stats.ns_flops
            for p in params:
                p.grad = None
            engine.publish(unit)
        self._update_seconds += time.perf_counter() - begin
        engine.drop_gradients()
        if not engine.publish_async:
            engine.await_publishes()
        return loss

    def take_update_seconds(self) -> float:
        """Host seconds of updates, and of starting publishes, since the last call."""
        seconds, self._update_seconds = self._update_seconds, 0.0
        return seconds

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of owned parameters, also those reduced by backwards that no step followed."""
        self.engine.drop_gradients()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's: only what this rank owns. `checkpoint.py` makes it whole."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.share()
