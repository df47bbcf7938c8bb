"""Autograd hooks: when a unit is needed, when it may be freed, when its gradients are complete.

Decides: how the life of a module in forward and backward becomes four calls on the engine (`need`, `done`,
`gradients_ready`, `backward_over`). Does not decide what those do. The rules are those of DESIGN section 6, "Hooks".
The few autograd internals used (the current graph task, whether a node will run, the final callback) are in this file
alone.

A forward call of a unit is a span (enter, exit) on one clock. In backward, a unit whose current span began after
another's exit has finished, so it can be freed even where no gradient reaches its inputs.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable

from .unit import Unit

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.Generator)


class Engine(Protocol):
    units: list[Unit]

    def forward_begins(self) -> None: ...
    def forward_ends(self) -> None: ...
    def backward_begins(self) -> None: ...
    def need(self, unit: Unit, in_backward: bool) -> None: ...
    def done(self, unit: Unit, in_backward: bool) -> None: ...
    def gradients_ready(self, unit: Unit) -> None: ...
    def backward_over(self, any_gradient: bool) -> None: ...
    def pass_failed(self) -> None: ...


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def tensors_in(value: Any, strict: bool) -> Iterator[torch.Tensor]:
    """Tensors in nested containers and dataclasses. With ``strict``, a type that cannot be looked into raises."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, strict)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item, strict)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), strict)
    elif strict and not isinstance(value, _PLAIN):
        raise TypeError(
            f"a unit's forward returned a {type(value).__qualname__}, which cannot be searched for tensors, so its "
            f"backward could not be prepared. Return tensors, dicts, lists, tuples or dataclasses."
        )


class _Token:
    """Alive while a backward that this file has seen is running; dies with an exception in it."""


class _UnitHooks:
    """Per-unit state of the rules: open forward calls, the span the backward is in, gradients seen."""

    def __init__(self, hooks: Hooks, unit: Unit) -> None:
        self.hooks, self.unit = hooks, unit
        self.open_calls: list[tuple[int, list[Any]]] = []  # (enter, autograd nodes of the inputs)
        self.current: int | None = None
        self.task: int | None = None
        self.expected: int | None = None
        self.seen = 0

    @property
    def busy(self) -> bool:
        return bool(self.open_calls) or self.current is not None

    def reset(self) -> None:
        self.open_calls.clear()
        self.current = self.task = self.expected = None
        self.seen = 0

    def pre_forward(self, args: Any, kwargs: Any) -> None:
        hooks = self.hooks
        if in_backward():  # recompute: the weights, nothing else
            self.touch()
            hooks.engine.need(self.unit, True)
            return
        hooks.engine.need(self.unit, False)
        hooks.clock += 1
        enter = hooks.clock
        given: list[Any] = []
        self.open_calls.append((enter, given))
        if torch.is_grad_enabled():
            for tensor in tensors_in((args, kwargs), strict=False):
                if tensor.grad_fn is not None:
                    given.append(tensor.grad_fn)
                    tensor.register_hook(lambda _grad, enter=enter: self.leave(enter))

    def post_forward(self, out: Any) -> None:
        if in_backward() or not self.open_calls:
            return
        hooks = self.hooks
        enter, given = self.open_calls.pop()
        hooks.clock += 1
        exit_ = hooks.clock
        if not self.open_calls:
            hooks.engine.done(self.unit, False)
        if out is None or not torch.is_grad_enabled():
            return
        prepare = lambda _grad: self.pre_backward(enter, exit_)  # noqa: E731
        for tensor in tensors_in(out, strict=True):
            if tensor.grad_fn is None:
                continue  # a leaf, or an output no gradient reaches
            if any(tensor.grad_fn is node for node in given):
                continue  # passed through as it came: its gradient needs nothing of this unit
            tensor.register_hook(prepare)
            base = tensor._base  # an in-place change of a view replaces the view's own history
            if base is not None and base.grad_fn is not None:
                base.register_hook(prepare)

    def touch(self) -> None:
        self.hooks.watch_backward()  # first: it forgets a backward that failed
        task = torch._C._current_graph_task_id()
        if self.task != task:
            self.task, self.expected, self.seen = task, None, 0

    def pre_backward(self, enter: int, exit_: int) -> None:
        self.touch()
        for other in self.hooks.by_unit:
            if other is not self and other.current is not None and other.current > exit_:
                other.current = None
                self.hooks.engine.done(other.unit, True)
        self.current = enter
        self.hooks.engine.need(self.unit, True)

    def leave(self, enter: int) -> None:
        self.touch()
        if self.current == enter:
            self.current = None
            self.hooks.engine.done(self.unit, True)

    def reached(self) -> int:
        """How many of the unit's weights the backward that is running reaches."""
        # Fetched anew in every backward: a kept accumulation node keeps a stale CUDA stream.
        nodes = [torch.autograd.graph.get_gradient_edge(p.weight).node for p in self.unit.trainable()]
        return sum(torch._C._will_engine_execute_node(n) for n in nodes)

    def post_accumulate(self) -> None:
        self.touch()
        self.hooks.any_gradient = True
        if self.expected is None:
            self.expected = self.reached()
        self.seen += 1
        if self.seen == self.expected:
            self.hooks.engine.gradients_ready(self.unit)


class Hooks:
    """Registers the hooks of all units and keeps what they share: one clock, one callback per backward."""

    def __init__(self, engine: Engine, root: nn.Module, modules_of: Mapping[int, list[nn.Module]]) -> None:
        self.engine = engine
        self.clock = 0
        self.any_gradient = False
        self.by_unit = [_UnitHooks(self, unit) for unit in engine.units]
        self._token: Callable[[], _Token | None] = lambda: None
        self._backward_open = False
        self._root_depth = 0
        self.handles: list[Any] = []
        for state in self.by_unit:
            for module in modules_of[state.unit.index]:
                self._register(module, state)
            for param in state.unit.params:
                trains = param.weight.requires_grad
                param.weight.requires_grad_(True)  # a hook needs it; a frozen weight may be trained later
                param.weight.register_post_accumulate_grad_hook(lambda _p, s=state: s.post_accumulate())
                param.weight.requires_grad_(trains)
        self._register_root(root)

    def _register(self, module: nn.Module, state: _UnitHooks) -> None:
        # Disabled for the compiler: these run between the compiled graphs, also with fullgraph.
        @torch._dynamo.disable
        def pre(_module: nn.Module, args: Any, kwargs: Any) -> None:
            state.pre_forward(args, kwargs)

        @torch._dynamo.disable
        def post(_module: nn.Module, _args: Any, out: Any) -> None:
            state.post_forward(out)

        self.handles.append(module.register_forward_pre_hook(pre, with_kwargs=True, prepend=True))
        # always_call: activation checkpointing stops a recompute early and would skip ordinary hooks.
        self.handles.append(module.register_forward_hook(post, always_call=True))

    def _register_root(self, root: nn.Module) -> None:
        @torch._dynamo.disable
        def pre(_module: nn.Module, _args: Any) -> None:
            if in_backward():
                return
            if self._root_depth == 0 or not any(s.open_calls for s in self.by_unit):
                self._root_depth = 0
                self._drop_failed_pass()
                self.engine.forward_begins()
            self._root_depth += 1

        @torch._dynamo.disable
        def post(_module: nn.Module, _args: Any, out: Any) -> None:
            if in_backward() or self._root_depth == 0:
                return
            self._root_depth -= 1
            if self._root_depth == 0 and out is not None:
                self.engine.forward_ends()

        self.handles.append(root.register_forward_pre_hook(pre, prepend=True))
        self.handles.append(root.register_forward_hook(post, always_call=True))

    def _drop_failed_pass(self) -> None:
        """A pass begins: what a failed forward or backward left behind goes. Sums of units that a backward had reduced
        before it failed stay until `zero_grad`, as ordinary gradients do."""
        if self._backward_open:
            self._backward_open = False
            self.engine.pass_failed()
        for state in self.by_unit:
            state.reset()
            for param in state.unit.params:
                param.weight.grad = None

    def is_busy(self, unit: Unit) -> bool:
        return self.by_unit[unit.index].busy

    def gets_no_gradient(self, unit: Unit) -> bool:
        """Within a backward that has passed the unit by: whether it reaches weights, but none of this unit."""
        if self.by_unit[unit.index].reached():
            return False
        return self.any_gradient or any(state.reached() for state in self.by_unit)

    def watch_backward(self) -> None:
        """Queue the final callback once per backward. The callback holds the token, so a backward that raised, and
        whose callbacks were therefore dropped, does not count as watched."""
        if self._token() is not None:
            return
        if self._backward_open:
            self._drop_failed_pass()
        self._backward_open = True
        token = _Token()
        self._token = weakref.ref(token)
        self.any_gradient = False
        self.engine.backward_begins()

        def over(token: _Token = token) -> None:
            self._token, self._backward_open = lambda: None, False
            for state in self.by_unit:
                state.reset()
            self.engine.backward_over(self.any_gradient)

        Variable._execution_engine.queue_callback(over)
