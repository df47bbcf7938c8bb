"""What goes into a unit's forward and comes out of it: its tensors, and what to say where their dtypes do not fit.

Decides: where tensors are looked for. Does not decide what is done with them (`hooks.py`).
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .unit import Unit

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.Generator)
# With attributes, but not a value that a forward returns its results in.
_NOT_SEARCHED = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def _parts(value: Any) -> list[Any] | None:
    """What a container or object holds, or None where that cannot be seen."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, _NOT_SEARCHED):
        return None
    attributes = dict(getattr(value, "__dict__", {}))
    slots = [(cls, name) for cls in type(value).__mro__ for name in _slots_of(cls)]
    for cls, name in slots:
        private = name.startswith("__") and not name.endswith("__")
        name = f"_{cls.__name__.lstrip('_')}{name}" if private else name
        if hasattr(value, name):
            attributes[name] = getattr(value, name)
    return list(attributes.values()) if slots or hasattr(value, "__dict__") else None


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(s for s in slots if s not in ("__dict__", "__weakref__"))


def tensors_in(value: Any, opaque: list[Any] | None = None) -> Iterator[torch.Tensor]:
    """Tensors in nested containers, dataclasses and attributes of objects, each container once. ``opaque`` is given
    what cannot be looked into."""
    seen: dict[int, Any] = {}  # the objects too: an address is not to be used again meanwhile
    found = [value]
    while found:
        value = found.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif not isinstance(value, _PLAIN) and id(value) not in seen:
            seen[id(value)] = value
            parts = _parts(value)
            if parts is not None:
                found += reversed(parts)
            elif opaque is not None:
                opaque.append(value)


def results_in(unit: Unit, out: Any) -> list[torch.Tensor]:
    """The tensors that a unit's forward returned. TypeError where there are none to be seen, and may be others."""
    opaque: list[Any] = []
    tensors = list(tensors_in(out, opaque))
    if opaque and not tensors and unit.trainable():
        raise TypeError(
            f"{unit.name}: its forward returned a {type(opaque[0]).__qualname__}, which cannot be searched for tensors "
            "to prepare its backward by. Return tensors, containers of them, or objects that have them as attributes"
        )
    return tensors


def require_values(unit: Unit, out: Any) -> None:
    """TypeError where a forward returned a weight that has been freed behind it: torch would read it unchecked."""
    freed = {s._cdata for p in unit.params if not (s := p.weight.untyped_storage()).nbytes()}
    for tensor in tensors_in(out) if freed else ():
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.untyped_storage()._cdata in freed:
            raise TypeError(
                f"{unit.name}: its forward returned a weight of its own, or a view of one, of shape "
                f"{tuple(tensor.shape)}, and weights are freed behind it. Return what is computed with it, or take the "
                "module that uses it into the unit"
            )


def explain_dtypes(error: BaseException | None, unit: Unit, module: nn.Module, given: Any) -> None:
    """Add a note to the ``error`` of a forward if dtypes that do not fit may be its reason."""
    if not isinstance(error, RuntimeError):
        return
    inputs = {t.dtype for t in tensors_in(given) if t.is_floating_point()}
    ours = {p.placeholder for p in unit.params} | {p.weight for p in unit.params}
    others = {p.dtype for p in module.parameters() if p not in ours}
    unlike = [f"{what} {', '.join(sorted(map(str, found)))}" for what, found in (("its inputs", inputs),
              ("its other parameters", others)) if found - {unit.compute_dtype}]  # fmt: skip
    if unlike:
        error.add_note(
            f"{unit.name}: its owned weights are gathered as {unit.compute_dtype} (mp_policy of own_matrices, else the "
            f"model's dtype), while there are {' and '.join(unlike)}. own_matrices casts no inputs: give `fully_shard` "
            "of this module an mp_policy with the same param_dtype (its cast_forward_inputs is on by default), use "
            "torch.autocast, cast them in the model, or give own_matrices another param_dtype"
        )
