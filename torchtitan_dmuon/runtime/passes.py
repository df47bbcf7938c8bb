"""The passes of a model: the order of a forward's and of a backward's operations, and how the ranks come to change it.

Decides: what all ranks take as their order, from what each of them asked for. Does not issue anything (`engine.py`).
Keeps invariant 5: what is decided here is the same on every rank, at the same time. Ranks exchange what they saw after
the first step, and later only where one of them has a reason, which costs an element in the reduction of the norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

from .schedule import GatherOrder, Item, Record, ReduceQueue, agreed_sequence, insert
from .unit import Unit
from .wires import Control

_PATIENCE = 8  # forwards in another order than the agreed one, before a rank asks for another agreement


class Passes:
    """``enclosing``: units of the whole model, which are kept from end to end of a pass."""

    def __init__(
        self,
        units: Sequence[Unit],
        enclosing: Sequence[int],
        prefetch: int,
        gather: Callable[[int], None],
        reduce: Callable[[int], None],
        reduces_gradients: Callable[[], bool],
    ) -> None:
        self._units, self._enclosing = units, frozenset(enclosing)
        self.kept = set(enclosing)  # what is not freed before its pass is over
        self.reduces = ReduceQueue(reduce)

        def before(count: int) -> None:
            if reduces_gradients():
                self.reduces.give_up_before(count)

        forward = [u.index for u in units]
        backward = [*enclosing, *(i for i in reversed(forward) if i not in self._enclosing)]
        self.forward = GatherOrder(prefetch, gather, forward)
        self.backward = GatherOrder(prefetch, gather, backward, before, self.reduces.passed)
        self.agreed = False
        self._places: dict[int, int] = {}  # of reduces in a backward, where gradients come later than they naturally do
        self._missing: list[int] = []  # units that the next backward's sequence is to have as well
        self._disorders, self._patience = 0, _PATIENCE

    def declare_marks(self, place: Callable[..., tuple[list[Item], list[Item]]]) -> None:
        """Before the first pass: ``place`` puts marks of FSDP2's operations into the sequences of units."""
        forward, backward = place(self.forward.sequence, self.backward.sequence, self._enclosing)
        self.forward.set_sequence(forward)
        self.backward.set_sequence(backward)

    def follows_units(self, mark: Item) -> bool:
        """Whether a trainable unit comes before the mark in a forward."""
        before = itertools.takewhile(lambda item: item != mark, self.forward.sequence)
        trainable = any(isinstance(item, int) and self._units[item].trainable() for item in before)
        return trainable and mark in self.forward.sequence

    def of(self, in_backward: bool) -> GatherOrder:
        return self.backward if in_backward else self.forward

    @property
    def reduce_order(self) -> list[int]:
        """Units in the reverse of the first forward."""
        return self.forward.units[::-1]

    def forward_ends(self) -> None:
        self._disorders += self.forward.end()

    def backward_begins(self) -> None:
        order = self.backward
        if self._missing:
            sequence = list(order.sequence)
            for index in self._missing:
                insert(sequence, index, self.reduce_order)
            order.set_sequence(sequence)
            self._places = {index: place + len(self._missing) for index, place in self._places.items()}
            self._missing.clear()
        order.begin()
        reduces = [i for i in self.reduce_order if self._units[i].trainable()]
        self.reduces.begin(reduces, {i: self._places.get(i, order.end_of(i)) for i in reduces})

    def keep(self, index: int) -> None:
        """Every rank has found that a pass needs the unit after it has freed it, or did not have it in its sequence."""
        self.kept.add(index)
        if index not in self.backward.sequence and index not in self._missing:
            self._missing.append(index)

    @property
    def wants_agreement(self) -> bool:
        return self._disorders >= self._patience

    def agree(self, control: Control, late: Collection[int]) -> list[int]:
        """Exchange what the ranks asked for and of which units gradients were ``late``; returns those that were on any
        rank, in the order of reduces. A collective.

        The first time, and where a rank found that it often asks in another order, the order is taken from what they
        asked for. Reduces get later places where gradients were ready later.
        """
        every = control.all_gather((self.forward.record, self.backward.record, self.wants_agreement, list(late)))
        forwards, backwards, wishes, lates = zip(*every)
        if any(each for record in forwards for each in record.rounds) and (not self.agreed or any(wishes)):
            self._take_order(forwards, backwards)
        self._disorders = 0
        for record in backwards:
            for index, place in self.backward.places_of(record).items():
                if place > max(self._places.get(index, 0), self.backward.end_of(index)):
                    self._places[index] = place
        return [index for index in self.reduce_order if any(index in each for each in lates)]

    def _take_order(self, forwards: Sequence[Record], backwards: Sequence[Record]) -> None:
        # Each round for itself: what only a later one asked for does not come behind the marks of an earlier one.
        forward, backward = (
            [list(each) for record in records for each in record.rounds] for records in (forwards, backwards)
        )
        seen: set[Item] = {item for each in forward for item in each}
        # A frozen unit that no gradient reaches is not gathered in backward; any other may be needed by one rank alone.
        needed = {u.index for u in self._units if u.trainable() or u.index not in seen}
        self.forward.set_sequence(agreed_sequence(forward, self.forward.sequence, self.forward.units))
        self.backward.set_sequence(agreed_sequence(backward, self.backward.sequence, needed, self._enclosing))
        self._places.clear()
        self._patience *= 2 if self.agreed else 1
        self.agreed = True
