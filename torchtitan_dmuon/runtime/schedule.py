"""The order in which units are gathered and reduced, the same on every rank. Pure: no torch.

Decides: what a request for one unit means for the others. Does not decide how (`engine.py`). Keeps invariant 5: ranks
may skip units, find gradients missing or ready at other times, yet issue the same operations in the same order.

A pass (a forward, or a backward) visits units in a sequence that holds every unit of that kind of pass. A rank that
skips a unit still takes part in its gather, in sequence; and the next units of the sequence are gathered ahead. The
sequence starts as the declared one and is replaced once by what the first pass of the ranks showed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence


class GatherOrder:
    """Turns requests for units into an order of gathers for one kind of pass.

    ``gather(u)`` starts the gather of ``u`` unless it is under way; ``release(u)`` frees a unit nobody asked for;
    ``declared`` holds every unit.
    """

    def __init__(
        self,
        prefetch: int,
        gather: Callable[[int], None],
        release: Callable[[int], None],
        declared: Sequence[int],
    ) -> None:
        self._prefetch, self._gather, self._release = prefetch, gather, release
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
            self._release(skipped)
        self._cursor = position + 1
        for ahead in self.sequence[position : self._cursor + self._prefetch]:
            self._gather(ahead)

    def end(self) -> None:
        """The pass is over: take part in what this rank skipped at its end."""
        if self._active:
            for skipped in self.sequence[self._cursor :]:
                self._gather(skipped)
                self._release(skipped)
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
