"""Rows of one global tensor, as state for torch.distributed.checkpoint.

Decides: how a parameter with several owners appears in a state dict: each owner contributes its rows of one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class RowShards(torch.Tensor):
    """Some rows on dim 0 of one global tensor [E, ...], for DCP's planners: they take a tensor with the three dunder
    methods below (those of DTensor). ``rows`` maps a row to its tensor; loading writes into these tensors. It can be
    described, detached and copied into; it computes nothing."""

    rows: dict[int, torch.Tensor]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], rows: Mapping[int, torch.Tensor]) -> RowShards:
        if not rows:
            raise ValueError("a rank that holds no row contributes nothing: leave the key out")
        first = next(iter(rows.values()))
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)
        made.rows = dict(sorted(rows.items()))
        return made

    def __init__(self, shape: tuple[int, ...], rows: Mapping[int, torch.Tensor]) -> None:
        pass  # made whole by __new__

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return RowShards(tuple(args[0].shape), args[0].rows)
        if func is torch.ops.aten.copy_.default and all(isinstance(a, RowShards) for a in args[:2]):
            for row, tensor in args[0].rows.items():
                tensor.copy_(args[1].rows[row])
            return args[0]
        raise NotImplementedError(f"{func} on the rows of a stack that this rank owns: use `.rows`, a tensor each")

    def untyped_storage(self) -> torch.UntypedStorage:
        return next(iter(self.rows.values())).untyped_storage()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RowShards({tuple(self.shape)}, rows {sorted(self.rows)})"

    def _chunk(self, row: int) -> ChunkStorageMetadata:
        offsets = torch.Size([row, *[0] * (len(self.shape) - 1)])
        return ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([1, *self.shape[1:]]))

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, self._chunk(row).offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=self._chunk(row), properties=properties, size=self.shape),
            )
            for row in self.rows
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(row) for row in self.rows]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if index.offset is None:
            raise ValueError(f"{index.fqn}: a row is asked for by its offset")
        return self.rows[index.offset[0]].unsqueeze(0)
