"""Which parameters are owned, and the matrices inside each.

Decides: which parameters a set of routing rules selects, how one parameter falls apart into pieces (what an owner
holds) and matrices (what one Newton-Schulz call orthogonalizes). Does not decide who owns what (`ownership.py`) and
never touches torch.distributed. Keeps: a piece holds whole matrices only, or it is a rider and holds none (DESIGN
section 2).

Shape suffixes: M rows, N columns of a matrix; E experts of a stack.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

# Components that activation checkpointing and torch.compile add to parameter names without changing the model.
_WRAPPER_COMPONENTS = ("_checkpoint_wrapped_module", "_orig_mod")


def canonical_name(name: str) -> str:
    """``layers.0._checkpoint_wrapped_module.w.weight`` -> ``layers.0.w.weight``."""
    inner = [part for part in name.split(".") if part not in _WRAPPER_COMPONENTS]
    while inner and inner[0] == "module":  # DistributedDataParallel, only ever outermost: elsewhere it is a user's name
        inner = inner[1:]
    return ".".join(inner)


@dataclass(frozen=True)
class MatrixLayout:
    """How the rows of one 2-D tensor [M, N] fall apart into matrices.

    The M rows are ``groups`` equal runs; each run holds ``rows[0]`` rows of matrix 0, then ``rows[1]`` of matrix 1, and
    so on. Empty ``rows`` means one matrix. Contiguous blocks (gate|up) are ``groups=1``; TorchTitan's fused QKV
    (n_kv, heads_per_kv + 2, head_dim, dim) is ``groups=n_kv, rows=(heads_per_kv * head_dim, head_dim, head_dim)``;
    rows interleaved one by one are ``rows=(1, 1)``.

    ``transposed``: the tensor is stored [N, M], inputs first, as GPT-2's projections are. All above is then said of its
    columns, and its matrices are [M, N] all the same.
    """

    groups: int = 1
    rows: tuple[int, ...] = ()
    transposed: bool = False

    def validate(self, name: str, shape: Sequence[int]) -> None:
        """Raise ValueError, naming the parameter, unless the blocks cover its rows (stored transposed: its columns)
        exactly."""
        if len(shape) != 2:
            raise ValueError(f"{name}: a matrix layout needs a 2-D tensor, got shape {tuple(shape)}")
        if self.groups < 1 or any(r < 1 for r in self.rows):
            raise ValueError(f"{name}: groups and block rows must be positive, got {self}")
        if self.groups > 1 and not self.rows:
            raise ValueError(f"{name}: {self.groups} groups without rows; say how many rows each matrix has in a group")
        dim = int(self.transposed)
        if self.rows and self.groups * sum(self.rows) != shape[dim]:
            what = "columns" if self.transposed else "rows"
            raise ValueError(
                f"{name}: blocks of {self.groups} x {self.rows} {what} cover {self.groups * sum(self.rows)} {what}, "
                f"but dim {dim} has {shape[dim]}"
            )

    def shapes(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of each matrix of a tensor stored in this shape."""
        m, n = reversed(shape) if self.transposed else shape
        return tuple((self.groups * r, n) for r in self.rows) if self.rows else ((m, n),)

    def views(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The matrices of a tensor as views that can be written: [M, N], or [groups, rows, N] where it has blocks."""
        tensor_MN = tensor.T if self.transposed else tensor
        if not self.rows:
            return [tensor_MN]
        return list(tensor_MN.unflatten(0, (self.groups, sum(self.rows))).split(self.rows, dim=1))

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The matrices of a tensor; views where the layout allows, copies where rows interleave."""
        return [block if block.ndim == 2 else block.reshape(-1, block.shape[2]) for block in self.views(tensor)]

    def join(self, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Inverse of :meth:`split`. Raises ValueError on another number of matrices."""
        if len(matrices) != max(1, len(self.rows)):
            raise ValueError(f"got {len(matrices)} matrices to join, expected {max(1, len(self.rows))} for {self}")
        whole_MN = matrices[0]
        if self.rows:
            n = whole_MN.shape[1]
            blocks = [m.reshape(self.groups, r, n) for m, r in zip(matrices, self.rows, strict=True)]
            whole_MN = torch.cat(blocks, dim=1).reshape(-1, n)
        return whole_MN.T if self.transposed else whole_MN


WHOLE = MatrixLayout()


@dataclass(frozen=True)
class OwnedSpec:
    """One owned parameter: [M, N]; a stack [E, M, N] whose matrices are its E slices; or, with ``flatten``, the weight
    of a convolution [out, in, k, ...] as one matrix [out, in * k * ...]. ``layout`` is of one slice. A ``rider`` has
    any shape, is one piece and holds no matrix."""

    name: str
    shape: tuple[int, ...]
    layout: MatrixLayout = WHOLE
    rider: bool = False
    flatten: bool = False

    def __post_init__(self) -> None:
        if self.rider:
            if 0 in self.shape:
                raise ValueError(f"{self.name}: an owned parameter is not empty, got {self.shape}")
            return
        dims = len(self.shape)
        if dims < 2 or (dims > 3 and not self.flatten) or min(self.shape) < 1:
            raise ValueError(
                f"{self.name}: an owned parameter has 2 or 3 non-empty dimensions, or is a convolution's weight "
                f"(flatten), got {self.shape}"
            )
        self.layout.validate(self.name, self._matrix)

    @property
    def _matrix(self) -> tuple[int, int]:
        """Shape of what a piece holds."""
        if self.flatten:
            return self.shape[0], math.prod(self.shape[1:])
        return self.shape[-2], self.shape[-1]

    def pieces(self) -> tuple[Piece, ...]:
        """The whole parameter, or one piece per expert of a stack."""
        if self.rider:
            return (Piece(self.name, 0, self.shape[0] if self.shape else 1, self.shape, rider=True),)
        if self.flatten or len(self.shape) == 2:
            return (Piece(self.name, 0, self.shape[0], self._matrix, self.layout),)
        return tuple(Piece(self.name, e, e + 1, self._matrix, self.layout) for e in range(self.shape[0]))


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) on dim 0 of one parameter, held by one owner. ``shape`` is what the optimizer sees: 2-D, or a
    rider's own."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    layout: MatrixLayout = WHOLE
    rider: bool = False

    @property
    def key(self) -> str:
        """Unique; keys of one parameter sort by start."""
        return f"{self.name}[{self.start:06d}]"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def matrices(self) -> tuple[tuple[int, int], ...]:
        return () if self.rider else self.layout.shapes(self.shape)


def is_convolution(module: nn.Module) -> bool:
    """Whether the module's weight [out, in, k, ...] is one linear map of a patch, so that it may be flattened. One with
    groups is several maps, and a transposed one has its inputs first: neither is."""
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and module.groups == 1


def stores_inputs_first(module: nn.Module) -> bool:
    """Whether the module's weight is [inputs, outputs], by its structure: its bias has an element for each column, not
    for each row, or it says that its columns are its outputs (``nf``), as the Conv1D of transformers does."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or weight.ndim != 2 or isinstance(module, (nn.Linear, nn.Embedding)):
        return False
    rows, columns = weight.shape
    told = bias is not None and bias.ndim == 1 and bias.numel() == columns != rows
    return told or getattr(module, "nf", None) == columns


def select_names(shapes: Mapping[str, Sequence[int]], pattern: str | re.Pattern[str]) -> list[str]:
    """Names (canonical) that ``re.search`` the pattern, in order. A pattern that matches nothing raises ValueError."""
    regex = re.compile(pattern)
    found = [name for name in shapes if regex.search(name)]
    if not found:
        some = ", ".join(list(shapes)[:4])
        raise ValueError(f"pattern {regex.pattern!r} matches no parameter; names look like: {some}")
    return found


def count_matrices(pieces: Iterable[Piece]) -> int:
    return sum(len(p.matrices()) for p in pieces)
