"""What an update of a piece costs, in FLOPs of the Newton-Schulz configured, or in time where it was measured. Pure.

Decides: the cost of a piece, and what a file of measured costs may hold. Does not decide who owns what for it
(`ownership.py`). Keeps: costs are integers, so that sums do not depend on their order: FLOP equivalents, or picoseconds
where they were measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .matrices import Piece

# Memory traffic of the update around NS, per element: gradient read (4), momentum and master read and written (16),
# NS input written and output read in bf16 (4), published copy written (2).
ELEMENTWISE_BYTES = 26
# One byte of memory traffic in FLOPs: an accelerator that sustains about 550 TFLOP/s in bf16 moves about 2.7 TB/s.
FLOPS_PER_BYTE = 200


def standard_flops(m: int, n: int) -> int:
    """FLOPs of five standard NS steps on [m, n]: 5(4 s^2 l + 2 s^3), s the smaller and l the larger side."""
    s, l = min(m, n), max(m, n)  # noqa: E741
    return 5 * (4 * s * s * l + 2 * s**3)


@dataclass(frozen=True)
class CostModel:
    """Cost of updating a piece: the sum over its matrices of NS FLOPs plus elementwise traffic as FLOP equivalents.

    With ``measured`` (seconds of one matrix's whole update by "MxN", either orientation) the cost is that time instead,
    in picoseconds, and a shape that was not measured is an error. ``forms``: the Newton-Schulz form that was measured
    to be the faster one, by the same shapes; what the update then runs.
    """

    flops: Callable[[int, int], int] = standard_flops
    elementwise_bytes: int = ELEMENTWISE_BYTES
    flops_per_byte: int = FLOPS_PER_BYTE
    measured: Mapping[str, float] | None = None
    forms: Mapping[str, str] = field(default_factory=dict, hash=False)
    source: str = ""  # where `measured` came from, for messages; not part of the digest

    @classmethod
    def from_file(cls, path: str | Path) -> CostModel:
        """Read a JSON object {"MxN": seconds}, "forms" in it too ({"MxN": form}). ValueError on any other content."""
        expected = f'cost_file {path}: expected a JSON object {{"MxN": seconds}}'
        try:
            table = json.loads(Path(path).read_text())
        except json.JSONDecodeError as e:
            raise ValueError(f"{expected}, got invalid JSON ({e})") from e
        if not isinstance(table, dict) or not table:
            raise ValueError(f"{expected}, got {table!r:.60}")
        forms = table.pop("forms", {})
        if not isinstance(forms, dict) or not all(form in ("standard", "gram") for form in forms.values()):
            raise ValueError(
                f'cost_file {path}: forms must be an object {{"MxN": "standard" or "gram"}}, got {forms!r:.60}'
            )
        if unknown := forms.keys() - table.keys():
            raise ValueError(f"cost_file {path}: forms has {min(unknown)}, which was not measured")
        for shape, seconds in table.items():
            sides = shape.split("x")
            is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
            if len(sides) != 2 or not all(s.isdecimal() and int(s) > 0 for s in sides):
                raise ValueError(f'cost_file {path}: key {shape!r} is not of the form "MxN"')
            if not is_number or not 1e-12 <= seconds < float("inf"):
                raise ValueError(f"cost_file {path}: {shape} must be positive seconds, got {seconds!r}")
        return cls(measured=table, forms=forms, source=str(path))

    def cost(self, piece: Piece) -> int:
        """Cost of one update of the piece: FLOP equivalents, or picoseconds with measured costs. A rider has none."""
        if piece.rider:
            return 0
        if self.measured is None:
            flops = sum(self.flops(m, n) for m, n in piece.matrices())
            return int(flops) + self.elementwise_bytes * self.flops_per_byte * piece.numel
        total = 0
        for m, n in piece.matrices():
            seconds = self.measured.get(f"{m}x{n}", self.measured.get(f"{n}x{m}"))
            if seconds is None:
                raise ValueError(
                    f"{piece.name}: cost_file {self.source} has no entry {m}x{n} (nor {n}x{m}); "
                    "calibrate again for this model"
                )
            total += round(seconds * 1e12)
        return total

    def describe(self) -> dict[str, Any]:
        """What the digest keeps of the model; the FLOP formula itself enters through the costs."""
        if self.measured is None:
            return {
                "unit": "flop",
                "elementwise_bytes": self.elementwise_bytes,
                "flops_per_byte": self.flops_per_byte,
                "cost_file": None,
            }
        content = dict(self.measured) | ({"forms": dict(self.forms)} if self.forms else {})
        return {"unit": "picosecond", "cost_file": digest_of(content)}


def digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
