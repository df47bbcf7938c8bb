"""Autograd hooks: when a unit is needed, when it may be freed, when its gradients are complete.

Decides: how the life of a module in forward and backward becomes four calls on the engine (`need`, `done`,
`gradients_ready`, `backward_over`). Does not decide what those do. The rules are those of DESIGN section 6, "Hooks".
The few autograd internals used (the current graph task, whether a node will run, the final callback) are in this file
alone.

A forward call of a unit is a span (enter, exit) on one clock. In backward, a unit whose current span began after
another's exit has finished, so it can be freed even where no gradient reaches its inputs.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable

from .forward_io import explain_dtypes, require_values, results_in, tensors_in
from .fsdp_marks import declared_marks, mark_module, moved_modules, own_parameters
from .passes import Passes
from .unit import Unit


class Engine(Protocol):
    units: list[Unit]
    passes: Passes

    @property
    def frees_weights(self) -> bool: ...
    def forward_begins(self) -> None: ...
    def forward_ends(self) -> None: ...
    def backward_begins(self) -> None: ...
    def next_forward_begins(self) -> None: ...
    def need(self, unit: Unit, in_backward: bool) -> None: ...
    def done(self, unit: Unit, in_backward: bool) -> None: ...
    def gradients_ready(self, unit: Unit) -> None: ...
    def backward_over(self, reduces: bool) -> None: ...
    def pass_failed(self) -> None: ...


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_reached(weight: torch.Tensor) -> bool:
    """Whether the backward that is running accumulates a gradient of a leaf."""
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:  # torch.autograd.grad of weights, which accumulates nothing, cannot be asked
        if "autograd.grad" not in str(error):
            raise
        return False


class _Token:
    """Alive while a backward that this file has seen is running; dies with an exception in it."""


class _UnitHooks:
    """Per-unit state of the rules: open forward calls, the span the backward is in, gradients seen."""

    def __init__(self, hooks: Hooks, unit: Unit, modules: list[nn.Module]) -> None:
        self.hooks, self.unit, self.modules = hooks, unit, modules
        # A unit of several modules is entered by the first that runs, and left when each has run.
        self.due: set[nn.Module] = set()
        self.enter = 0
        self.open_calls: list[tuple[int, list[Any]]] = []  # (enter, autograd nodes of the inputs)
        self.current: int | None = None
        self.task: int | None = None
        self.expected: int | None = None
        self.seen = 0

    @property
    def busy(self) -> bool:
        return self.busy_in_forward or self.current is not None

    @property
    def busy_in_forward(self) -> bool:
        return bool(self.open_calls or self.due)

    def reset(self) -> None:
        self.open_calls.clear()
        self.due.clear()
        self.current = self.task = self.expected = None
        self.seen = 0

    def pre_forward(self, args: Any, kwargs: Any) -> None:
        hooks = self.hooks
        if in_backward():  # recompute: the weights, nothing else
            self.touch()
            # Where no gradient has come by, this is a reentrant checkpoint, whose weights are in a graph of their own.
            hooks.reduces = hooks.reduces or self.current is None
            hooks.engine.need(self.unit, True)
            return
        hooks.engine.need(self.unit, False)
        hooks.clock += 1
        enters = not self.due
        if enters:
            self.due, self.enter = set(self.modules), hooks.clock
        enter = self.enter
        given: list[Any] = []
        self.open_calls.append((enter, given))
        if torch.is_grad_enabled():
            for tensor in tensors_in((args, kwargs)):
                if tensor.grad_fn is not None:
                    given.append(tensor.grad_fn)
                    if enters:
                        tensor.register_hook(lambda _grad, enter=enter: self.leave(enter))

    def post_forward(self, module: nn.Module, out: Any) -> None:
        if in_backward() or not self.open_calls:
            return
        hooks = self.hooks
        enter, given = self.open_calls.pop()
        hooks.clock += 1
        exit_ = hooks.clock
        self.due.discard(module)
        if not self.busy_in_forward:
            hooks.engine.done(self.unit, False)
            require_values(self.unit, out)
        if out is None or not torch.is_grad_enabled():
            return
        prepare = functools.partial(self.pre_backward, hooks.turn, enter, exit_)
        for tensor in results_in(self.unit, out):
            if tensor.grad_fn is None:
                continue  # a leaf, or an output no gradient reaches
            if any(tensor.grad_fn is node for node in given):
                continue  # passed through as it came: its gradient needs nothing of this unit
            tensor.register_hook(prepare)
            base = tensor._base  # an in-place change of a view replaces the view's own history
            if base is not None and base.grad_fn is not None:
                base.register_hook(prepare)

    def forward_ends(self) -> None:
        """The model's forward is over; some of the unit's modules may not have run."""
        if self.due and not self.open_calls:
            self.due.clear()
            self.hooks.engine.done(self.unit, False)

    def touch(self, turn: int | None = None) -> None:
        self.hooks.watch_backward(turn)  # first: it forgets a backward that failed
        self.hooks.any_unit = True
        task = torch._C._current_graph_task_id()
        if self.task != task:
            self.task, self.expected, self.seen = task, None, 0

    def pre_backward(self, turn: int | None, enter: int, exit_: int, _grad: torch.Tensor) -> None:
        self.touch(turn)
        if torch.is_grad_enabled() and self.hooks.engine.frees_weights:
            raise RuntimeError(
                f"{self.unit.name}: this backward is to be differentiated (create_graph=True), and its weights are "
                "freed behind it. Leave create_graph out, or take both backwards inside `with owned.gathered():` and "
                "`torch.enable_grad()`, where nothing is freed"
            )
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
        return sum(_is_reached(p.weight) for p in self.unit.trainable())

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
        self.any_gradient = self.any_unit = self.reduces = False  # in this backward
        self.turn: int | None = None  # the forward of the model that is running
        self._turns = 0
        self._backward_turn: int | None = None  # the forward whose graph the backward is in
        self._marked = False
        self._root = root
        self._modules_of = modules_of
        self.by_unit = [_UnitHooks(self, unit, modules_of[unit.index]) for unit in engine.units]
        self._around: dict[nn.Module, list[tuple[Callable[..., None], Callable[..., None]]]] = {}
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
        def post(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            if out is None:
                explain_dtypes(sys.exc_info()[1], state.unit, module, (args, kwargs))
            state.post_forward(module, out)

        self._hook(module, pre, post)

    def _hook(self, module: nn.Module, pre: Callable[..., None], post: Callable[..., None]) -> None:
        self._around.setdefault(module, []).append((pre, post))
        self.handles.append(module.register_forward_pre_hook(pre, with_kwargs=True, prepend=True))
        # always_call: activation checkpointing stops a recompute early and would skip ordinary hooks.
        self.handles.append(module.register_forward_hook(post, with_kwargs=True, always_call=True))

    def register_method(self, module: nn.Module, name: str) -> None:
        """From now on the method does to the units of ``module`` what its forward does. Nothing to do where those of
        units inside are all the weights it holds; ValueError where it holds one of an outer unit."""
        if module not in self._around:
            inside = set(module.modules())
            for unit in (state.unit for state in self.by_unit if inside.isdisjoint(state.modules)):
                if held := [p.name for p in unit.params for m, _ in p.slots if m in inside]:
                    raise ValueError(
                        f"{type(module).__qualname__} is no unit; {held[0]}, which it holds, belongs to {unit.name}: "
                        "register a method of that unit's module, or list this module in `units`"
                    )
            return
        method, around = getattr(module, name), self._around[module]

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            for pre, _ in reversed(around):
                pre(module, args, kwargs)
            out = None
            try:
                out = method(*args, **kwargs)
            finally:
                for _, post in around:
                    post(module, args, kwargs, out)
            return out

        setattr(module, name, wrapped)

    def _register_root(self, root: nn.Module) -> None:
        @torch._dynamo.disable
        def pre(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if in_backward():
                return
            if self._root_depth == 0 or not any(s.open_calls for s in self.by_unit):
                self._root_depth = 0
                self._drop_failed_pass()
                self._turns += 1
                self.turn = self._turns
                self._mark_fsdp(args, kwargs)
                self.engine.forward_begins()
            self._root_depth += 1

        @torch._dynamo.disable
        def post(_module: nn.Module, _args: Any, _kwargs: Any, out: Any) -> None:
            if in_backward() or self._root_depth == 0:
                return
            self._root_depth -= 1
            if self._root_depth == 0:
                turn, self.turn = self.turn, None
                if out is not None:
                    # Before the hooks of `fully_shard`, whose callback at the end of a backward is to come behind
                    # ours; and for ranks whose loss reaches no unit.
                    for tensor in self.differentiable(out):
                        tensor.register_hook(lambda _grad, turn=turn: self.watch_backward(turn))
                    for state in self.by_unit:
                        state.forward_ends()
                    self.engine.forward_ends()

        self._hook(root, pre, post)

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

    def reduces_gradients(self) -> bool:
        """Whether the backward that is running accumulates gradients of weights: not so in torch.autograd.grad."""
        self.reduces = self.reduces or self.any_gradient or any(state.reached() for state in self.by_unit)
        return self.reduces

    @staticmethod
    def task() -> int:
        """Of the backward that is running; -1 outside."""
        return torch._C._current_graph_task_id()

    @staticmethod
    def differentiable(value: Any) -> list[torch.Tensor]:
        """Tensors in a forward's inputs or outputs that a gradient may reach."""
        if in_backward() or not torch.is_grad_enabled():
            return []
        return [tensor for tensor in tensors_in(value) if tensor.requires_grad]

    def _mark_fsdp(self, args: Any, kwargs: Any) -> None:
        """Once, in the first forward, when `fully_shard` has been called on what it will be."""
        if self._marked:
            return
        self._marked = True
        moved = moved_modules(self._root)
        self.engine.passes.declare_marks(functools.partial(declared_marks, self._root, moved, self._modules_of))
        for index, module in moved.items():
            prepare = mark_module(self, index, module)
            if module is self._root:  # whose hooks run already
                prepare(module, args, kwargs)

    def mark(self, kind: str, module: int) -> None:
        if not in_backward():
            self.engine.passes.forward.mark(kind, module)
        elif self._token() is not None:
            self.engine.passes.backward.mark(kind, module)

    def mark_in_backward(self, turn: int | None, kind: str, index: int, reduced: nn.Module | None = None) -> None:
        """FSDP2 is about to act in the graph of a forward; of the parameters of ``reduced`` it has gradients now. A
        module called outside the model's forward, as the head by a loss that takes its input in chunks, has backwards
        of its own, which are no pass of the model."""
        if turn is None and self._token() is None:
            return
        self.watch_backward(turn)
        if not self.reduces and reduced is not None:
            self.reduces = any(_is_reached(p) for p in own_parameters(reduced) if p.requires_grad)
        self.engine.passes.backward.mark(kind, index)

    def watch_backward(self, turn: int | None = None) -> None:
        """The backward is in the graph of the forward ``turn``. Queue the final callback once per backward. The
        callback holds the token, so a backward that raised, and whose callbacks were therefore dropped, does not count
        as watched."""
        if self._token() is not None:
            if turn is not None and turn != self._backward_turn:
                if self._backward_turn is not None:
                    for state in self.by_unit:
                        state.current = None
                    self.reduces = self.reduces or not self.any_unit  # as where the backward is over
                    self.engine.next_forward_begins()
                self._backward_turn = turn
            return
        if self._backward_open:
            self._drop_failed_pass()
        self._backward_open = True
        token = _Token()
        self._token = weakref.ref(token)
        self.any_gradient = self.any_unit = self.reduces = False
        self._backward_turn = turn
        self.engine.backward_begins()

        def over(token: _Token = token) -> None:
            self._token, self._backward_open = lambda: None, False
            for state in self.by_unit:
                state.reset()
            # Where no unit was come by, this rank's loss reaches none: it sends zeros.
            self.reduces = self.any_gradient or not self.any_unit
            self.engine.backward_over(self.reduces)

        Variable._execution_engine.queue_callback(over)
