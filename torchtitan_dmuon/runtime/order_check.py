"""A check for debugging: do all ranks issue the same operations in the same order (invariant 5)?

Decides: what is compared, and when. Off unless the environment has DMUON_DEBUG=1, on every rank or on none. Each
operation is compared before it is issued, so that no two different ones meet; a rank that does not come to it in time
is named. Costs a round trip of all ranks over the store for each operation.
"""

from __future__ import annotations

import os

from .board import Board, Missing


def is_enabled() -> bool:
    """Whether DMUON_DEBUG asks for the check. ValueError unless it is 1, 0, empty or absent."""
    value = os.environ.get("DMUON_DEBUG", "")
    if value not in ("1", "0", ""):
        raise ValueError(f"DMUON_DEBUG = {value!r} in the environment: must be 1 or 0")
    return value == "1"


class OrderCheck:
    """Counts steps, and compares (step, phase, unit) of each operation that this rank is about to issue."""

    def __init__(self, board: Board | None) -> None:
        self._board = board if is_enabled() else None
        self.step = self._issued = 0

    def issue(self, phase: str, unit: str) -> None:
        """With the check on, a collective. RuntimeError on every rank, with ranks, step and operations, where they
        differ, or where a rank does not come to its next operation in time."""
        at, self._issued = self._issued, self._issued + 1
        if self._board is None:
            return
        mine = f"{self.step}|{at}|{phase} of {unit}"
        try:
            words = self._board.exchange(mine)
        except Missing as missing:
            last = self._board.last_words()
            came = ", ".join(f"the {_words(last[r])} on rank {r}" for r in missing.ranks)
            raise RuntimeError(
                f"step {self.step}, operation {at}: this rank is about to issue the {phase} of {unit}, and waited in "
                f"vain for ranks {', '.join(map(str, missing.ranks))} of the data-parallel group. The last issued "
                f"there: {came}. They do not run the same pass, or wait elsewhere, as for an operation of FSDP2"
            ) from missing
        other = next((r for r, word in enumerate(words) if word != words[0]), None)
        if other is not None:
            step, number, first = words[0].split("|", 2)
            raise RuntimeError(
                f"ranks 0 and {other} of the data-parallel group issued different operations in step {step}: "
                f"operation {number} is the {first} on rank 0, the {_words(words[other])} on rank {other}. All ranks "
                "must run the same passes"
            )

    def step_ends(self) -> None:
        """What is issued from here on belongs to the next step."""
        self.step += bool(self._issued)
        self._issued = 0


def _words(posted: str) -> str:
    return posted.split("|", 2)[-1]
