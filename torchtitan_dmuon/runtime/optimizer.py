"""Any whole-matrix optimizer over the pieces a rank owns, and another over its riders, as one `torch.optim.Optimizer`.

Decides: the order of a step (finite check, update unit by unit in forward order, publish each unit as soon as it is
updated), and what a skipped step is. Does not decide the update rules, which are the inner optimizers', nor when to
give up. Keeps invariant 10: a step whose gradients are not finite on any rank changes nothing on any rank.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..muon import Muon
from .clip import piece_scale
from .engine import Engine
from .lanes import Exposure
from .unit import Unit

logger = logging.getLogger(__name__)

OptimizerFactory = Callable[..., torch.optim.Optimizer]


class _States(defaultdict[torch.Tensor, Any]):
    """What torch's `get_optimizer_state_dict` and `set_optimizer_state_dict` first ask for the truth of, to step an
    optimizer that has none. They look for state of the model's own parameters; this is of masters, on their owners."""

    def __bool__(self) -> bool:
        raise RuntimeError(
            "an owned optimizer's state is in pieces on their owners, which torch's get_optimizer_state_dict and "
            "set_optimizer_state_dict do not find. Give them the other optimizers alone, and save and load this one by "
            "optimizer_state and load_optimizer_state of torchtitan_dmuon.checkpoint, or whole by full_optimizer_state"
        )


class OwnedOptimizer(torch.optim.Optimizer):
    """Steps the ``inner`` optimizers of the fp32 masters this rank owns and publishes the result: first that of the
    matrices, then that of the riders where there are any.

    Every rank has the same parameter groups, empty where it owns nothing. The ``param_groups`` are the inner
    optimizers' own objects, so schedulers and checkpoints see an ordinary optimizer. Gradients exist from the last
    reduce to the end of `step`: a second step without a backward changes nothing.
    """

    def __init__(self, engine: Engine, inner: Sequence[torch.optim.Optimizer]) -> None:
        self.engine = engine
        self.inners = tuple(inner)
        # Rows on dim 0 of the parameters that have several pieces: their state is one tensor with that many rows.
        self.stack_sizes = {p.name: p.spec.shape[0] for u in engine.units for p in u.params if not p.whole}
        # Of each unit and inner optimizer, the masters that it updates.
        taken = [{p for g in each.param_groups for p in g["params"]} for each in self.inners]
        self._by_unit: list[list[list[nn.Parameter]]] = [
            [[p for p in u.master_of.values() if p in mine] for mine in taken] for u in engine.units
        ]
        self.skipped_steps = self.skipped_in_a_row = 0  # since construction, up to the last step
        self.ns_calls = self.ns_flops = 0  # since construction, where an inner optimizer counts them
        self._clock = Exposure(engine.device)
        self.scaler_agrees = False  # a loss scaler whose verdict all ranks share
        self.after_update: Callable[[Unit], None] | None = None  # changes a unit's masters before they are published
        super().__init__(self._groups(), self.inners[0].defaults)
        # Where nothing couples the matrices, ours can work ahead of the step.
        matrices = self.inners[0]
        self._early = matrices if engine.clip != "joint" and isinstance(matrices, Muon) else None
        if self._early is not None:
            engine.update_early(self._prepare)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for each in self.inners for group in each.param_groups]

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """State of every parameter: a new mapping of the inner optimizers' own values."""
        return _States(dict, {p: state for each in self.inners for p, state in each.state.items()})

    @state.setter
    def state(self, _value: Any) -> None:
        pass  # the base class makes an empty one

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # The base class adds the groups it is given; ours are the inner optimizers', already complete.
        if not any(param_group is g for g in self._groups()):
            raise RuntimeError(
                "the groups of an owned optimizer are fixed when it is built: select the parameters then"
            )
        self.param_groups.append(param_group)

    def _prepare(self, unit: Unit) -> tuple[float | None, Any]:
        """In the engine's lane for early work: the updates of a unit whose gradient is complete, and the norm that they
        take each piece to be clipped to. Where that is not known yet, nothing."""
        max_norm = self.engine.max_norm
        unit.note_gradients()
        taken = set(self._by_unit[unit.index][0])
        pieces = {p: piece for piece, p in zip(unit.owned, unit.master_of.values(), strict=True) if p in taken}
        grads: dict[torch.Tensor, torch.Tensor] = {p: unit.piece_of(unit.grad, piece) for p, piece in pieces.items()}
        if self.engine.clip == "per_matrix":
            if max_norm is None:
                return None, {}
            grads = {p: grad * piece_scale(grad, max_norm) for p, grad in grads.items()}
        assert self._early is not None
        return max_norm, self._early.prepare(grads)

    def _prepared(self, unit: Unit) -> Any:
        """What `_prepare` made, if it is of the gradients as they are now."""
        if unit.early is None or not unit.gradients_are_ours():
            return {}
        max_norm, updates = unit.early.result()
        return updates if self.engine.clip == "adamw_only" or self.engine.clipped_to == max_norm else {}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's scaler asks before it steps an optimizer: whether that unscales its gradients by itself."""
        if not self.scaler_agrees:
            raise RuntimeError(
                "torch.amp.GradScaler sees this rank's gradients alone, and an owned one is on one rank: ranks would "
                'skip, and scale, differently. Use torchtitan_dmuon.GradScaler(owned, "cuda"), the same otherwise'
            )
        return False

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step found a gradient that is not finite on some rank; the same on every rank."""
        return self.skipped_in_a_row > 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update owned masters and publish them. A collective. Returns the closure's value.

        Where a gradient is not finite on any rank nothing changes on any, no hook of a step runs, and
        ``step_was_skipped`` says so.
        """
        self.engine.refuse_in_block("optimizer.step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine.require_open()
        self.engine.free_all()
        reduced = self.engine.finish_reduces()
        if reduced and not self.engine.gradients_are_finite():
            self.skip_step()
        else:
            self.skipped_in_a_row = 0
            self._sound_step(reduced)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # or torch would run the hooks of a step before it is known to be one

    def skip_step(self, why: str = "a gradient is not finite on some rank") -> None:
        """In place of `step`, on all ranks: count a skipped step and forget its gradients."""
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        logger.warning(
            "%s: the step is skipped on every rank (%d in all, %d in a row)",
            why,
            self.skipped_steps,
            self.skipped_in_a_row,
        )
        self.zero_grad()

    @torch.optim.Optimizer.profile_hook_step
    def _sound_step(self, reduced: bool) -> None:
        """The step proper, between its hooks; without gradients since the last one it changes nothing."""
        if not reduced:
            return
        engine = self.engine
        prepared = [self._prepared(unit) for unit in engine.units]
        grads = {p: p.grad for parts in self._by_unit for params in parts for p in params}
        for p in grads:
            p.grad = None
        # An optimizer that counts steps in its groups is called once for each unit, yet counts one step.
        options = [[dict(group) for group in each.param_groups] for each in self.inners]
        with self._clock.timed("update"):
            for index in engine.update_order():
                unit = engine.units[index]
                if self._early is not None:
                    self._early.prepared = prepared[index]
                for inner, params, before in zip(self.inners, self._by_unit[index], options, strict=True):
                    for p in params:
                        p.grad = grads.pop(p)
                    if params:
                        for group, option in zip(inner.param_groups, before, strict=True):
                            group.clear()
                            group.update(option)
                        inner.step()
                        if (stats := getattr(inner, "stats", None)) is not None:
                            self.ns_calls += stats.ns_calls
                            self.ns_flops += stats.ns_flops
                    for p in params:
                        p.grad = None
                if self.after_update is not None:
                    self.after_update(unit)
                engine.publish(unit)
        engine.drop_gradients()
        if not engine.publish_async:
            engine.await_publishes()

    def take_update_seconds(self) -> float:
        """Seconds of updates, and of starting publishes, since the last call: the device's where it is CUDA."""
        return self._clock.take().get("update", 0.0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of owned parameters, also those reduced by backwards that no step followed."""
        self.engine.drop_gradients()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizers', one after the other: only what this rank owns. `checkpoint.py` makes it whole."""
        whole: dict[str, Any] = {"state": {}, "param_groups": []}
        count = 0
        for each in self.inners:
            part = each.state_dict()
            whole["state"] |= {count + i: state for i, state in part["state"].items()}
            whole["param_groups"] += [{**g, "params": [count + i for i in g["params"]]} for g in part["param_groups"]]
            count += sum(len(g["params"]) for g in part["param_groups"])
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """State goes by the names that both sides carry. A collective: where a rank is given none of a matrix that it
        owns, as by the dict of a rank of another plan, every rank raises KeyError with its name; nothing changes."""
        saved = list(state_dict["param_groups"])
        numbers = {n: i for g in saved for n, i in zip(g.get("param_names", ()), g["params"], strict=False)}
        named = all("param_names" in g for g in saved) and len(saved) == len(self.param_groups)
        lacking = [n for g in self.param_groups for n in g["param_names"] if named and n not in numbers]
        if first := next(filter(None, self.engine.control.all_gather(lacking)), None):
            raise KeyError(
                f"{first[0]} has another owner now: the state dict that its owner was given holds other matrices. A "
                "rank's state_dict() fits the plan it was made by; to resume on others save optimizer_state(optimizer) "
                "through torch.distributed.checkpoint, or full_optimizer_state(optimizer)"
            )
        states = state_dict["state"]
        if named:
            names = [n for g in self.param_groups for n in g["param_names"]]
            states = {i: states[numbers[n]] for i, n in enumerate(names) if numbers[n] in states}
            at = itertools.count()
            saved = [
                {**g, "param_names": own["param_names"], "params": list(itertools.islice(at, len(own["params"])))}
                for g, own in zip(saved, self.param_groups, strict=True)
            ]
        for unit in self.engine.units:
            unit.drop_scratch()  # made from the momentum that goes
        before = [(each.defaults, dict(group)) for each in self.inners for group in each.param_groups]
        for each in self.inners:
            mine, saved = saved[: len(each.param_groups)], saved[len(each.param_groups) :]
            if each is self.inners[-1]:
                mine += saved  # a wrong count is torch's error to report
            held = {i for g in mine for i in g["params"]}
            each.load_state_dict({"state": {i: s for i, s in states.items() if i in held}, "param_groups": mine})
        self.param_groups = self._groups()
        if self.engine.rank == 0:  # they are equal on all ranks; schedulers move lr
            for index, ((defaults, old), new) in enumerate(zip(before, self.param_groups, strict=True)):
                options = [o for o in old.keys() & defaults if o != "lr" and new.get(o) != old[o]]
                if options:
                    changes = ", ".join(f"{o} {new.get(o)!r} instead of {old[o]!r}" for o in sorted(options))
                    logger.warning("parameter group %d takes options from the loaded state: %s", index, changes)
