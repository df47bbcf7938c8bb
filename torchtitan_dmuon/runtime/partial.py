"""A tensor of which this rank holds some boxes, or nothing, as state for torch.distributed.checkpoint and for those who
rewrite state dicts.

Decides: how a weight or momentum that other ranks own, or own rows of, appears in a state dict: under its name, with
its whole shape, on every rank. What only moves or reshapes boxes works as on any tensor; what needs values that are not
here raises with the name, so that a file written by one rank is whole or is not written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils import _pytree as pytree

Parts = dict[tuple[int, ...], torch.Tensor]
aten = torch.ops.aten


class PartialTensor(torch.Tensor):
    """A global tensor of which this rank holds ``parts``: offset of a box -> its tensor, which loads write into. DCP's
    planners take it by the three dunder methods at the end (those of DTensor)."""

    parts: Parts
    label: str  # its name, for messages
    staged = False  # a copy that DCP made, which it may send to a process that writes files

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        parts: Mapping[tuple[int, ...], torch.Tensor],
        name: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PartialTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        made.parts = dict(sorted(parts.items()))
        made.label = name
        return made

    def __init__(self, *_: Any) -> None:
        pass  # made whole by __new__

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func.overloadpacket)
        if handler is not None and (made := handler(func, *args, **kwargs)) is not NotImplemented:
            return made
        return _otherwise(func, args, kwargs)

    @property
    def is_complete(self) -> bool:
        return sum(part.numel() for part in self.parts.values()) == self.numel()

    def whole(self, what: str) -> torch.Tensor:
        """An ordinary copy, to do ``what`` with. RuntimeError with the name unless every box is here."""
        if not self.is_complete:
            raise RuntimeError(
                f"{self.label}: {what} needs all of {tuple(self.shape)}, of which this rank holds {self._held()}. Save "
                "and load through torch.distributed.checkpoint, where each rank contributes its part, or take whole "
                "values from owned.full_state_dict() or full_optimizer_state(optimizer), on all ranks"
            )
        made = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for offset, part in self.parts.items():
            _box(made, offset, part.shape).copy_(part)
        return made

    def _held(self) -> str:
        if not self.parts:
            return "nothing"
        return "the parts at " + ", ".join(str(list(offset)) for offset in self.parts)

    # ---- what goes around the dispatcher ----

    def untyped_storage(self) -> torch.UntypedStorage:
        part = next(iter(self.parts.values()), None)
        return torch.UntypedStorage(0) if part is None else part.untyped_storage()

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        """Asked by who will read memory, as safetensors does."""
        if not self.is_complete:
            self.whole("reading its memory")
        return False

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.whole("numpy()").numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.whole("tolist()").tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.staged:
            parts = self.parts
            return PartialTensor, (tuple(self.shape), parts, self.label, self.dtype, self.device)
        return self.whole("pickling (torch.save)").__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PartialTensor({self.label!r}, {tuple(self.shape)}, {self.dtype}, holding {self._held()})"

    # ---- for DCP ----

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), part.shape) for offset, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if index.offset is None:
            raise ValueError(f"{index.fqn}: a part is asked for by its offset")
        return self.parts[tuple(index.offset)]


def rows_of(
    shape: Sequence[int], rows: Mapping[int, torch.Tensor], name: str, dtype: torch.dtype, device: torch.device
) -> PartialTensor:
    """A tensor of ``shape`` of which this rank holds ``rows`` on dim 0."""
    parts = {(row, *[0] * (len(shape) - 1)): tensor.unsqueeze(0) for row, tensor in rows.items()}
    return PartialTensor(shape, parts, name, dtype, device)


def gathered(tensor: torch.Tensor, all_reduce: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """The whole of a tensor of which every part is on one rank. A collective; each rank gives what it holds of it."""
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    parts = tensor.parts if isinstance(tensor, PartialTensor) else {(0,) * tensor.ndim: tensor}
    for offset, part in parts.items():
        _box(whole, offset, part.shape).copy_(part)
    all_reduce(whole.view(-1).view(torch.uint8))  # bytes and zeros: the sum is exact, whatever they encode
    return whole


def _box(tensor: torch.Tensor, offset: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(offset, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def _made(like: PartialTensor, shape: Sequence[int], parts: Parts) -> torch.Tensor:
    """What is whole in one box is an ordinary tensor."""
    if len(parts) == 1 and next(iter(parts.values())).shape == torch.Size(shape):
        return next(iter(parts.values()))
    return PartialTensor(shape, parts, like.label, like.dtype, like.device)


# ---- operations: arguments as the dispatcher's, after the operation itself ----


def _each(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """One new value for each element."""
    parts = {offset: func(part, *args, **kwargs) for offset, part in x.parts.items()}
    dtype = kwargs.get("dtype") or x.dtype
    device = torch.device(kwargs.get("device") or x.device)
    return PartialTensor(x.shape, parts, x.label, dtype, device)


def _new(func: Any, x: PartialTensor, size: Sequence[int], **kwargs: Any) -> Any:
    """Also how DCP begins a staged copy, whose attributes it then replaces."""
    if tuple(size) != tuple(x.shape):
        return NotImplemented
    made = _each(lambda part, **options: func(part, part.shape, **options), x, **kwargs)
    made.staged = True
    return made


def _fill(func: Any, x: PartialTensor, *args: Any) -> Any:
    for part in x.parts.values():
        func(part, *args)
    return x


def _copy(func: Any, target: torch.Tensor, source: torch.Tensor, *args: Any) -> Any:
    if not isinstance(target, PartialTensor):
        assert isinstance(source, PartialTensor)
        return func(target, source.whole("copying it into an ordinary tensor"), *args)
    for offset, part in target.parts.items():
        if not isinstance(source, PartialTensor):
            value = _box(source.expand(target.shape), offset, part.shape)
        elif offset in source.parts:
            value = source.parts[offset]
        else:
            value = _box(source.whole("copying from it"), offset, part.shape)
        part.copy_(value)
    return target


def _equal(func: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
    if isinstance(a, PartialTensor) and isinstance(b, PartialTensor) and a.parts.keys() == b.parts.keys():
        return a.shape == b.shape and all(torch.equal(part, b.parts[offset]) for offset, part in a.parts.items())
    return NotImplemented


def _dim(x: torch.Tensor, dim: int, new: int = 0) -> int:
    return dim % (x.ndim + new)


def _select(func: Any, x: PartialTensor, dim: int, index: int) -> Any:
    dim = _dim(x, dim)
    if not -x.shape[dim] <= index < x.shape[dim]:
        raise IndexError(f"{x.label}: index {index} is out of bounds for dimension {dim} with size {x.shape[dim]}")
    index %= x.shape[dim]
    parts = {
        (*o[:dim], *o[dim + 1 :]): part.select(dim, index - o[dim])
        for o, part in x.parts.items()
        if o[dim] <= index < o[dim] + part.shape[dim]
    }
    return _made(x, (*x.shape[:dim], *x.shape[dim + 1 :]), parts)


def _slice(func: Any, x: PartialTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    dim = _dim(x, dim)
    start, end, _ = slice(start, end).indices(x.shape[dim])
    end = max(start, end)
    if step != 1:
        return _take(x, dim, range(start, end, step))
    parts: Parts = {}
    for o, part in x.parts.items():
        low, high = max(start, o[dim]), min(end, o[dim] + part.shape[dim])
        if low < high:
            parts[(*o[:dim], low - start, *o[dim + 1 :])] = part.narrow(dim, low - o[dim], high - low)
    return _made(x, (*x.shape[:dim], end - start, *x.shape[dim + 1 :]), parts)


def _split(func: Any, x: PartialTensor, sizes: Any, dim: int = 0) -> list[Any]:
    length = x.shape[_dim(x, dim)]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    stops = list(itertools.accumulate(sizes))
    return [_slice(func, x, dim, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _unbind(func: Any, x: PartialTensor, dim: int = 0) -> list[Any]:
    return [_select(func, x, dim, index) for index in range(x.shape[_dim(x, dim)])]


def _permute(func: Any, x: PartialTensor, dims: Sequence[int]) -> Any:
    dims = [_dim(x, d) for d in dims]
    parts = {tuple(o[d] for d in dims): part.permute(dims) for o, part in x.parts.items()}
    return _made(x, [x.shape[d] for d in dims], parts)


def _transpose(func: Any, x: PartialTensor, a: int = 0, b: int = 1) -> Any:
    dims = list(range(x.ndim))
    if dims[1:]:  # t() of a vector is itself
        dims[_dim(x, a)], dims[_dim(x, b)] = dims[_dim(x, b)], dims[_dim(x, a)]
    return _permute(func, x, dims)


def _unsqueeze(func: Any, x: PartialTensor, dim: int) -> Any:
    dim = _dim(x, dim, 1)
    parts = {(*o[:dim], 0, *o[dim:]): part.unsqueeze(dim) for o, part in x.parts.items()}
    return _made(x, (*x.shape[:dim], 1, *x.shape[dim:]), parts)


def _squeeze(func: Any, x: PartialTensor, dims: Any = None) -> Any:
    wanted = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = [d for d in sorted({_dim(x, d) for d in wanted}, reverse=True) if x.shape[d] == 1]
    for dim in gone:
        x = _select(func, x, dim, 0) if isinstance(x, PartialTensor) else x.squeeze(dim)
    return x if gone else _each(aten.alias.default, x)


def _cat(func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    like = next(t for t in tensors if isinstance(t, PartialTensor))
    dim, at = _dim(like, dim), 0
    parts: Parts = {}
    for tensor in tensors:
        mine = tensor.parts if isinstance(tensor, PartialTensor) else {(0,) * tensor.ndim: tensor}
        parts |= {(*o[:dim], o[dim] + at, *o[dim + 1 :]): part for o, part in mine.items()}
        at += tensor.shape[dim]
    return _made(like, (*like.shape[:dim], at, *like.shape[dim + 1 :]), parts)


def _stack(func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    return torch.cat([t.unsqueeze(dim) for t in tensors], dim)


def _take(x: PartialTensor, dim: int, indices: Iterable[int]) -> Any:
    return torch.cat([x.narrow(dim, i % x.shape[dim], 1) for i in indices], dim)


def _index_select(func: Any, x: PartialTensor, dim: int, index: torch.Tensor) -> Any:
    return _take(x, _dim(x, dim), index.view(-1).tolist())


def _index(func: Any, x: Any, indices: Sequence[torch.Tensor | None]) -> Any:
    if not isinstance(x, PartialTensor) or len(indices) != 1 or indices[0] is None or indices[0].ndim != 1:
        return NotImplemented
    (index,) = indices
    assert index is not None
    return _take(x, 0, (index.nonzero().view(-1) if index.dtype == torch.bool else index).tolist())


def _view(func: Any, x: PartialTensor, size: Sequence[int], *_: Any) -> Any:
    """Where boxes are rows on dim 0, and stay so."""
    size = list(torch.empty(x.shape, device="meta").reshape(size).shape)
    row, new_row = math.prod(x.shape[1:]), math.prod(size[1:])
    parts: Parts = {}
    for o, part in x.parts.items():
        start, count = o[0] * row, part.numel()
        if not size or part.shape[1:] != x.shape[1:] or start % new_row or count % new_row:
            return NotImplemented
        parts[(start // new_row, *[0] * (len(size) - 1))] = part.reshape(count // new_row, *size[1:])
    return _made(x, size, parts)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.detach, aten.alias, aten.clone, aten._to_copy, aten._pin_memory, aten.contiguous), _each),
    **dict.fromkeys((aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like), _each),
    **dict.fromkeys((aten.new_empty, aten.new_zeros), _new),
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias), _view),
    **dict.fromkeys((aten.split, aten.split_with_sizes), _split),
    **dict.fromkeys((aten.transpose, aten.t), _transpose),
    **dict.fromkeys((aten.zero_, aten.fill_), _fill),
    aten.copy_: _copy,
    aten.equal: _equal,
    aten.select: _select,
    aten.slice: _slice,
    aten.unbind: _unbind,
    aten.permute: _permute,
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.cat: _cat,
    aten.stack: _stack,
    aten.index_select: _index_select,
    aten.index: _index,
}


def _otherwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Operations on elements, on nothing, and on what is all here; others are refused by name."""
    if (made := func.decompose(*args, **kwargs)) is not NotImplemented:
        return made
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    mine = [leaf for leaf in leaves if isinstance(leaf, PartialTensor)]
    first = mine[0]
    alike = all(leaf.shape == first.shape and leaf.parts.keys() == first.parts.keys() for leaf in mine)
    ordinary = [leaf for leaf in leaves if not isinstance(leaf, PartialTensor)]
    writes = func._schema.is_mutable
    pointwise = torch.Tag.pointwise in func.tags and alike and all(leaf.ndim == 0 for leaf in ordinary)
    if pointwise and "out" not in kwargs and isinstance(args[0], PartialTensor) >= writes:
        parts = {o: func(*_at(o, args), **_at(o, kwargs)) for o in first.parts}
        if writes:
            return args[0]
        dtype = func(*_on_meta(args), **_on_meta(kwargs)).dtype
        return PartialTensor(first.shape, parts, first.label, dtype, first.device)
    makes_tensors = all("Tensor" in str(r.type) for r in func._schema.returns)
    if makes_tensors and not writes and not any(leaf.parts for leaf in mine):
        return pytree.tree_map_only(
            torch.Tensor,
            lambda t: PartialTensor(t.shape, {}, first.label, t.dtype, first.device),
            func(*_on_meta(args), **_on_meta(kwargs)),
        )
    if writes or any(r.alias_info is not None for r in func._schema.returns):  # a copy would lose what is written
        raise RuntimeError(f"{first.label}: {func} on a tensor of which this rank holds {first._held()}")
    args, kwargs = pytree.tree_map_only(PartialTensor, lambda t: t.whole(str(func)), (args, kwargs))
    return func(*args, **kwargs)


def _at(offset: tuple[int, ...], tree: Any) -> Any:
    return pytree.tree_map_only(PartialTensor, lambda t: t.parts[offset], tree)


def _on_meta(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), tree)
