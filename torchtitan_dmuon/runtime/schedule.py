"""The order in which units are gathered and reduced, the same on every rank. Pure: no torch.

Decides: what a request for one unit means for the others. Does not decide how (`engine.py`). Keeps invariant 5: ranks
may skip units, find gradients missing or ready at other times, yet issue the same operations in the same order.

A pass (a forward, or a backward) visits units in a sequence. The first one of each kind is recorded; it must be the
same on all ranks (compared at the first step). From then on a rank that skips a unit still takes part in its gather,
in sequence; and the next units of the sequence are gathered ahead.
"""

from __future__ import annotations

from collections.abc import Callable


class GatherOrder:
    """Turns requests for units into an order of gathers for one kind of pass.

    ``gather(u)`` starts the gather of ``u`` unless it is under way; ``release(u)`` frees a unit nobody asked for.
    """

    def __init__(self, prefetch: int, gather: Callable[[int], None], release: Callable[[int], None]) -> None:
        self._prefetch, self._gather, self._release = prefetch, gather, release
        self.sequence: list[int] = []
        self._position: dict[int, int] = {}
        self._recording = True
        self._cursor = 0  # the first position not yet requested in this pass
        self._active = False

    def begin(self) -> None:
        """A new pass starts. One that failed is not a record."""
        if self._recording:
            self.sequence.clear()
            self._position.clear()
        self._cursor, self._active = 0, True

    def request(self, unit: int) -> None:
        """``unit`` is needed now: gathers skipped ones before it, it, and those prefetched after it."""
        position = self._position.get(unit)
        if self._recording and position is None:
            self._position[unit] = len(self.sequence)
            self.sequence.append(unit)
            position = None
        if position is None or self._recording or not self._active or position < self._cursor:
            self._gather(unit)  # recording, used again, or new since: every rank does the same by itself
            return
        for skipped in self.sequence[self._cursor : position]:
            self._gather(skipped)
            self._release(skipped)
        self._cursor = position + 1
        for ahead in self.sequence[position : self._cursor + self._prefetch]:
            self._gather(ahead)

    def end(self) -> None:
        """The pass is over: take part in what this rank skipped at its end."""
        if self._active and not self._recording:
            for skipped in self.sequence[self._cursor :]:
                self._gather(skipped)
                self._release(skipped)
        if self._active and self.sequence:
            self._recording = False
        self._active = False


class ReduceQueue:
    """Issues reduces in one fixed order, from the head, while ready."""

    def __init__(self, issue: Callable[[int], None]) -> None:
        self._issue = issue
        self.sequence: list[int] = []
        self._ready: set[int] = set()
        self._head = 0

    def set_order(self, sequence: list[int]) -> None:
        self.sequence = sequence

    def ready(self, unit: int) -> None:
        self._ready.add(unit)
        while self._head < len(self.sequence) and self.sequence[self._head] in self._ready:
            self._advance()

    def finish(self) -> None:
        """The backward is over: issue the rest, ready or not, and start anew."""
        while self._head < len(self.sequence):
            self._advance()
        self.reset()

    def reset(self) -> None:
        self._ready.clear()
        self._head = 0

    def _advance(self) -> None:
        self._head += 1  # first: issuing may raise
        self._issue(self.sequence[self._head - 1])
