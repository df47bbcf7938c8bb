"""The order in which units are gathered and reduced, the same on every rank. Pure: no torch.

Decides: what a request for one unit means for the others. Does not decide how (`engine.py`). Keeps invariant 5: ranks
may skip units, find gradients missing or ready at other times, yet issue the same operations in the same order.

A pass (a forward, or a backward) visits units in a sequence that holds every unit of that kind of pass. A rank that
skips a unit still takes part in its gather, in sequence; and the next units of the sequence are gathered ahead. The
sequence starts as the declared one and is replaced once by what the first pass of the ranks showed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence


class GatherOrder:
    """Turns requests for units into an order of gathers for one kind of pass.

    ``gather(u)`` starts the gather of ``u`` unless it is under way; ``skip(u)`` is told of a unit that nobody
    asked for; ``declared`` holds every unit.
    """

    def __init__(
        self,
        prefetch: int,
        gather: Callable[[int], None],
        skip: Callable[[int], None],
        declared: Sequence[int],
    ) -> None:
        self._prefetch, self._gather, self._skip = prefetch, gather, skip
        self.observed: list[int] = []  # units of the first complete pass, as this rank asked for them
        self._observing = True
        self._cursor = 0  # the first position not yet requested in this pass
        self._active = False
        self.set_sequence(declared)

    def set_sequence(self, sequence: Sequence[int]) -> None:
        """The same on every rank, between passes."""
        self.sequence = list(sequence)
        self._position = {unit: i for i, unit in enumerate(self.sequence)}

    def begin(self) -> None:
        """A new pass starts. One that failed is not a record."""
        if self._observing:
            self.observed.clear()
        self._cursor, self._active = 0, True

    def request(self, unit: int) -> None:
        """``unit`` is needed now: gathers skipped ones before it, it, and those prefetched after it."""
        if self._observing and self._active and unit not in self.observed:
            self.observed.append(unit)
        position = self._position.get(unit)
        if position is None or not self._active or position < self._cursor:
            self._gather(unit)  # used again, or outside a pass: every rank does the same by itself
            return
        for skipped in self.sequence[self._cursor : position]:
            self._gather(skipped)
            self._skip(skipped)
        self._cursor = position + 1
        for ahead in self.sequence[position : self._cursor + self._prefetch]:
            self._gather(ahead)

    def end(self) -> None:
        """The pass is over: take part in what this rank skipped at its end."""
        if self._active:
            for skipped in self.sequence[self._cursor :]:
                self._gather(skipped)
                self._skip(skipped)
            if self.observed:
                self._observing = False
        self._active = False


def agreed_sequence(observed: Sequence[Sequence[int]], declared: Sequence[int], kept: Collection[int]) -> list[int]:
    """One sequence from what each rank saw in its first pass: the longest (of several, the lowest rank's), then the
    units only others saw, then of those nobody saw the ``kept`` ones, both as declared."""
    longest = max(observed, key=len)  # the first of equals
    seen = {unit for each in observed for unit in each}
    missed = [u for u in declared if u in seen and u not in longest]
    return [*longest, *missed, *(u for u in declared if u not in seen and u in kept)]


class ReduceQueue:
    """Issues reduces in one fixed order, from the head, while ready; each between the same two gathers on every rank.

    A unit's reduce belongs behind the gathers that were asked for with the unit, and before any further one. A rank
    that skips the unit waits for those gathers, though its reduce is ready before.
    """

    def __init__(self, issue: Callable[[int], None]) -> None:
        self._issue = issue
        self.begin([], [], 0)

    def begin(self, reduces: Sequence[int], gathers: Sequence[int], prefetch: int) -> None:
        """A backward begins, which reduces and gathers units in these orders, the same on every rank."""
        self.sequence = list(reduces)
        self._position = {unit: i for i, unit in enumerate(gathers)}
        after = (min(self._position.get(u, 0) + 1 + prefetch, len(gathers)) for u in reduces)
        self._after = list(itertools.accumulate(after, max))  # how many gathers come before each reduce
        self._ready: set[int] = set()
        self._gathers = self._head = 0

    def gathered(self, unit: int) -> None:
        """The gather of ``unit`` has been issued, or was not necessary."""
        self._gathers = max(self._gathers, self._position.get(unit, -1) + 1)
        self._advance()

    def awaits(self, unit: int) -> bool:
        return unit in self.sequence and unit not in self._ready

    def ready(self, units: Collection[int]) -> None:
        """No further gradient of ``units`` will come."""
        self._ready.update(units)
        self._advance()

    def finish(self) -> None:
        """The backward is over: issue the rest, ready or not, and forget it."""
        self._ready.update(self.sequence)
        self._gathers = len(self._position)
        self._advance()
        self.reset()

    def reset(self) -> None:
        self.begin([], [], 0)

    def _advance(self) -> None:
        while self._head < len(self.sequence):
            unit = self.sequence[self._head]
            if unit not in self._ready or self._after[self._head] > self._gathers:
                return
            self._head += 1  # first: issuing may raise
            self._issue(unit)
