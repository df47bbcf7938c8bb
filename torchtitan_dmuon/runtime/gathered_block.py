"""`with owned.gathered():`, all owned weights in their modules, as a place to work in.

Decides: what a change of a shown weight means at the end of a block, and what nested blocks mean. While a block is open
the engine frees no unit, and a forward needs no message, so ranks may run as many forwards as they like, or none.

The weights shown are copies of the masters in compute dtype. In a block that declares it (``write=True``) each element
that was changed goes to the master at the end, on its owner, and all other elements keep their float32 value. Every
rank must have made the same change, declared or not: fingerprints of the weights are compared, so a change on one rank
alone is found wherever the owner is. All ranks raise alike, before a master has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from .engine import Engine
from .parameter import OwnedParameter
from .unit import Unit

_BITS = {2: torch.int16, 4: torch.int32}
_CHUNK = 2**20  # elements of a weight that a fingerprint reads at a time


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A number (0-dim, int64) of all bits of a tensor and their places."""
    factors = torch.arange(1, min(tensor.numel(), _CHUNK) + 1, device=tensor.device)
    factors = factors.mul_(-7046029254386353131).bitwise_or_(1)  # odd, with all bits in use; overflow wraps
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in _bits(tensor).split(_CHUNK):
        total = total * 6364136223846793005 + (chunk.long() * factors[: chunk.numel()]).sum()
    return total


class GatheredBlocks:
    """The open blocks of one model."""

    def __init__(self, engine: Engine, params: Iterable[tuple[Unit, OwnedParameter]]) -> None:
        self.engine, self.params = engine, list(params)
        self.writes = 0  # open blocks that declared changes

    @contextlib.contextmanager
    def opened(self, write: bool) -> Iterator[None]:
        engine = self.engine
        outermost = not engine.kept
        if outermost:
            engine.gather_all()
        elif write and not self.writes:  # a change in the outer block was not declared
            self._require_unchanged()
        engine.kept += 1
        self.writes += write
        try:
            with torch.no_grad():
                yield
                if write:
                    self._write()
                elif outermost:
                    self._require_unchanged()
        except BaseException:
            engine.stale = True  # a rank that is alone in its cell keeps no other copy than the one shown
            raise
        finally:
            engine.kept -= 1
            self.writes -= write
            if outermost:
                engine.free_idle()

    def refuse_pending(self, operation: str) -> None:
        """RuntimeError if changes may not have reached the masters yet."""
        if self.writes:
            raise RuntimeError(
                f"{operation} inside `with owned.gathered(write=True):` would not have what was changed in it, which "
                "goes to the masters at the end. Call it after the block"
            )

    def _require_unchanged(self) -> None:
        if changed := self._changed():
            raise RuntimeError(
                f"{changed[0].name} was changed inside `with owned.gathered():`, which shows copies that are dropped "
                "after it. Declare it, `with owned.gathered(write=True):`, or change the masters on all ranks: "
                "owned.fill(name, value_of) or model.load_state_dict"
            )

    def _write(self) -> None:
        """Changed elements into the masters."""
        changed = set(self._changed())
        for unit, param in self.params:
            for shown, master in self._owned_pieces(unit, param) if param in changed else ():
                new = (_bits(shown) != _bits(master.to(shown.dtype))).view(master.shape)
                master.copy_(torch.where(new, shown.reshape(master.shape).to(master.dtype), master))
        if changed:
            self.engine.stale = True

    def _changed(self) -> list[OwnedParameter]:
        """The parameters whose weight some rank shows otherwise than its master, on every rank the same. RuntimeError
        where ranks show different ones, or a weight is no longer in its module. A collective."""
        every = self.engine.control.all_gather(self._observed())
        changed = []
        for position, (_, param) in enumerate(self.params):
            found = [each[position] for each in every]
            if any(replaced for _, _, replaced in found):
                raise RuntimeError(
                    f"{param.name} was replaced or removed in its module inside `with owned.gathered():`. Change its "
                    "values in place, in a block with write=True"
                )
            other = next((r for r, (number, _, _) in enumerate(found) if number != found[0][0]), None)
            if other is not None:
                raise RuntimeError(
                    f"{param.name} was changed inside `with owned.gathered():` and is not the same on ranks 0 and "
                    f"{other} of the data-parallel group. No change of this block is kept: make the same one on all "
                    "ranks"
                )
            if any(differs for _, differs, _ in found):
                changed.append(param)
        return changed

    def _observed(self) -> list[tuple[int, bool, bool]]:
        """Of each parameter its fingerprint, whether it differs from a master of this rank, whether it was replaced."""
        replaced = [not param.take_back_data() or param.replaced() for _, param in self.params]
        numbers = torch.stack([fingerprint(param.weight) for _, param in self.params]).tolist()
        return [
            (
                number,
                any(not torch.equal(_bits(s), _bits(m.to(s.dtype))) for s, m in self._owned_pieces(unit, param)),
                gone,
            )
            for number, gone, (unit, param) in zip(numbers, replaced, self.params, strict=True)
        ]

    def _owned_pieces(self, unit: Unit, param: OwnedParameter) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is shown, and the master, of the pieces that this rank owns."""
        for piece in param.pieces:
            if piece.key in unit.master_of:
                shown = param.weight if param.whole else param.weight[piece.start : piece.stop]
                yield shown.detach(), unit.master_of[piece.key].detach()
