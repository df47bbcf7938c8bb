"""One owned parameter as the model sees it: a real weight while gathered, a placeholder that refuses use otherwise.

Decides: what stands in a module's parameter slot, what it tells of itself, and that nobody has put something
else there. Does not decide when (`engine.py`) and holds no master (`unit.py`). A freed weight used outside its unit
raises instead of reading freed memory (HOOKS.md rule 10).

A placeholder describes its weight as an ordinary parameter would: shape, dtype, the real device, an address of 0, as a
weight freed by FSDP2 has it. It has no storage, so an operation that passes by `__torch_function__` (C++ code such as a
broadcast of parameters) ends in `__torch_dispatch__`, which refuses it as well.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..matrices import OwnedSpec, Piece

logger = logging.getLogger(__name__)

# What a tensor without a storage answers rightly by itself.
_DESCRIBING = {
    "__repr__", "__hash__", "__len__", "__format__", "__dir__", "dim", "size", "numel", "nelement", "ndimension",
    "stride", "dim_order", "element_size", "storage_offset", "get_device", "data_ptr", "storage_type", "requires_grad_",
    "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference", "is_conj", "is_neg",
    "is_distributed", "is_same_size", "_is_view", "_is_zerotensor", "_has_symbolic_sizes_strides",
}  # fmt: skip
# What makes a tensor of the same kind, or asks what one element of it tells.
_ALIKE = {
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor", "new", "empty_like",
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "is_shared", "is_pinned",
}  # fmt: skip
# What gives the same weight in another dtype or on another device: again something without values.
_RECAST = {"to", "type", "type_as", "float", "half", "bfloat16", "double", "cpu", "cuda", "detach"}


def warn_of_cast(name: str, dtype: torch.dtype, wanted: torch.dtype) -> None:
    """In the log, where something casts an owned weight."""
    logger.warning(
        "%s stays %s where the model is cast to %s: the dtype of owned weights is mp_policy's param_dtype, given to "
        "own_matrices",
        name,
        dtype,
        wanted,
    )


class FreedTensor(torch.Tensor):
    """Describes an owned weight that is not here, or its gradient; has no values and refuses to be computed with."""

    dmuon_name: str

    @staticmethod
    def __new__(cls, like: torch.Tensor, name: str, requires_grad: bool = False) -> Any:
        freed = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device, requires_grad=requires_grad
        )
        freed.dmuon_name = name
        return freed

    def __init__(self, like: torch.Tensor, name: str, requires_grad: bool = False) -> None:
        pass

    def refuse(self, operation: str) -> NoReturn:
        raise RuntimeError(
            f"{self.dmuon_name} is not gathered here ({operation} was called on it). Use it inside the forward of its "
            "unit, or inside `with owned.gathered():`; its fp32 value is in the state dict of its owner. For another "
            "method that is to work as forward does: owned.register_forward_method(module, name). If `fully_shard` "
            "raised this, pass it `ignored_params=owned.parameters`."
        )

    def refuse_copy(self, _argument: Any = None) -> NoReturn:
        raise RuntimeError(
            f"{self.dmuon_name} has one owner, so a model with owned parameters cannot be copied or pickled. Copy it "
            "before own_matrices; save its state dict, or load that into another model (through DCP)"
        )

    __deepcopy__ = __reduce_ex__ = _reduce_ex_internal = refuse_copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        described = f"{self.dmuon_name}, shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'"
        return f"{type(self).__name__}({described}, requires_grad={self.requires_grad})"

    def untyped_storage(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(0, device=self.device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        first: Any = args[0] if args else None
        if name in ("__get__", "__set__"):
            name = getattr(func.__self__, "__name__", "")  # of a property there is none
            if name == "data" and isinstance(first, FreedTensor):
                return first._data(*args[1:])
        elif name in _ALIKE and not any(isinstance(a, FreedTensor) for a in tree_leaves((args[1:], kwargs))):
            return func(_stand_in(first), *args[1:], **kwargs)
        elif name in _RECAST and not isinstance(first, FreedTensor):
            return func(*map(_stand_in, args), **{k: _stand_in(v) for k, v in kwargs.items()})
        elif name in _RECAST:
            cast = func(*map(_stand_in, args), **kwargs)
            return FreedTensor(cast.expand(first.shape), first.dmuon_name) if isinstance(cast, torch.Tensor) else cast
        elif name not in _DESCRIBING:
            cls._refuse_any((args, kwargs), name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        cls._refuse_any((args, kwargs), func.overloadpacket.__name__)

    @classmethod
    def _refuse_any(cls, arguments: Any, operation: str) -> NoReturn:
        next(a for a in tree_leaves(arguments) if isinstance(a, FreedTensor)).refuse(operation)

    def _data(self, *new: torch.Tensor) -> FreedTensor | None:
        """`p.data`, and `p.data = ...` where that is a cast of itself: the masters are float32 in any case."""
        if not new:
            return FreedTensor(self, self.dmuon_name)
        if not (isinstance(new[0], FreedTensor) and new[0].dmuon_name == self.dmuon_name):
            self.refuse("assignment to data")
        if new[0].dtype != self.dtype:
            warn_of_cast(self.dmuon_name, self.dtype, new[0].dtype)
        return None


def _stand_in(value: Any) -> Any:
    """An ordinary tensor of the same kind, of one element seen in every place."""
    if not isinstance(value, FreedTensor):
        return value
    return torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)


class ReducedGradient(FreedTensor):
    """Stands for the gradient of an owned weight, which only its owner has, from a backward to the step."""

    drop: Callable[[], None]

    def refuse(self, operation: str) -> NoReturn:
        raise RuntimeError(
            f"the gradient of {self.dmuon_name} is reduced to its owner, not here ({operation} was called on it). For "
            "clipping and norms: owned.clip_grad_norm_(model, max_norm) covers owned and FSDP2's gradients"
        )

    def zero_(self) -> ReducedGradient:
        self.drop()
        return self

    def detach_(self) -> ReducedGradient:
        return self


class FreedParameter(FreedTensor, nn.Parameter):
    """Stands for an owned weight between gathers.

    Its gradient exists from a backward to the step, though not here: whoever asks for it then, to take a norm, say,
    gets something that refuses to be computed with. Only optimizers see none, so that one of `model.parameters()`
    passes owned weights over.
    """

    has_gradient: Callable[[], bool] = staticmethod(lambda: False)
    drop_gradient: Callable[[], None] = staticmethod(lambda: None)

    @property
    def grad(self) -> ReducedGradient | None:  # type: ignore[override]
        if not self.requires_grad or not self.has_gradient() or _asked_by_an_optimizer():
            return None
        gradient = ReducedGradient(self, self.dmuon_name)
        gradient.drop = self.drop_gradient
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            self.refuse("assignment to grad")
        if self.has_gradient() and not _asked_by_an_optimizer():
            self.drop_gradient()


def _asked_by_an_optimizer() -> bool:
    """Whether the code of an optimizer, or of a scaler that covers owned gradients, reads a gradient: a method of it is
    among the nearest callers."""
    frame = sys._getframe(2)
    for _ in range(3):
        if frame is None:
            return False
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.optim.Optimizer) or getattr(caller, "covers_owned_gradients", False) is True:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class OwnedParameter:
    """Ties a parameter's name and pieces to the module slots that hold it (several when weights are tied).

    ``whole`` means one piece: the gathered weight is then a view of its unit's buffer. A stack of several pieces has a
    storage of its own, filled from the buffer after each gather.
    """

    def __init__(
        self,
        spec: OwnedSpec,
        slots: list[tuple[nn.Module, str]],
        compute_dtype: torch.dtype,
        requires_grad: bool,
        device: torch.device | None = None,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.pieces: tuple[Piece, ...] = spec.pieces()
        self.slots = slots
        self.whole = len(self.pieces) == 1
        described = torch.empty((), dtype=compute_dtype, device=device).expand(spec.shape)
        self.placeholder = FreedParameter(described, spec.name, requires_grad)
        self.weight: nn.Parameter  # set by the unit, which owns the memory
        self.values: torch.Tensor  # the same, whatever an assignment to the weight's data does
        self._install(self.placeholder)

    def _install(self, parameter: nn.Parameter) -> None:
        for module, attribute in self.slots:
            module._parameters[attribute] = parameter

    def replaced(self) -> bool:
        """Whether somebody has put something else into a slot, or taken it away."""
        ours = (self.placeholder, self.weight)
        return any(not any(m._parameters.get(a) is p for p in ours) for m, a in self.slots)

    def expose(self) -> None:
        """Put the gathered weight into the module slots; the user's last requires_grad wins."""
        if self.weight.requires_grad != self.placeholder.requires_grad:
            self.weight.requires_grad_(self.placeholder.requires_grad)
        self._install(self.weight)

    def hide(self) -> None:
        """Put the placeholder there again. What somebody else has put there stays, to be refused by the next use."""
        if self.weight.requires_grad != self.placeholder.requires_grad:
            self.placeholder.requires_grad_(self.weight.requires_grad)
        if not self.replaced():
            self._install(self.placeholder)

    def take_back_data(self) -> bool:
        """After an assignment to the gathered weight's ``data``: its values in the memory that is the unit's. False if
        they have another shape."""
        if self.weight.data_ptr() != self.values.data_ptr():
            given, self.weight.data = self.weight.data, self.values
            if given.shape != self.values.shape:
                return False
            self.values.copy_(given)
        return True

    @property
    def requires_grad(self) -> bool:
        shown = self.slots[0][0]._parameters.get(self.slots[0][1])
        return shown is not None and shown.requires_grad


def require_unreplaced(params: Iterable[OwnedParameter]) -> None:
    """RuntimeError that names a parameter of ``params`` that is no longer in its modules."""
    for param in params:
        if param.replaced():
            raise RuntimeError(
                f"{param.name} was replaced or removed in its module after own_matrices, so what stands there now is "
                "not the owned weight. Change its values by owned.fill or load_state_dict; replace, tie, remove or "
                "parametrize it before own_matrices"
            )
