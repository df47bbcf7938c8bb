"""Where FSDP2 issues operations of its own, as marks in the order of a pass.

Decides: which modules FSDP2 moves parameters of, and where their hooks lie among units. FSDP2 gathers before a
module's forward and before its backward, and reduces when gradients reach the module's inputs; at each of these places
a rank waits for all others. So a rank that skips units must have joined their operations by then: it tells the engine
at each place, just before FSDP2 acts. What FSDP2 leaves to its callback at the end of a backward comes behind ours,
since ours is queued here first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .parameter import FreedParameter
from .schedule import Item

if TYPE_CHECKING:
    from .hooks import Hooks

# What is about to happen, as the first word of a mark.
GATHER, GATHER_IN_BACKWARD, REDUCE = "gather", "gather in backward", "reduce"


def moved_modules(root: nn.Module) -> dict[int, nn.Module]:
    """Modules below ``root`` whose parameters FSDP2 gathers and reduces, and the root itself if it is FSDP2's; by their
    place in `root.modules()`."""
    found: dict[int, nn.Module] = {}
    for index, module in enumerate(root.modules()):
        if isinstance(module, FSDPModule) and (module is root or any(_is_sharded(p) for p in own_parameters(module))):
            found[index] = module
    return found


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Those of a module that no FSDP2 module inside it has, owned ones aside."""
    found = [p for p in module.parameters(recurse=False) if not isinstance(p, FreedParameter)]
    for child in module.children():
        if not isinstance(child, FSDPModule):
            found += own_parameters(child)
    return found


def _is_sharded(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor)


def declared_marks(
    root: nn.Module,
    moved: Mapping[int, nn.Module],
    modules_of: Mapping[int, Sequence[nn.Module]],
    forward: Sequence[Item],
    backward: Sequence[Item],
    enclosing: set[int],
) -> tuple[list[Item], list[Item]]:
    """The sequences of units with marks in them, by the places of modules in the model. Units of several modules come
    with the first of these in forward, and with the last in backward."""
    place = {module: i for i, module in enumerate(root.modules())}
    first: dict[Item, int] = {unit: min(place[m] for m in modules) for unit, modules in modules_of.items()}
    last: dict[Item, int] = {unit: max(place[m] for m in modules) for unit, modules in modules_of.items()}
    end = {i: i + sum(1 for _ in module.modules()) - 1 for i, module in moved.items()}

    def merged(units: Sequence[Item], marks: list[tuple[float, Item]], at: dict[Item, int], sign: int) -> list[Item]:
        shared = [u for u in units if u not in enclosing and len(modules_of[cast(int, u)]) > 1]
        result = [u for u in units if u not in shared]
        for where, item in [*((at[u] + 0.5 * sign, u) for u in shared), *marks]:
            inner = (i for i, u in enumerate(result) if u in at and u not in enclosing and sign * (at[u] - where) > 0)
            result.insert(next(inner, len(result)), item)
        return result

    gathers: list[tuple[float, Item]] = [(i - 0.5, (GATHER, i, 0)) for i in moved if moved[i] is not root]
    events = [(-end[i] - 0.5, i, (end[i] + 0.5, (GATHER_IN_BACKWARD, i, 0))) for i in moved]
    events += [(0.5 - i, i, (i - 0.5, (REDUCE, i, 0))) for i in moved]
    return merged(forward, gathers, first, 1), merged(backward, [mark for *_, mark in sorted(events)], last, -1)


def _differentiable_copy(args: Any, kwargs: Any) -> Any:
    """The same arguments, of which the first tensor that can has a gradient."""
    leaves, spec = tree_flatten((args, kwargs))
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            leaves[i] = leaf.detach().requires_grad_()
            break
    return tree_unflatten(leaves, spec)


def mark_module(hooks: Hooks, index: int, module: nn.Module) -> Callable[..., None]:
    """Hooks around those of `fully_shard`, which are there already. Returns the one that sees the inputs last."""

    @torch._dynamo.disable
    def before_gather(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        hooks.mark(GATHER, index)
        if hooks.task() != -1 or not torch.is_grad_enabled() or hooks.differentiable((args, kwargs)):
            return None
        # FSDP2 then reduces at the end of the backward. Ranks that use the units before this module do so earlier, and
        # so must this one.
        return _differentiable_copy(args, kwargs) if hooks.engine.passes.follows_units((GATHER, index, 0)) else None

    @torch._dynamo.disable
    def prepare_reduce(_module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = hooks.differentiable((args, kwargs))
        if inputs:
            turn = hooks.turn
            act = lambda _grads: hooks.mark_in_backward(turn, REDUCE, index, module)  # noqa: E731
            if len(inputs) == 1:  # the same, for less
                inputs[0].register_hook(act)
            else:
                torch.autograd.graph.register_multi_grad_hook(inputs, act)

    @torch._dynamo.disable
    def prepare_gather(_module: nn.Module, _args: Any, out: Any) -> None:
        turn, task = hooks.turn, -1

        def act(_grad: torch.Tensor) -> None:  # of several outputs, the first that a gradient reaches
            nonlocal task
            if task != (task := hooks.task()):
                hooks.mark_in_backward(turn, GATHER_IN_BACKWARD, index)

        for tensor in hooks.differentiable(out):
            tensor.register_hook(act)

    hooks.handles += [
        module.register_forward_pre_hook(before_gather, with_kwargs=True, prepend=True),
        module.register_forward_pre_hook(prepare_reduce, with_kwargs=True),
        module.register_forward_hook(prepare_gather, prepend=True),
    ]
    return prepare_reduce
