"""Balanced packing of weighted items into bins.

Decides which items share a bin so that the heaviest bin is as light as the search can make it, and after that the
largest bin as small. Knows nothing of pieces, ranks or nodes (`ownership.py` gives bins their ranks). Keeps: weights
and sizes are integers, items are told apart by (weight, size, index) alone, and every loop is bounded by a count and
never by a clock, so that equal input gives equal bins on every machine.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import combinations_with_replacement
from math import comb

# Exchanges looked at, at most: each costs about a microsecond.
_BUDGET = 1_000_000
# Lightest bins of different content tried as partners of the heaviest one.
_PARTNERS = 48
# Items that leave a bin in one exchange, at most; fewer where a bin would have more subsets of that size than this.
_WIDEST_EXCHANGE = 4
_SUBSETS = 120
# What may come back for it: the nearest in weight, this many above and below the ideal.
_NEAREST = 12
# A heaviest bin within one part in this many of the bound needs no second start.
_CLOSE = 10_000
# Bins times kinds of items beyond which first fit is not tried: it takes that many looks, a dozen times over.
_FILL_LIMIT = 200_000
# Few items that missed the bound are also placed by a search over all placements, within this many looks.
_SEARCHED_ITEMS = 24
_SEARCH_LOOKS = 20_000

Bin = tuple[int, ...]  # kinds of the items in a bin, ascending, repeated


def packing_bound(weights: Iterable[int], n: int) -> int:
    """No packing into n bins has a lighter heaviest bin.

    The largest of: the mean (rounded up), the heaviest item, and for weights c1 >= c2 >= ... and every j >= 1,
    c(jN+1) + c(jN) + ... + c(jN+1-j): of the first jN+1 items, j+1 share some bin.
    """
    c = sorted(weights, reverse=True)
    bound = max(-(-sum(c) // n), c[0])
    for j in range(1, (len(c) - 1) // n + 1):
        bound = max(bound, sum(c[j * n - j : j * n + 1]))
    return bound


def pack(weights: Sequence[int], sizes: Sequence[int], n: int, size_cap: int | None = None) -> list[list[int]] | None:
    """Item indices per bin, n bins. None when no packing was found that keeps every bin's size within ``size_cap``.

    Longest first and first fit decreasing, each improved by exchanges between bins until the packing bound or no
    improvement; few items are also searched. The lighter result wins, then exchanges that keep it make the largest bin
    smaller.
    """
    kinds = sorted({(w, s) for w, s in zip(weights, sizes, strict=True)}, reverse=True)
    index_of = {kind: k for k, kind in enumerate(kinds)}
    members: list[list[int]] = [[] for _ in kinds]
    for i, kind in enumerate(zip(weights, sizes, strict=True)):
        members[index_of[kind]].append(i)
    counts = [len(m) for m in members]
    by_weight, by_size = [w for w, _ in kinds], [s for _, s in kinds]
    cap = sum(sizes) if size_cap is None else size_cap
    bound = packing_bound(weights, n)

    best: list[Bin] | None = None
    heaviest = sum(weights) + 1
    for start in (_longest_first, _first_fit, _smallest_bin):
        if best is not None and (start is _smallest_bin or heaviest <= bound + bound // _CLOSE):
            break
        bins = start(by_weight, by_size, counts, n, cap)
        if bins is not None:
            bins = _exchange(bins, by_weight, by_size, bound, cap)
            if _heaviest(bins, by_weight) < heaviest:
                best, heaviest = bins, _heaviest(bins, by_weight)
    if best is None:
        return None
    if heaviest > bound and len(weights) <= _SEARCHED_ITEMS:
        best = _search(best, by_weight, by_size, bound, cap)
        heaviest = _heaviest(best, by_weight)
    best = _exchange(best, by_size, by_weight, -(-sum(sizes) // n), heaviest)
    queues = [iter(m) for m in members]
    return [[next(queues[k]) for k in kinds_in_bin] for kinds_in_bin in best]


def _heaviest(bins: Sequence[Bin], weight: Sequence[int]) -> int:
    return max(sum(weight[k] for k in b) for b in bins)


def _longest_first(
    weight: Sequence[int], size: Sequence[int], counts: Sequence[int], n: int, cap: int
) -> list[Bin] | None:
    """Each item, heaviest first, to the lightest bin that has room (then to the smallest)."""
    bins: list[list[int]] = [[] for _ in range(n)]
    heap = [(0, 0, b) for b in range(n)]
    for k, count in enumerate(counts):
        full = []
        for _ in range(count):
            while heap and heap[0][1] + size[k] > cap:
                full.append(heapq.heappop(heap))
            if not heap:
                return None
            w, s, b = heap[0]
            bins[b].append(k)
            heapq.heapreplace(heap, (w + weight[k], s + size[k], b))
        for entry in full:  # too full for this kind, not for a smaller one
            heapq.heappush(heap, entry)
    return [tuple(b) for b in bins]


def _smallest_bin(
    weight: Sequence[int], size: Sequence[int], counts: Sequence[int], n: int, cap: int
) -> list[Bin] | None:
    """Longest first by size: for a cap so tight that going by weight does not meet it."""
    order = sorted(range(len(size)), key=lambda k: (-size[k], k))
    bins = _longest_first([size[k] for k in order], [size[k] for k in order], [counts[k] for k in order], n, cap)
    return None if bins is None else [tuple(sorted(order[k] for k in b)) for b in bins]


def _first_fit(weight: Sequence[int], size: Sequence[int], counts: Sequence[int], n: int, cap: int) -> list[Bin] | None:
    """First fit decreasing at the smallest bin weight (by bisection) at which all items fit (MULTIFIT)."""
    if n * len(weight) > _FILL_LIMIT:
        return None
    total = sum(w * c for w, c in zip(weight, counts, strict=True))
    low, high = max(-(-total // n), weight[0]), 2 * max(-(-total // n), weight[0])
    best = None
    while low <= high and high - low >= total // (n * 2000):
        middle = (low + high) // 2
        bins = _fill(weight, size, counts, n, cap, middle)
        if bins is None:
            low = middle + 1
        else:
            best, high = bins, middle - 1
    return best


def _fill(
    weight: Sequence[int], size: Sequence[int], counts: Sequence[int], n: int, cap: int, limit: int
) -> list[Bin] | None:
    left, live = list(counts), list(range(len(counts)))
    bins: list[Bin] = []
    for _ in range(n):
        room, space, held = limit, cap, []
        k = 0
        while k < len(live):
            kind = live[k]
            if weight[kind] > room:
                k = max(k + 1, bisect_left(live, -room, key=lambda j: -weight[j]))
                continue
            take = min(left[kind], room // weight[kind] if weight[kind] else left[kind], space // size[kind])
            held += [kind] * take
            left[kind] -= take
            room, space = room - take * weight[kind], space - take * size[kind]
            k += 1
        bins.append(tuple(held))
        live = [kind for kind in live if left[kind]]
    return None if live else bins


def _search(bins: Sequence[Bin], weight: Sequence[int], size: Sequence[int], bound: int, cap: int) -> list[Bin]:
    """Better bins by depth-first search over all placements; optimal unless it runs out of looks."""
    items = sorted(k for b in bins for k in b)  # heaviest first
    best, lightest, looks = list(bins), _heaviest(bins, weight), _SEARCH_LOOKS
    held: list[list[int]] = [[] for _ in bins]
    load, filled = [0] * len(bins), [0] * len(bins)

    def place(at: int) -> None:
        nonlocal best, lightest, looks
        if at == len(items):
            best, lightest = [tuple(b) for b in held], max(load)
            return
        k = items[at]
        tried = set()
        for b in sorted(range(len(load)), key=lambda b: (-load[b], b)):  # fullest first: the others stay free for more
            alike = (load[b], filled[b])
            if alike in tried or load[b] + weight[k] >= lightest or filled[b] + size[k] > cap:
                continue
            tried.add(alike)
            looks -= 1
            if looks < 0 or lightest <= bound:
                return
            held[b].append(k)
            load[b], filled[b] = load[b] + weight[k], filled[b] + size[k]
            place(at + 1)
            held[b].pop()
            load[b], filled[b] = load[b] - weight[k], filled[b] - size[k]

    place(0)
    return best


def _exchange(bins: Sequence[Bin], weight: Sequence[int], other: Sequence[int], bound: int, cap: int) -> list[Bin]:
    """Lower the heaviest bin by exchanging items with lighter ones, ``other`` staying within ``cap`` in every bin."""
    bins = list(bins)
    load = [sum(weight[k] for k in b) for b in bins]
    alike: dict[Bin, list[int]] = {}  # bins of equal content need to be looked at once
    for i, b in enumerate(bins):
        alike.setdefault(b, []).append(i)
    found: dict[tuple[Bin, Bin], tuple[int, Bin, Bin] | None] = {}
    options: dict[Bin, list[tuple[int, int, Bin]]] = {}
    budget = _BUDGET
    heap = [(-w, i) for i, w in enumerate(load)]
    heapq.heapify(heap)
    # The lightest bins by content; sorted again only as contents come and go.
    order = sorted((sum(weight[k] for k in b), b) for b in alike)
    while budget > 0:
        while load[heap[0][1]] != -heap[0][0]:
            heapq.heappop(heap)
        top = heap[0][1]
        if load[top] <= bound:
            break
        a = bins[top]
        best: tuple[int, Bin, Bin] | None = None
        partner: Bin = ()
        for w, b in order[:_PARTNERS]:
            if w >= load[top] or (best is not None and best[0] <= -(-(load[top] + w) // 2)):
                break
            if (a, b) not in found:
                found[a, b] = _best_exchange(a, b, weight, other, cap, options)
                budget -= len(options[a]) * min(len(options[b]), 2 * _NEAREST)
            result = found[a, b]
            if result is not None and (best is None or result[0] < best[0]):
                best, partner = result, b
        if best is None:
            break
        light = alike[partner][0]
        for i, content in ((top, best[1]), (light, best[2])):
            w, old = load[i], bins[i]
            alike[old].remove(i)
            if not alike[old]:
                del alike[old]
                del order[bisect_left(order, (w, old))]
            w = sum(weight[k] for k in content)
            if content not in alike:
                order.insert(bisect_left(order, (w, content)), (w, content))
            alike.setdefault(content, []).append(i)
            bins[i], load[i] = content, w
            heapq.heappush(heap, (-w, i))
    return bins


def _best_exchange(
    a: Bin,
    b: Bin,
    weight: Sequence[int],
    other: Sequence[int],
    cap: int,
    cache: dict[Bin, list[tuple[int, int, Bin]]],
) -> tuple[int, Bin, Bin] | None:
    """(heavier of the two after, a after, b after) of the exchange that leaves the pair most even; None: none helps."""
    load_a, load_b = sum(weight[k] for k in a), sum(weight[k] for k in b)
    other_a, other_b = sum(other[k] for k in a), sum(other[k] for k in b)
    best, chosen = load_a, None
    incoming = _subsets(b, weight, other, cache)
    keys = [w for w, _, _ in incoming]
    for w_out, o_out, out in _subsets(a, weight, other, cache):
        # An exchange moves d = w_out - w_in from a to b; the pair is most even at d = (load_a - load_b) / 2.
        middle = bisect_left(keys, w_out - (load_a - load_b) // 2)
        for step in (
            range(middle, min(middle + _NEAREST, len(keys))),
            range(middle - 1, max(middle - 1 - _NEAREST, -1), -1),
        ):
            for j in step:
                w_in, o_in, into = incoming[j]
                heavier = max(load_a - w_out + w_in, load_b + w_out - w_in)
                if heavier >= best:
                    break
                if other_a - o_out + o_in <= cap and other_b + o_out - o_in <= cap:
                    best, chosen = heavier, (out, into)
                    break
    if chosen is None:
        return None
    out, into = chosen
    return best, _replaced(a, out, into), _replaced(b, into, out)


def _subsets(
    content: Bin, weight: Sequence[int], other: Sequence[int], cache: dict[Bin, list[tuple[int, int, Bin]]]
) -> list[tuple[int, int, Bin]]:
    """(weight, other, kinds) of what may leave a bin at once, by weight; nothing included."""
    if content not in cache:
        kinds = sorted(set(content))
        found: list[Bin] = [()]
        for count in range(1, _WIDEST_EXCHANGE + 1):
            if count > 1 and len(found) + comb(len(kinds) + count - 1, count) > _SUBSETS:
                break
            parts = combinations_with_replacement(kinds, count)
            found += [p for p in parts if count == 1 or all(p.count(k) <= content.count(k) for k in p)]
        cache[content] = sorted((sum(weight[k] for k in p), sum(other[k] for k in p), p) for p in found)
    return cache[content]


def _replaced(content: Bin, out: Bin, into: Bin) -> Bin:
    rest = list(content)
    for k in out:
        rest.remove(k)
    return tuple(sorted([*rest, *into]))
