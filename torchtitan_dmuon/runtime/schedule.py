"""The order in which units are gathered and reduced, the same on every rank. Pure: no torch.

Decides: what a request for one unit means for the others. Does not decide how (`engine.py`). Keeps invariant 5: ranks
may skip units, ask for them in other orders, find gradients missing or ready at other times, yet issue the same
operations in the same order.

A pass (a forward, or a backward) has a sequence of items, the same on every rank: each unit once, and marks, which
stand for places where FSDP2 issues operations of its own. What a rank asks for takes it along the sequence and never
back: it issues every gather up to there, needed or not, and a unit gathered on the way stays until this rank has used
it or the pass is over. So a pass has each gather once, whatever a rank asks for. Reduces have places between these
operations; what is not ready there is left out, and follows later (`engine.py`). The sequence starts as the declared
one and is replaced by what the first pass of the ranks showed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

Item = int | tuple[Any, ...]  # a unit, or a mark


@dataclasses.dataclass
class Record:
    """What a rank asked for in a pass, in each of its rounds, and where it was when a unit's gradients were ready: the
    round, and how many items it had asked for in it."""

    rounds: list[dict[Item, None]] = dataclasses.field(default_factory=lambda: [{}])
    ready: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)


class GatherOrder:
    """Turns requests for units into an order of gathers for one kind of pass.

    ``gather(u)`` starts the gather of ``u`` unless it is under way; ``before(n)`` and ``after(n, issued)`` are told of
    each gather and mark, with how many of this pass there have been; a mark's operation is yet to be issued.
    """

    def __init__(
        self,
        prefetch: int,
        gather: Callable[[int], None],
        declared: Sequence[Item],
        before: Callable[[int], None] = lambda _count: None,
        after: Callable[[int, bool], None] = lambda _count, _issued: None,
    ) -> None:
        self._prefetch, self._gather, self._before, self._after = prefetch, gather, before, after
        self.active = False
        self.record = Record()  # of the pass that asked for most
        self._now = Record()
        self._disordered = False
        self._visits: dict[Item, int] = {}
        self._base = self._cursor = 0
        self.set_sequence(declared)

    def set_sequence(self, sequence: Sequence[Item]) -> None:
        """The same on every rank, between passes."""
        self.sequence = list(sequence)
        self._entries: list[Item] = []
        self._end_of: dict[Item, int] = {}
        units = self.units
        position = ahead = 0
        for item in sequence:
            if isinstance(item, int):
                position += 1
                self._entries += units[ahead : position + self._prefetch]
                ahead = max(ahead, min(position + self._prefetch, len(units)))
            else:
                self._entries.append(item)
            self._end_of[item] = len(self._entries)

    @property
    def units(self) -> list[int]:
        return [item for item in self.sequence if isinstance(item, int)]

    def end_of(self, item: Item) -> int:
        """How many operations and marks come before the pass is beyond the request for ``item``."""
        return self._end_of.get(item, 0)

    def begin(self) -> None:
        """A new pass starts. One that was left in the middle is completed first: other ranks may have been further."""
        self.end()
        self._now, self._base, self.active = Record(), 0, True
        self._disordered = False
        self._restart()

    def begin_round(self) -> None:
        """The pass goes through the sequence once more, as a backward of several forwards does."""
        self._advance(len(self._entries))
        self._base += len(self._entries)
        self._now.rounds.append({})
        self._restart()

    def _restart(self) -> None:
        self._cursor = self._furthest = 0
        self._visits.clear()

    def request(self, item: Item) -> None:
        """``item`` comes now: issues what precedes it, it, and the gathers that are prefetched with it."""
        if not self.active:
            return
        end = self.end_of(item)
        if item not in self._now.rounds[-1]:
            self._now.rounds[-1][item] = None
            self._disordered |= end < self._furthest
            self._furthest = max(self._furthest, end)
        self._advance(end)

    def mark(self, kind: str, module: int) -> None:
        """FSDP2 is about to issue an operation of a module; the items of several visits in one round differ."""
        visit = self._visits[kind, module] = self._visits.get((kind, module), -1) + 1
        self.request((kind, module, visit))

    def end(self) -> bool:
        """The pass is over: take part in what this rank skipped at its end. Whether it asked in another order."""
        if not self.active:
            return False
        self._advance(len(self._entries))
        self.active = False
        if len(self._now.rounds[0]) >= len(self.record.rounds[0]):
            self.record = self._now
        return self._disordered

    def note_ready(self, unit: int) -> None:
        """The unit's gradients are complete now."""
        self._now.ready[unit] = len(self._now.rounds) - 1, len(self._now.rounds[-1])

    def note_late(self, unit: int) -> None:
        """They came after the unit's reduce. What this pass showed matters more than what a longer one did."""
        self._now.ready.setdefault(unit, (len(self._now.rounds) - 1, len(self._now.rounds[-1])))
        self.record = self._now

    def _advance(self, stop: int) -> None:
        while self._cursor < stop:
            entry, count = self._entries[self._cursor], self._base + self._cursor
            self._before(count)
            self._cursor += 1  # first: issuing may raise
            if isinstance(entry, int):
                self._gather(entry)
            self._after(count + 1, isinstance(entry, int))

    def places_of(self, record: Record) -> dict[int, int]:
        """How many operations and marks come before a rank with that record has a unit's gradients."""
        places = {}
        for unit, (turn, number) in record.ready.items():
            asked = itertools.islice(record.rounds[turn], number)
            places[unit] = turn * len(self._entries) + max(map(self.end_of, asked), default=0)
        return places


def insert(sequence: list[Item], item: Item, declared: Sequence[Item]) -> None:
    """Put an item behind the last of those that are declared before it and are there; in front if there is none."""
    earlier = set(itertools.takewhile(lambda other: other != item, declared))
    at = max((i + 1 for i, other in enumerate(sequence) if other in earlier), default=0)
    sequence.insert(at, item)


def agreed_sequence(
    observed: Sequence[Sequence[Item]], declared: Sequence[Item], kept: Collection[int], first: Collection[int] = ()
) -> list[Item]:
    """One sequence from what each rank asked for in a pass.

    Units come as the longest of the ranks asked (of several, the lowest); those that only others asked for, and of
    those that nobody did the ``kept`` ones, by their declared neighbours. A unit precedes each mark before which any
    rank asked for it: there every rank waits for the others. ``first`` precede everything.
    """
    units = [[i for i in each if isinstance(i, int)] for each in observed]
    order: list[Item] = [*max(units, key=len)]  # the first of equals
    seen = {u for each in units for u in each}
    for unit in declared:
        if isinstance(unit, int) and unit not in order and (unit in seen or unit in kept):
            insert(order, unit, declared)
    order.sort(key=lambda u: u not in first)  # stable
    visited = max(([i for i in each if not isinstance(i, int)] for each in observed), key=len)
    marks: list[Item] = list(visited)
    declared_marks: list[Item] = [i for i in declared if not isinstance(i, int)]
    for mark in declared_marks:
        if mark not in marks:
            insert(marks, mark, declared_marks)
    number = {mark: n for n, mark in enumerate(marks)}
    before: dict[Item, int] = dict.fromkeys(order, len(marks))
    # Where nobody has been, as declared.
    unseen, unvisited = [i for i in declared if i not in seen], [i for i in declared if i not in visited]
    for each in [*observed, unseen, unvisited]:
        limit = len(marks)
        for item in reversed(each):
            if isinstance(item, int):
                before[item] = min(before.get(item, limit), limit)
            else:
                limit = min(limit, number.get(item, limit))
    before.update(dict.fromkeys(first, -1))
    sequence: list[Item] = []
    for n in range(-1, len(marks) + 1):
        sequence += [u for u in order if before[u] == n]
        sequence += marks[n : n + 1] if n >= 0 else []
    return sequence


class ReduceQueue:
    """Issues reduces in one fixed order, each at its place among the gathers and marks of a backward.

    A reduce is not issued before its place, and not after the next operation: what is not ready then is not waited for.
    """

    def __init__(self, issue: Callable[[int], None]) -> None:
        self._issue = issue
        self.reset()

    def begin(self, reduces: Sequence[int], places: Mapping[int, int]) -> None:
        """A backward begins, which reduces units in this order, the same on every rank; ``places``: how many gathers
        and marks come before each at least."""
        self.sequence = list(reduces)
        self._place = list(itertools.accumulate((places[u] for u in reduces), max))
        self._ready: set[int] = set()
        self._count = self._head = 0

    def passed(self, count: int, issued: bool = True) -> None:
        """This many gathers and marks have come; the operation of the last is ``issued``, or about to be."""
        self._count = max(self._count, count)
        if issued:
            self._advance(lambda unit: unit in self._ready)

    def give_up_before(self, count: int) -> None:
        """One more than ``count`` is about to be: what belongs before it goes, ready or not."""
        self._count = max(self._count, count)
        self._advance(lambda _unit: True)

    def awaits(self, unit: int) -> bool:
        return unit in self.sequence[self._head :] and unit not in self._ready

    def is_last(self, unit: int) -> bool:
        """Whether the unit is the last that this backward reduces."""
        return unit in self.sequence[-1:]

    def ready(self, units: Collection[int]) -> None:
        """No further gradient of ``units`` is expected."""
        self._ready.update(units)
        self.passed(0)

    def finish(self) -> None:
        """The backward is over: issue the rest, ready or not, and forget it."""
        self.give_up_before(max(self._place, default=0))
        self.reset()

    def reset(self) -> None:
        self.begin([], {})

    def _advance(self, may_go: Callable[[int], bool]) -> None:
        while self._head < len(self.sequence):
            unit = self.sequence[self._head]
            if self._place[self._head] > self._count or not may_go(unit):
                return
            self._head += 1  # first: issuing may raise
            self._issue(unit)
