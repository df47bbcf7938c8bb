"""A check for debugging: do all ranks issue the same operations in the same order (invariant 5)?

Decides: what is compared, and when. Off unless the environment has DMUON_DEBUG=1, on every rank or on none. Compares
what was issued, not what was received, once per step, after the reduces; costs two small collectives a step.
"""

from __future__ import annotations

import hashlib
import itertools
import os

from .wires import Control


def is_enabled() -> bool:
    """Whether DMUON_DEBUG asks for the check. ValueError unless it is 1, 0, empty or absent."""
    value = os.environ.get("DMUON_DEBUG", "")
    if value not in ("1", "0", ""):
        raise ValueError(f"DMUON_DEBUG = {value!r} in the environment: must be 1 or 0")
    return value == "1"


class OrderCheck:
    """Keeps (phase, unit) of each operation this rank issues, until :meth:`compare`."""

    def __init__(self, control: Control, rank: int) -> None:
        self._control, self._rank = control, rank
        self._enabled = is_enabled()
        self._issued: list[str] = []
        self._step = 0

    def issue(self, phase: str, unit: str) -> None:
        if self._enabled:
            self._issued.append(f"{phase} of {unit}")

    def compare(self) -> None:
        """A collective if the check is on. Raises RuntimeError, with ranks, step and operation, where orders differ."""
        if not self._enabled:
            return
        mine, self._issued = self._issued, []
        digests = self._control.all_gather(hashlib.sha256("\n".join(mine).encode()).hexdigest())
        step = self._step
        self._step += bool(mine)
        other = next((r for r, digest in enumerate(digests) if digest != digests[0]), None)
        if other is None:
            return
        every = self._control.all_gather(mine if self._rank in (0, other) else None)
        pairs = itertools.zip_longest(every[0], every[other], fillvalue="nothing")
        at, (first, second) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        raise RuntimeError(
            f"ranks 0 and {other} of the data-parallel group issued different operations in step {step}: "
            f"operation {at} is the {first} on rank 0, the {second} on rank {other}. All ranks must use "
            "units in the same order"
        )
