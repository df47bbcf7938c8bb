"""A unit: the owned parameters that are gathered and reduced together, and all memory that belongs to them.

Decides: where bytes live and how long. Does not decide when things happen (`engine.py`, `hooks.py`). Keeps
invariant 3: between steps a rank holds the fp32 masters (and momenta, in the optimizer) of what it owns, and the
compute-dtype copies of what it is a holder of; the gathered weights exist from gather to free only.

Buffers, all in the layout of `topology.UnitLayout`:

    flat      compute dtype, every piece; its storage is empty unless gathered; whole weights are views of it
    held      compute dtype, the ranges this rank is a holder of
    master    float32, the ranges this rank owns
    contrib   reduce dtype, every piece: this rank's gradients, from backward to the end of level 1
    partial   reduce dtype, the ranges this rank collects: sums inside each node, until level 2 takes them
    grad      float32, the ranges this rank owns: from the last reduce to the step
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from ..matrices import Piece
from ..muon import set_layout
from ..topology import SLOT_ELEMENTS, Routes, UnitLayout
from .lanes import Ticket
from .parameter import OwnedParameter

Ranges = dict[tuple[int, int], torch.Tensor]


def slice_of(ranges: Ranges, start: int, stop: int) -> torch.Tensor:
    """The view [start, stop) of the range that contains it."""
    for (low, high), tensor in ranges.items():
        if low <= start and stop <= high:
            return tensor[start - low : stop - low]
    raise KeyError(f"no range holds elements {start} to {stop}")


class Unit:
    """Memory and gather state of one unit on one rank."""

    def __init__(
        self,
        index: int,
        name: str,
        params: list[OwnedParameter],
        layout: UnitLayout,
        rank: int,
        device: torch.device,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> None:
        self.index, self.name, self.params, self.layout, self.rank = index, name, params, layout, rank
        self.device, self.compute_dtype, self.reduce_dtype = device, compute_dtype, reduce_dtype
        self.pieces: dict[str, Piece] = {p.key: p for param in params for p in param.pieces}

        # A cell of one rank keeps everything: its held copy is the flat buffer itself, never freed.
        self.resident = len(layout.topology.cell(rank)) == 1
        self.flat = torch.empty(layout.numel, dtype=compute_dtype, device=device)
        self._flat_bytes = self.flat.untyped_storage().nbytes()
        views = self.flat.data  # a version counter of its own: filling `flat` must not look like an in-place update
        for param in params:
            if param.whole:
                value = self._piece_view(views, param.pieces[0]).view(param.spec.shape)
            else:
                value = torch.empty(param.spec.shape, dtype=compute_dtype, device=device)
            param.values = value
            param.weight = nn.Parameter(value, requires_grad=param.placeholder.requires_grad)
            if not param.whole:
                param.weight.untyped_storage().resize_(0)
        if not self.resident:
            self.flat.untyped_storage().resize_(0)

        self.held: Ranges = {
            r: self.flat[r[0] : r[1]] if self.resident else self._new(r, compute_dtype) for r in layout.held(rank)
        }
        self.master: Ranges = {r: self._new(r, torch.float32) for r in layout.mastered(rank)}
        # Masters and gradients by piece, in a fixed order; `master_of` is what an optimizer is given.
        self.owned = [p for key, p in sorted(self.pieces.items()) if self._is_mastered(key)]
        self.master_of = {p.key: nn.Parameter(self.piece_of(self.master, p)) for p in self.owned}
        for piece in self.owned:
            if not piece.rider:
                set_layout(self.master_of[piece.key], piece.layout)
        self.rooted = {p.key for p in self.owned if self._in(layout.rooted(rank), p.key)}

        self.partial: dict[int, Ranges] = {}  # node -> sums inside that node, over micro-batches, before level 2
        self.grad: Ranges = {}
        self._written: list[int] = []  # versions of `grad`, after the runtime's last write
        self.gathered = False
        self.gathering: Ticket | None = None
        self.published: Ticket | None = None
        self.reducing: list[Ticket] = []
        self.early: Ticket | None = None  # work on the complete gradient before a step; its result is scratch

    @functools.cached_property
    def routes(self) -> Routes:
        """This rank's messages."""
        return self.layout.routes(self.rank)

    # ---- slices ----

    def _new(self, span: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(span[1] - span[0], dtype=dtype, device=self.device)

    def _span(self, key: str) -> tuple[int, int]:
        start = self.layout.slots[key]
        return start, start + self.layout.sizes[key]

    def _slot(self, key: str) -> tuple[int, int]:
        """The span and the spare elements behind it."""
        start, stop = self._span(key)
        return start, start + (stop - start + SLOT_ELEMENTS) // SLOT_ELEMENTS * SLOT_ELEMENTS

    def _in(self, ranges: tuple[tuple[int, int], ...], key: str) -> bool:
        start, stop = self._span(key)
        return any(low <= start and stop <= high for low, high in ranges)

    def _is_mastered(self, key: str) -> bool:
        return self._in(tuple(self.master), key)

    def _piece_view(self, flat: torch.Tensor, piece: Piece) -> torch.Tensor:
        start, stop = self._span(piece.key)
        return flat[start:stop].view(piece.shape)

    def piece_of(self, ranges: Ranges, piece: Piece) -> torch.Tensor:
        """The view of a piece, [M, N] or a rider's shape, in a set of ranges."""
        return slice_of(ranges, *self._span(piece.key)).view(piece.shape)

    # ---- gathered weights ----

    def allocate(self) -> None:
        if not self.resident:
            self.flat.untyped_storage().resize_(self._flat_bytes)

    def fill_held(self) -> None:
        """Own held ranges into the flat buffer; the rest arrives by messages."""
        if not self.resident:
            for (start, stop), tensor in self.held.items():
                self.flat[start:stop].copy_(tensor)

    def expose(self) -> None:
        """After the gather: copy stacks in and put the weights into the modules."""
        for param in self.params:
            if not param.whole:
                data = param.weight.data
                data.untyped_storage().resize_(data.numel() * data.element_size())
                for piece in param.pieces:
                    data[piece.start : piece.stop].copy_(self._piece_view(self.flat, piece))
            param.expose()
        self.gathered = True

    def free(self) -> None:
        """Take the weights out of the modules and release them. The caller has waited for the gather."""
        for param in self.params:
            param.hide()
            if not param.whole:
                param.weight.untyped_storage().resize_(0)
        if not self.resident:
            self.flat.untyped_storage().resize_(0)
        self.gathered, self.gathering = False, None

    # ---- gradients ----

    def trainable(self) -> list[OwnedParameter]:
        return [p for p in self.params if p.requires_grad]

    def has_local_gradient(self) -> bool:
        """Whether a backward left a gradient of this rank alone."""
        return any(param.weight.grad is not None for param in self.params)

    def take_gradients(self) -> torch.Tensor:
        """This rank's gradients in the full fixed layout, a 1 after each piece that has one. Drops the originals."""
        contrib = torch.empty(self.layout.numel, dtype=self.reduce_dtype, device=self.device)
        for param in self.params:
            grad = param.weight.grad
            if grad is not None and grad.layout != torch.strided:
                raise RuntimeError(
                    f"{param.name}: its gradient is {grad.layout}, and owned weights need dense ones; build its module "
                    "without sparse=True, or leave it to another optimizer"
                )
            for piece in param.pieces:
                start, stop = self._span(piece.key)
                end = self._slot(piece.key)[1]
                if grad is None:
                    contrib[start:end].zero_()
                    continue
                rows = grad if param.whole else grad[piece.start : piece.stop]
                contrib[start:stop].view(rows.shape).copy_(rows)
                contrib[stop:end].zero_()
                contrib[stop] = 1.0
            param.weight.grad = None
        return contrib

    def drop_scratch(self) -> None:
        if self.early is not None:
            self.early.wait()
            self.early = None

    def drop_gradients(self) -> None:
        """Forget reduced and partial gradients; in-flight reduces have been waited for."""
        self.partial.clear()
        self.grad.clear()
        self.reducing.clear()
        for parameter in self.master_of.values():
            parameter.grad = None

    def drop_gradient_of(self, param: OwnedParameter) -> None:
        """Forget the reduced and partial gradient of one parameter, as if no rank had used it."""
        for piece in param.pieces:
            start, stop = self._slot(piece.key)
            for ranges in (self.grad, *self.partial.values()):
                for (low, high), tensor in ranges.items():
                    if low <= start < high:
                        tensor[start - low : stop - low].zero_()

    def used_flags(self) -> list[torch.Tensor]:
        """One element per owned piece: how many ranks and micro-batches used it since the last step."""
        return [slice_of(self.grad, stop, stop + 1) for _, stop in (self._span(p.key) for p in self.owned)]

    def attach_gradients(self) -> None:
        """Give each owned piece its reduced gradient: zeros if no rank used it."""
        for piece in self.owned:
            self.master_of[piece.key].grad = self.piece_of(self.grad, piece)

    def note_gradients(self) -> None:
        """The runtime has just written the gradients: what others write into them from here on is seen."""
        self._written = [t._version for t in self.grad.values()]

    def gradients_are_ours(self) -> bool:
        """Whether nobody has written or replaced a gradient since `note_gradients`. A missing one is none of ours."""
        pieces = ((self.master_of[p.key].grad, self.piece_of(self.grad, p)) for p in self.owned)
        return self._written == [t._version for t in self.grad.values()] and all(
            grad is None or grad.data_ptr() == ours.data_ptr() for grad, ours in pieces
        )

    def withhold_unused(self, used: list[bool]) -> None:
        """Take the gradient away again from each owned piece that no rank used."""
        for piece, flag in zip(self.owned, used, strict=True):
            if not flag:
                self.master_of[piece.key].grad = None

    # ---- publish ----

    def refresh_held(self) -> None:
        """Masters into this rank's held copy, in compute dtype; the other holders get it by messages."""
        for (start, stop), tensor in self.master.items():
            slice_of(self.held, start, stop).copy_(tensor)
