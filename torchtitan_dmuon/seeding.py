"""Seeds of the random streams that initial weights are drawn from.

Decides: which stream a matrix is drawn from, as a pure function of (seed, parameter name, matrix index). Does not draw
anything. Keeps DESIGN invariant 7: nothing here knows a rank, a mesh or a plan, so neither can the weights.
"""

from __future__ import annotations

import hashlib


def stream_seed(seed: int, name: str, index: int = 0) -> int:
    """A seed in [0, 2**63) for matrix ``index`` of parameter ``name`` (canonical), from the run's ``seed``.

    Equal on every machine and in every process: sha256 of the three, not Python's ``hash``.
    """
    digest = hashlib.sha256(f"{seed}\n{name}\n{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
