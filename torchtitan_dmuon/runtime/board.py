"""A board on which all ranks of a data-parallel group post and read words, beside every process group.

Decides: how ranks compare what they are about to do where nothing tells that they do the same. Uses the store of the
default process group: a rank that posts alone gets an error with the ranks that are missing, and no operation of a
process group meets another. Costs as many reads as there are ranks, so it is for exceptions and for debugging.
"""

from __future__ import annotations

import datetime
import hashlib
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

_DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)  # torch's for process groups
_ADVICE = "A unit that some ranks use again in one pass must be kept: own_matrices(..., reshard_after_forward=False)"
_made: Counter[tuple[int, ...]] = Counter()  # boards of the same ranks


class Missing(RuntimeError):
    """Some ranks did not post in time: ``ranks``, within the group."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"ranks {', '.join(map(str, ranks))} did not come")
        self.ranks = ranks


class Board:
    """``ranks``: the global ranks of the group, ``rank``: this one's index. Made in the same order on each of them."""

    def __init__(self, ranks: Sequence[int], rank: int, timeout: datetime.timedelta | None = None) -> None:
        self._rank, self._world, self._timeout = rank, len(ranks), timeout or _DEFAULT_TIMEOUT
        key = tuple(ranks)
        self._prefix = f"dmuon/{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}/{_made[key]}"
        _made[key] += 1
        self._store: dist.Store | None = None
        self._posts = 0

    @property
    def store(self) -> dist.Store:
        if self._store is None:  # a connection of its own, since a wait holds it
            # torch has no public call for the default group's store.
            self._store = dist.PrefixStore(self._prefix, dist.distributed_c10d._get_default_store().clone())
        return self._store

    def exchange(self, word: str) -> list[str]:
        """Every rank's word of the same call, in rank order. :class:`Missing` if a rank does not call in time."""
        if self._world == 1:
            return [word]
        post, self._posts = self._posts, self._posts + 1
        self.store.set(f"{post}/{self._rank}", word)
        self.store.set(f"last/{self._rank}", word)
        keys = [f"{post}/{r}" for r in range(self._world)]
        try:
            self.store.wait(keys, self._timeout)
        except dist.DistStoreError as error:
            missing = [r for r, key in enumerate(keys) if not self.store.check([key])]
            raise Missing(missing or list(range(self._world))) from error
        words = [value.decode() for value in self.store.multi_get(keys)]
        if post:  # all have read what came before
            self.store.delete_key(f"{post - 1}/{self._rank}")
        return words

    def agree(self, word: str) -> None:
        """RuntimeError unless every rank posts the same word in time."""
        try:
            words = self.exchange(word)
        except Missing as missing:
            raise RuntimeError(
                f"{word}: this rank asks for it, ranks {', '.join(map(str, missing.ranks))} of the data-parallel group "
                f"do not. {_ADVICE}"
            ) from missing
        other = next((r for r, each in enumerate(words) if each != words[0]), None)
        if other is not None:
            raise RuntimeError(
                f"ranks 0 and {other} of the data-parallel group ask for different things: {words[0]} on rank 0, "
                f"{words[other]} on rank {other}. {_ADVICE}"
            )

    def last_words(self) -> list[str]:
        """What each rank posted last; "nothing" for those that never did."""
        keys = [f"last/{r}" for r in range(self._world)]
        return [self.store.get(key).decode() if self.store.check([key]) else "nothing" for key in keys]
