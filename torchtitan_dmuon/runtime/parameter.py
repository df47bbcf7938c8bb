"""One owned parameter as the model sees it: a real weight while gathered, a placeholder that refuses use otherwise.

Decides: what stands in a module's parameter slot. Does not decide when (`engine.py`) and holds no master (`unit.py`).
A freed weight used outside its unit raises instead of reading freed memory (HOOKS.md rule 10).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..matrices import OwnedSpec, Piece

# What may be asked of a weight that is not gathered: its description, never its values.
_DESCRIBING = {
    "__repr__", "__hash__", "__len__", "dim", "size", "numel", "nelement", "ndimension", "stride", "element_size",
    "is_floating_point", "is_complex", "is_contiguous", "requires_grad_", "storage_offset", "get_device",
}  # fmt: skip


class FreedParameter(nn.Parameter):
    """Stands for an owned weight between gathers. Lives on the meta device; describes itself, holds no values."""

    dmuon_name: str

    def refuse_copy(self, _argument: Any) -> Any:
        raise RuntimeError(
            f"{self.dmuon_name} has one owner, so a model with owned parameters cannot be copied or pickled. Copy it "
            "before own_matrices; save its state dict, or load that into another model (through DCP)"
        )

    __deepcopy__ = __reduce_ex__ = refuse_copy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            allowed = getattr(func, "__self__", None) is not torch.Tensor.data
        else:
            allowed = name in _DESCRIBING
        if not allowed:
            freed = next((a for a in args if isinstance(a, FreedParameter)), None)
            which = getattr(freed, "dmuon_name", "an owned weight")
            raise RuntimeError(
                f"{which} is not gathered here ({name} was called on it). Use it inside the forward of its unit, or "
                f"inside `with owned.gathered():`; its fp32 value is in the state dict of its owner. If `fully_shard` "
                f"raised this, pass it `ignored_params=owned.parameters`."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def make_placeholder(spec: OwnedSpec, dtype: torch.dtype, requires_grad: bool) -> FreedParameter:
    freed = FreedParameter(torch.empty(spec.shape, dtype=dtype, device="meta"), requires_grad=requires_grad)
    freed.dmuon_name = spec.name
    return freed


class OwnedParameter:
    """Ties a parameter's name and pieces to the module slots that hold it (several when weights are tied).

    ``whole`` means one piece: the gathered weight is then a view of its unit's buffer. A stack of several pieces has a
    storage of its own, filled from the buffer after each gather.
    """

    def __init__(
        self, spec: OwnedSpec, slots: list[tuple[nn.Module, str]], compute_dtype: torch.dtype, requires_grad: bool
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.pieces: tuple[Piece, ...] = spec.pieces()
        self.slots = slots
        self.whole = len(self.pieces) == 1
        self.placeholder = make_placeholder(spec, compute_dtype, requires_grad)
        self.weight: nn.Parameter  # set by the unit, which owns the memory
        self.install(self.placeholder)

    def install(self, parameter: nn.Parameter) -> None:
        for module, attribute in self.slots:
            module._parameters[attribute] = parameter

    def expose(self) -> None:
        """Put the gathered weight into the module slots; the user's last requires_grad wins."""
        if self.weight.requires_grad != self.placeholder.requires_grad:
            self.weight.requires_grad_(self.placeholder.requires_grad)
        self.install(self.weight)

    def hide(self) -> None:
        if self.weight.requires_grad != self.placeholder.requires_grad:
            self.placeholder.requires_grad_(self.weight.requires_grad)
        self.install(self.placeholder)

    @property
    def requires_grad(self) -> bool:
        shown = self.slots[0][0]._parameters[self.slots[0][1]]
        return shown is not None and shown.requires_grad
