"""Who owns which piece: the assignment of pieces to owners, and the plan that records it.

Decides the one owner of every piece, balanced by the cost of the update, from names, shapes and the mesh alone. Does
not decide what is owned (`matrices.py`), what an update costs (`costs.py`) nor how bytes travel (`topology.py`), and
touches neither torch nor processes.
Keeps invariant 6: the plan is a pure function of its inputs (the order they come in does not matter, equal cases are
decided by name), and its digest covers every one of them.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from .costs import CostModel, digest_of
from .matrices import MatrixLayout, Piece, count_matrices
from .packing import pack, packing_bound

BALANCES = ("cost", "numel", "round_robin")
OWNERSHIPS = ("global", "replica")

# Bytes the owner alone holds per element: fp32 master, momentum and reduced gradient.
OWNER_BYTES_PER_ELEMENT = 12
# The same of a rider: AdamW has two moments.
RIDER_BYTES_PER_ELEMENT = 16


@dataclass(frozen=True)
class MeshSpec:
    """The data-parallel group as the plan sees it: ``world`` ranks; ranks r*S .. r*S+S-1 are shard group r, with
    S = ``shard_size``; rank k runs on node k // ``ranks_per_node`` (the last node may be partly filled)."""

    world: int
    shard_size: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"mesh: {name} must be a positive integer, got {value!r}")
        if self.world % self.shard_size:
            raise ValueError(f"mesh: shard_size {self.shard_size} does not divide world {self.world}")

    @property
    def replicas(self) -> int:
        return self.world // self.shard_size

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node


@dataclass(frozen=True)
class OwnershipPlan:
    """The owner of every piece, with everything it was derived from.

    ``owners[i]``, ``costs[i]`` and ``units[i]`` belong to ``pieces[i]``; pieces are sorted by (name, start). Owners
    count within the data-parallel group, or, with ownership "replica", within each shard group.
    """

    pieces: tuple[Piece, ...]
    owners: tuple[int, ...]
    costs: tuple[int, ...]
    units: tuple[int, ...]
    mesh: MeshSpec
    balance: str = "cost"
    ownership: str = "global"
    memory_cap_bytes: int | None = None
    cost_model: Mapping[str, Any] = field(default_factory=dict, hash=False)  # CostModel.describe()

    @property
    def n_owners(self) -> int:
        """How many ranks the pieces are dealt to."""
        return self.mesh.world if self.ownership == "global" else self.mesh.shard_size

    @cached_property
    def _index(self) -> dict[str, int]:
        return {p.key: i for i, p in enumerate(self.pieces)}

    @cached_property
    def _by_owner(self) -> tuple[tuple[Piece, ...], ...]:
        held: list[list[Piece]] = [[] for _ in range(self.n_owners)]
        for piece, owner in zip(self.pieces, self.owners, strict=True):
            held[owner].append(piece)
        return tuple(map(tuple, held))

    def owner_of(self, key: str) -> int:
        """Owner of the piece with this key. KeyError names the key."""
        if key not in self._index:
            raise KeyError(f"no piece {key!r} in the plan of {len(self.pieces)} pieces")
        return self.owners[self._index[key]]

    def pieces_of(self, rank: int) -> tuple[Piece, ...]:
        """Pieces of one owner, by name; empty for an idle owner."""
        if not 0 <= rank < self.n_owners:
            raise IndexError(f"owner {rank} is outside 0..{self.n_owners - 1}")
        return self._by_owner[rank]

    @cached_property
    def roots(self) -> dict[str, int]:
        """Piece key -> the rank that sums its gradient. The owner; with replica ownership, where every replica has an
        owner on the same shard index, replicas take turns in the order of names; a rider follows a matrix of its
        unit."""
        if self.ownership == "global":
            return {p.key: owner for p, owner in zip(self.pieces, self.owners, strict=True)}
        turns = dict.fromkeys(range(self.mesh.shard_size), 0)
        roots: dict[str, int] = {}
        in_unit: dict[tuple[int, int], int] = {}
        rows = sorted(zip(self.pieces, self.owners, self.units, strict=True), key=lambda row: row[0].rider)
        for piece, index, unit in rows:
            if piece.rider and (unit, index) in in_unit:
                roots[piece.key] = in_unit[unit, index]
                continue
            roots[piece.key] = turns[index] % self.mesh.replicas * self.mesh.shard_size + index
            turns[index] += 1
            in_unit.setdefault((unit, index), roots[piece.key])
        return roots

    def loads(self) -> tuple[int, ...]:
        """Cost per owner."""
        loads = [0] * self.n_owners
        for cost, owner in zip(self.costs, self.owners, strict=True):
            loads[owner] += cost
        return tuple(loads)

    def owner_bytes(self) -> tuple[int, ...]:
        """Bytes of master, optimizer state and reduced gradient per owner."""
        return tuple(sum(map(_bytes, held)) for held in self._by_owner)

    @cached_property
    def largest_cost(self) -> int:
        return max(self.loads())

    @cached_property
    def mean_cost(self) -> float:
        return sum(self.costs) / self.n_owners

    @cached_property
    def lower_bound(self) -> int:
        """:func:`packing_bound` of the costs."""
        return packing_bound(self.costs, self.n_owners)

    @property
    def imbalance(self) -> float:
        """Largest over mean."""
        return self.largest_cost / self.mean_cost

    @property
    def idle_owners(self) -> int:
        return sum(not held for held in self._by_owner)

    @cached_property
    def digest(self) -> str:
        """sha256 over names, shapes, layouts, units, costs, mesh, options and owners. Equal plans, equal digests."""
        return digest_of(self._content())

    def _content(self) -> dict[str, Any]:
        rows = zip(self.pieces, self.units, self.costs, self.owners, strict=True)
        return {
            "mesh": asdict(self.mesh),
            "options": {
                "balance": self.balance,
                "ownership": self.ownership,
                "memory_cap_bytes": self.memory_cap_bytes,
                "cost": dict(self.cost_model),
            },
            "owned": [
                {
                    "name": p.name,
                    "start": p.start,
                    "stop": p.stop,
                    "shape": list(p.shape),
                    "groups": p.layout.groups,
                    "rows": list(p.layout.rows),
                    "rider": p.rider,
                    "unit": unit,
                    "cost": cost,
                    "owner": owner,
                }
                for p, unit, cost, owner in rows
            ],
        }

    def summary(self) -> dict[str, Any]:
        """The figures of the plan, under the names of DESIGN section 5."""
        return {
            "world": self.mesh.world,
            "matrices": count_matrices(self.pieces),
            "pieces": sum(not p.rider for p in self.pieces),
            "riders": sum(p.rider for p in self.pieces),
            "largest_cost": self.largest_cost,
            "mean_cost": self.mean_cost,
            "lower_bound": self.lower_bound,
            "imbalance": self.imbalance,
            "idle_owners": self.idle_owners,
            "largest_owner_bytes": max(self.owner_bytes()),
            "digest": self.digest,
        }

    def to_json(self) -> str:
        """The summary and the whole content, as JSON text that :meth:`from_json` reads back."""
        return json.dumps({**self.summary(), **self._content()}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> OwnershipPlan:
        """Inverse of :meth:`to_json`. Raises ValueError when the content is not what its digest says."""
        data = json.loads(text)
        options, owned = data["options"], data["owned"]
        plan = cls(
            pieces=tuple(
                Piece(
                    o["name"],
                    o["start"],
                    o["stop"],
                    tuple(o["shape"]),
                    MatrixLayout(o["groups"], tuple(o["rows"])),
                    o["rider"],
                )
                for o in owned
            ),
            owners=tuple(o["owner"] for o in owned),
            costs=tuple(o["cost"] for o in owned),
            units=tuple(o["unit"] for o in owned),
            mesh=MeshSpec(**data["mesh"]),
            balance=options["balance"],
            ownership=options["ownership"],
            memory_cap_bytes=options["memory_cap_bytes"],
            cost_model=options["cost"],
        )
        if plan.digest != data["digest"]:
            raise ValueError(
                f"ownership plan: content has digest {plan.digest[:12]}, the file says {data['digest'][:12]}; "
                "it was edited or written by another version: make the plan again"
            )
        return plan

    def difference(self, other: OwnershipPlan, limit: int = 8) -> list[str]:
        """What differs, one line each, this plan's value first; empty when the plans are equal.

        Names at most ``limit`` parameters. Owners are compared only when everything they derive from agrees.
        """
        mine, theirs = self._content(), other._content()
        lines = [
            f"{group}.{key}: {mine[group].get(key)!r} against {theirs[group].get(key)!r}"
            for group in ("mesh", "options")
            for key in sorted({*mine[group], *theirs[group]})
            if mine[group].get(key) != theirs[group].get(key)
        ]
        a = {p.key: row for p, row in zip(self.pieces, mine["owned"], strict=True)}
        b = {p.key: row for p, row in zip(other.pieces, theirs["owned"], strict=True)}
        per_piece = [f"{k}: shape {a[k]['shape']} here, absent there" for k in sorted(a.keys() - b.keys())]
        per_piece += [f"{k}: absent here, shape {b[k]['shape']} there" for k in sorted(b.keys() - a.keys())]
        both = sorted(a.keys() & b.keys())
        inputs = ("stop", "shape", "groups", "rows", "rider", "unit", "cost")
        per_piece += [f"{k}: {f} {a[k][f]} against {b[k][f]}" for k in both for f in inputs if a[k][f] != b[k][f]]
        if not lines and not per_piece:
            per_piece = [
                f"{k}: owner {a[k]['owner']} against {b[k]['owner']}" for k in both if a[k]["owner"] != b[k]["owner"]
            ]
        if len(per_piece) > limit:
            per_piece = [*per_piece[:limit], f"... and {len(per_piece) - limit} more differences in pieces"]
        return lines + per_piece


def assign(
    pieces: Iterable[Piece],
    mesh: MeshSpec,
    *,
    balance: str = "cost",
    ownership: str = "global",
    cost: CostModel | None = None,
    unit_of: Mapping[str, int] | None = None,
    memory_cap_bytes: int | None = None,
) -> OwnershipPlan:
    """Give every piece one owner.

    Minimizes the largest cost per owner, then the bytes per owner, then the bytes a node publishes, then for each unit
    the bytes per source (the owner's place in its shard group). ``balance="numel"`` counts elements instead of cost;
    "round_robin" deals in name order and minimizes nothing. Riders go to owners that their unit has anyway, so that
    there are no more messages than without them. ``unit_of`` maps piece keys to unit indices (default: one
    unit). ``memory_cap_bytes`` limits what one owner holds (:data:`OWNER_BYTES_PER_ELEMENT`). With ownership "replica"
    owners are places in a shard group, the same in every replica. Raises ValueError for no pieces, overlapping pieces,
    unknown choices and a cap that cannot be met.
    """
    if balance not in BALANCES:
        raise ValueError(f"balance must be one of {', '.join(BALANCES)}, got {balance!r}")
    if ownership not in OWNERSHIPS:
        raise ValueError(f"ownership must be one of {', '.join(OWNERSHIPS)}, got {ownership!r}")
    everything = sorted(pieces, key=lambda p: (p.name, p.start))
    ordered = [p for p in everything if not p.rider]
    if not ordered:
        raise ValueError("no pieces to assign: no parameter is owned; check the patterns of the owned parameters")
    for a, b in zip(everything, everything[1:], strict=False):
        if a.name == b.name and b.start < a.stop:
            raise ValueError(
                f"{a.name}: rows [{a.start}, {a.stop}) and [{b.start}, {b.stop}) overlap; each row has one owner"
            )
    missing = [p.key for p in everything if unit_of is not None and p.key not in unit_of]
    if missing:
        raise ValueError(f"{missing[0]}: belongs to no unit ({len(missing)} such pieces); pass its unit in unit_of")
    model = cost or CostModel()
    costs = [model.cost(p) for p in ordered]
    units = [0 if unit_of is None else unit_of[p.key] for p in ordered]
    n_owners = mesh.world if ownership == "global" else mesh.shard_size
    if balance == "round_robin":
        owners = [i % n_owners for i in range(len(ordered))]
    else:
        sizes = [p.numel for p in ordered]
        weights = costs if balance == "cost" else sizes
        cap = None if memory_cap_bytes is None else memory_cap_bytes // OWNER_BYTES_PER_ELEMENT
        bins = pack(weights, sizes, n_owners, cap)
        if bins is None:
            raise ValueError(_cap_message(ordered, n_owners, memory_cap_bytes))
        owners = _spread_units(_place(bins, sizes, mesh), ordered, costs, units, mesh)
    if len(ordered) < len(everything):
        owners = _with_riders(everything, ordered, owners, unit_of, n_owners)
        costs = [model.cost(p) for p in everything]
        units = [0 if unit_of is None else unit_of[p.key] for p in everything]
    _check_cap(everything, owners, n_owners, memory_cap_bytes)
    return OwnershipPlan(
        pieces=tuple(everything),
        owners=tuple(owners),
        costs=tuple(costs),
        units=tuple(units),
        mesh=mesh,
        balance=balance,
        ownership=ownership,
        memory_cap_bytes=memory_cap_bytes,
        cost_model=model.describe(),
    )


def _bytes(piece: Piece) -> int:
    return piece.numel * (RIDER_BYTES_PER_ELEMENT if piece.rider else OWNER_BYTES_PER_ELEMENT)


def _with_riders(
    everything: Sequence[Piece],
    ordered: Sequence[Piece],
    owners: Sequence[int],
    unit_of: Mapping[str, int] | None,
    n_owners: int,
) -> list[int]:
    """Owners of ``everything``, where ``owners`` are those of the matrices ``ordered``: each rider goes to the owner
    with the fewest bytes among those of its unit's matrices, or among all in a unit without a matrix."""
    owner_of = {p.key: owner for p, owner in zip(ordered, owners, strict=True)}
    held = [0] * n_owners
    candidates: dict[int, set[int]] = {}
    for p, owner in zip(ordered, owners, strict=True):
        held[owner] += _bytes(p)
        candidates.setdefault(0 if unit_of is None else unit_of[p.key], set()).add(owner)
    for p in everything:
        if p.rider:
            mine = candidates.get(0 if unit_of is None else unit_of[p.key]) or range(n_owners)
            owner = min(mine, key=lambda rank: (held[rank], rank))
            owner_of[p.key] = owner
            held[owner] += _bytes(p)
    return [owner_of[p.key] for p in everything]


def _cap_message(pieces: Sequence[Piece], n_owners: int, cap: int | None, found: int | None = None) -> str:
    """Why the cap cannot be met: the piece, the mean, or the packing that was found."""
    largest = max(pieces, key=lambda p: p.numel)
    mean = -(-sum(map(_bytes, pieces)) // n_owners)
    reason = "no assignment within it was found" if found is None else f"the fullest owner would hold {found}"
    return (
        f"memory_cap_bytes {cap} cannot be met: {reason}; {largest.key} alone takes "
        f"{_bytes(largest)} bytes and the mean of {n_owners} owners is {mean}: "
        "raise the cap or use more ranks"
    )


def _check_cap(pieces: Sequence[Piece], owners: Sequence[int], n_owners: int, cap: int | None) -> None:
    held = [0] * n_owners
    for p, owner in zip(pieces, owners, strict=True):
        held[owner] += _bytes(p)
    if cap is not None and max(held) > cap:
        raise ValueError(_cap_message(pieces, n_owners, cap, max(held)))


def _place(bins: Sequence[Sequence[int]], sizes: Sequence[int], mesh: MeshSpec) -> list[int]:
    """The rank of each bin's items: bytes spread over nodes, then over the places of a shard group.

    The largest bin goes to the node with the fewest bytes that has a free rank; within a node, shard group by shard
    group, the larger bins go to the sources with fewer bytes so far.
    """
    nodes: list[list[int]] = [[] for _ in range(mesh.node(len(bins) - 1) + 1)]
    for rank in range(len(bins)):
        nodes[mesh.node(rank)].append(rank)
    size = [sum(sizes[i] for i in b) for b in bins]
    given: list[list[int]] = [[] for _ in nodes]
    heap = [(0, node) for node in range(len(nodes))]
    for b in sorted(range(len(bins)), key=lambda b: (-size[b], b)):
        total, node = heap[0]
        given[node].append(b)
        if len(given[node]) == len(nodes[node]):
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (total + size[b], node))

    owners = [0] * len(sizes)
    by_source = [0] * mesh.shard_size
    for ranks, held in zip(nodes, given, strict=True):
        groups: dict[int, list[int]] = {}
        for rank in ranks:
            groups.setdefault(rank // mesh.shard_size, []).append(rank)
        next_bin = iter(held)
        for group in groups.values():
            for rank in sorted(group, key=lambda r: (by_source[r % mesh.shard_size], r)):
                b = next(next_bin)
                by_source[rank % mesh.shard_size] += size[b]
                for i in bins[b]:
                    owners[i] = rank
    return owners


def _spread_units(
    owners: Sequence[int], pieces: Sequence[Piece], costs: Sequence[int], units: Sequence[int], mesh: MeshSpec
) -> list[int]:
    """Trade pieces of equal cost and size between owners, so that one unit's gathers come from many sources.

    Largest kind first, unit by unit, a piece goes to the source that has given the unit the fewest bytes, then to
    the one with the most places left. Every owner keeps how many pieces of each kind it has, hence its cost and bytes.
    """
    kind_of = list(zip([p.numel for p in pieces], costs, strict=True))
    places: dict[tuple[int, int], dict[int, list[int]]] = {}
    for kind, owner in zip(kind_of, owners, strict=True):
        places.setdefault(kind, {}).setdefault(owner % mesh.shard_size, []).append(owner)
    n_nodes = mesh.node(mesh.world - 1) + 1
    for by_source in places.values():
        for source, held in by_source.items():
            # Popped from the end: owners in turn, sources starting at different nodes, for units to spread there too.
            turn: dict[int, int] = {}
            keyed = []
            for owner in sorted(held):
                turn[owner] = turn.get(owner, 0) + 1
                keyed.append((turn[owner], (mesh.node(owner) - source) % n_nodes, owner))
            by_source[source] = [owner for *_, owner in sorted(keyed, reverse=True)]

    spread = list(owners)
    given: dict[tuple[int, int], int] = {}  # bytes by (unit, source)
    order = sorted(range(len(pieces)), key=lambda i: (-kind_of[i][0], -kind_of[i][1], units[i], i))
    for (size, cost, unit), alike in groupby(order, key=lambda i: (*kind_of[i], units[i])):
        by_source = places[size, cost]
        heap = [(given.get((unit, source), 0), -len(left), source) for source, left in by_source.items() if left]
        heapq.heapify(heap)
        for i in alike:
            total, left, source = heap[0]
            spread[i] = by_source[source].pop()
            given[unit, source] = total + size
            if left == -1:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (total + size, left + 1, source))
    return spread
