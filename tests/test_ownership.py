"""Ownership plans: one owner per piece, at the packing bound, the same on every rank (invariant 6; cases 24 and 25)."""

import json
import random
import time
from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchtitan_dmuon import newton_schulz
from torchtitan_dmuon.costs import ELEMENTWISE_BYTES, FLOPS_PER_BYTE, CostModel, standard_flops
from torchtitan_dmuon.matrices import MatrixLayout, OwnedSpec, Piece
from torchtitan_dmuon.ownership import (
    BALANCES,
    OWNER_BYTES_PER_ELEMENT,
    OWNERSHIPS,
    MeshSpec,
    OwnershipPlan,
    assign,
    packing_bound,
)
from torchtitan_dmuon.packing import pack


def transformer(layers: int, dim: int, heads: int, n_kv: int, ffn: int, head_dim: int = 0) -> list[Piece]:
    head_dim = head_dim or dim // heads
    qkv = MatrixLayout(n_kv, (heads // n_kv * head_dim, head_dim, head_dim))
    specs = []
    for i in range(layers):
        at = f"layers.{i}"
        specs += [
            OwnedSpec(f"{at}.attention.qkv_linear.wqkv.weight", ((heads + 2 * n_kv) * head_dim, dim), qkv),
            OwnedSpec(f"{at}.attention.wo.weight", (dim, heads * head_dim)),
            OwnedSpec(f"{at}.feed_forward.w1.weight", (ffn, dim)),
            OwnedSpec(f"{at}.feed_forward.w2.weight", (dim, ffn)),
            OwnedSpec(f"{at}.feed_forward.w3.weight", (ffn, dim)),
        ]
    return [p for s in specs for p in s.pieces()]


def layer_units(pieces: list[Piece]) -> dict[str, int]:
    return {p.key: int(p.name.split(".")[1]) for p in pieces}


LLAMA3_8B = transformer(32, 4096, 32, 8, 14336)
LLAMA3_70B = transformer(80, 8192, 64, 8, 28672)
QWEN3_32B = transformer(64, 5120, 64, 8, 25600, head_dim=128)
LLAMA3_405B = transformer(126, 16384, 128, 8, 53248)
QWEN3_30B_A3B = [p for p in transformer(48, 2048, 32, 4, 768, head_dim=128) if "attention" in p.name] + [
    p
    for i in range(48)
    for w, rows, columns in (("w1", 768, 2048), ("w2", 2048, 768), ("w3", 768, 2048))
    for p in OwnedSpec(f"layers.{i}.experts.{w}", (128, rows, columns)).pieces()
]
MODELS = {"llama3_8b": LLAMA3_8B, "llama3_70b": LLAMA3_70B, "qwen3_32b": QWEN3_32B}


@st.composite
def problems(draw) -> tuple[list[Piece], MeshSpec, dict[str, int]]:
    shapes = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=24))
    specs = [OwnedSpec(f"u{i % 5}.w{i}", shape) for i, shape in enumerate(shapes)]
    if draw(st.booleans()):
        specs.append(OwnedSpec("experts", (draw(st.integers(1, 9)), 8, 4), MatrixLayout(2, (3, 1))))
    shard, replicas = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 6))
    specs += [OwnedSpec(f"norm{i}", (size,), rider=True) for i, size in enumerate(draw(st.lists(st.integers(1, 40))))]
    pieces = [p for s in specs for p in s.pieces()]
    units = {p.key: draw(st.integers(0, 4)) for p in pieces}
    return pieces, MeshSpec(shard * replicas, shard, draw(st.sampled_from([1, 2, 3, 4, 8]))), units


@settings(max_examples=80, deadline=None)
@given(problems(), st.sampled_from(BALANCES), st.sampled_from(OWNERSHIPS), st.randoms(use_true_random=False))
def test_any_plan_is_whole_within_bounds_and_independent_of_input_order(problem, balance, ownership, rng):
    pieces, mesh, units = problem
    options = {"balance": balance, "ownership": ownership}
    plan = assign(pieces, mesh, unit_of=units, **options)
    n = mesh.world if ownership == "global" else mesh.shard_size
    held = [p for rank in range(n) for p in plan.pieces_of(rank)]
    assert sorted(p.key for p in held) == sorted(p.key for p in pieces)  # every piece, exactly one owner
    assert all(p in plan.pieces_of(plan.owner_of(p.key)) for p in pieces)
    cost = CostModel()
    assert list(plan.loads()) == [sum(cost.cost(p) for p in plan.pieces_of(rank)) for rank in range(n)]
    assert sum(plan.owner_bytes()) == sum(p.numel * (16 if p.rider else 12) for p in pieces)
    # Riders move no matrix, and add no owner (hence no message) to a unit that has matrices.
    bare = assign([p for p in pieces if not p.rider], mesh, unit_of=units, **options)
    assert all(bare.owner_of(p.key) == plan.owner_of(p.key) for p in bare.pieces)
    with_matrix = set(bare.units)
    assert set(zip(bare.units, bare.owners)) == {p for p in zip(plan.units, plan.owners) if p[0] in with_matrix}
    assert plan.lower_bound <= plan.largest_cost
    assert plan.mean_cost <= plan.lower_bound
    if balance == "cost":  # what longest-first guarantees: (4/3 - 1/3n) of the optimum, so at most mean + largest piece
        assert plan.largest_cost <= plan.mean_cost + max(plan.costs)
    assert plan.idle_owners == n - len(set(plan.owners))

    shuffled = list(pieces)
    rng.shuffle(shuffled)
    again = assign(iter(shuffled), mesh, unit_of=dict(sorted(units.items(), reverse=True)), **options)
    assert again == plan
    assert again.digest == plan.digest
    assert OwnershipPlan.from_json(plan.to_json()) == plan
    assert plan.difference(again) == []


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 4))
@example([7, 10, 16, 16, 34, 44, 60], 3)  # needs three bins to trade at once
def test_small_cases_reach_the_optimum_found_by_trying_everything(weights, n):
    loads = {(0,) * n}
    for w in weights:
        loads = {tuple(sorted((*load[:b], load[b] + w, *load[b + 1 :]))) for load in loads for b in range(n)}
    optimum = min(load[-1] for load in loads)
    assert packing_bound(weights, n) <= optimum
    bins = pack(weights, weights, n)
    assert sorted(i for b in bins for i in b) == list(range(len(weights)))
    assert max(sum(weights[i] for i in b) for b in bins) == optimum


@pytest.mark.parametrize(
    ("costs", "n", "bound"),
    [
        ([10, 1, 1], 2, 10),  # the largest piece
        ([3, 3, 3, 3], 2, 6),  # the mean
        ([5, 5, 5, 1], 3, 6),  # c3 + c4: someone has two of the four
        ([7, 7, 7, 7, 7], 2, 21),  # three of the first five
        ([1], 1, 1),
    ],
)
def test_packing_bound_by_hand(costs, n, bound):
    assert packing_bound(costs, n) == bound
    assert packing_bound(reversed(costs), n) == bound


@pytest.mark.parametrize(
    ("model", "n", "ratio"), [("llama3_8b", 12, 1.005), ("llama3_70b", 24, 1.001), ("qwen3_32b", 24, 1.005)]
)
def test_exchanges_improve_on_longest_first(model, n, ratio):
    # Longest first alone ends at 1.022, 1.010 and 1.024 here.
    plan = assign(MODELS[model], MeshSpec(n, n, 8))
    assert plan.largest_cost <= ratio * plan.lower_bound


def test_first_fit_and_exchanges_by_size_have_their_cases():
    # 144 items of five kinds in 70 bins. From longest first alone exchanges end at 1330; without the exchanges by size
    # the largest bin has size 94.
    kinds = {(272, 3): 29, (362, 26): 25, (514, 42): 38, (768, 15): 21, (968, 26): 31}
    weights, sizes = zip(*[kind for kind, count in kinds.items() for _ in range(count)], strict=True)
    bins = pack(weights, sizes, 70)
    assert max(sum(weights[i] for i in b) for b in bins) <= 1282
    assert max(sum(sizes[i] for i in b) for b in bins) <= 84


def needs_more_bins(weights: list[int], n: int, capacity: int) -> bool:
    """Proof by dual feasible functions that no packing into n bins of this capacity exists (False: no proof found).

    Weights below e count nothing and those above capacity - e a whole bin; of the rest, (k+1) w / capacity is rounded
    down to k-ths of a bin.
    """
    kinds = Counter(weights)
    for e in {w for w in kinds if 2 * w <= capacity} | {0}:
        for k in range(1, 12):
            total = Fraction(0)
            for w, count in kinds.items():
                if w > capacity - e:
                    total += count
                elif w >= e:
                    part = Fraction((k + 1) * w, capacity)
                    total += count * (Fraction(w, capacity) if part.denominator == 1 else Fraction(int(part), k))
            if total > n:
                return True
    return False


@pytest.mark.parametrize("n", [8, 16, 32, 64, 128, 256, 512, 1024])
@pytest.mark.parametrize("model", MODELS)
def test_real_models_are_balanced_to_the_bound(model, n):
    pieces = MODELS[model]
    plan = assign(pieces, MeshSpec(n, 8, 8), unit_of=layer_units(pieces))
    ratio = plan.largest_cost / plan.lower_bound
    if ratio > 1.02:
        # 240 large pieces of 70B on 256 ranks: a bin with one has room for one more piece at most, which the packing
        # bound does not see. Then the assignment must be optimal to 1 %.
        assert (model, n) == ("llama3_70b", 256)
        assert needs_more_bins(list(plan.costs), n, int(plan.largest_cost / 1.01))
    assert plan.idle_owners == max(0, n - len(pieces))


def least_heaviest(weights: list[int], sizes: list[int], n: int, cap: int) -> int:
    """The optimum of `pack`, by OR-tools: how many items of each kind every bin holds."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model", reason="the exact solver needs ortools (extra dev)")
    kinds = Counter(zip(weights, sizes, strict=True))
    model = cp_model.CpModel()
    heaviest = model.new_int_var(0, sum(weights), "")
    held = [{kind: model.new_int_var(0, count, "") for kind, count in kinds.items()} for _ in range(n)]
    loads = [sum(w * count for (w, _), count in bin_.items()) for bin_ in held]
    for kind, count in kinds.items():
        model.add(sum(bin_[kind] for bin_ in held) == count)
    for bin_, load in zip(held, loads, strict=True):
        model.add(load <= heaviest)
        model.add(sum(size * count for (_, size), count in bin_.items()) <= cap)
    for a, b in zip(loads, loads[1:], strict=False):  # bins are interchangeable
        model.add(a >= b)
    model.minimize(heaviest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.max_deterministic_time = 1, 20
    assert solver.solve(model) == cp_model.OPTIMAL
    return int(solver.objective_value)


def test_the_largest_owner_is_within_one_percent_of_the_exact_optimum():
    # Few kinds, as in transformers; with every second case under a cap on sizes that binds.
    rng = random.Random(0)
    for case in range(30):
        n = rng.randint(2, 6)
        kinds = [(rng.randint(10, 1000), rng.randint(1, 40)) for _ in range(rng.randint(2, 5))]
        weights, sizes = zip(*(rng.choice(kinds) for _ in range(rng.randint(n, 4 * n))), strict=True)
        free = pack(weights, sizes, n)
        cap = sum(sizes)
        if case % 2:
            cap = max(sum(sizes[i] for i in b) for b in free) - 1
        bins = pack(weights, sizes, n, cap)
        if bins is not None:
            heaviest = max(sum(weights[i] for i in b) for b in bins)
            assert heaviest <= 1.01 * least_heaviest(weights, sizes, n, cap), (case, weights, sizes, n, cap)


def fits(weights: list[int], n: int, capacity: int) -> bool:
    """Whether n bins of this capacity hold all, by OR-tools: how many bins have each content that has no room left."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model", reason="the exact solver needs ortools (extra dev)")
    counts = sorted(Counter(weights).items(), reverse=True)
    contents: list[tuple[int, ...]] = [()]
    for weight, count in counts:
        room = [(c, capacity - sum(k * w for k, (w, _) in zip(c, counts, strict=False))) for c in contents]
        contents = [(*c, k) for c, left in room for k in range(min(count, left // weight) + 1)]
    full = [
        c
        for c in contents
        if all(
            k == count or sum(j * w for j, (w, _) in zip(c, counts, strict=True)) + weight > capacity
            for k, (weight, count) in zip(c, counts, strict=True)
        )
    ]
    model = cp_model.CpModel()
    bins = [model.new_int_var(0, n, "") for _ in full]
    model.add(sum(bins) <= n)
    for i, (_, count) in enumerate(counts):
        model.add(sum(b * c[i] for b, c in zip(bins, full, strict=True)) >= count)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.max_deterministic_time = 1, 20
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    return status == cp_model.OPTIMAL


@pytest.mark.parametrize(("model", "n"), [("llama3_70b", 64), ("llama3_70b", 256), ("llama3_405b", 64), ("moe", 1024)])
def test_where_the_bound_is_missed_the_solver_finds_nothing_better_either(model, n):
    pieces = {**MODELS, "llama3_405b": LLAMA3_405B, "moe": QWEN3_30B_A3B}[model]
    plan = assign(pieces, MeshSpec(n, 8, 8), unit_of=layer_units(pieces))
    assert plan.largest_cost > 1.01 * plan.lower_bound
    assert fits(list(plan.costs), n, plan.largest_cost)
    assert not fits(list(plan.costs), n, int(plan.largest_cost / 1.01))


def test_proof_of_optimality_accepts_feasible_capacities():
    assert not needs_more_bins([6, 6, 4, 4], 2, 10)
    assert needs_more_bins([6, 6, 4, 4], 2, 9)


EIGHT_KINDS = {
    "wq": (4096, 4096),
    "wk": (1024, 4096),
    "wv": (1024, 4096),
    "wo": (4096, 4096),
    "w1": (14336, 4096),
    "w2": (4096, 14336),
    "w3": (14336, 4096),
    "wgate": (1024, 4096),
}


def test_round_robin_gives_every_rank_one_kind_and_ours_does_not():
    # Case 25: eight kinds of matrices on eight ranks.
    pieces = [Piece(f"layers.{i:02d}.{k}", 0, s[0], s) for i in range(32) for k, s in EIGHT_KINDS.items()]
    dealt = assign(pieces, MeshSpec(8, 8, 8), balance="round_robin")
    assert all(len({p.name.split(".")[2] for p in dealt.pieces_of(r)}) == 1 for r in range(8))
    assert 2.0 < dealt.imbalance < 2.2
    ours = assign(pieces, MeshSpec(8, 8, 8))
    assert ours.largest_cost <= ours.lower_bound * 1.0001
    by_numel = assign(pieces, MeshSpec(8, 8, 8), balance="numel")
    assert max(by_numel.owner_bytes()) <= 1.001 * sum(by_numel.owner_bytes()) / 8


def test_bytes_and_sources_are_spread_where_cost_leaves_a_choice():
    mesh = MeshSpec(64, 8, 8)
    plan = assign(LLAMA3_8B, mesh, unit_of=layer_units(LLAMA3_8B))
    by_node = [0] * 8
    by_source = defaultdict(lambda: [0] * 8)
    for p, owner, unit in zip(plan.pieces, plan.owners, plan.units, strict=True):
        by_node[mesh.node(owner)] += p.numel
        by_source[unit][owner % 8] += p.numel
    assert max(by_node) <= 1.01 * sum(by_node) / 8
    # Five pieces on eight sources: the busiest source should send one of the largest pieces and nothing else.
    alone = [max(sources) == 14336 * 4096 for sources in by_source.values()]
    assert sum(alone) >= 31
    assert all(sum(x > 0 for x in sources) >= 3 for sources in by_source.values())
    total_by_source = [sum(s[k] for s in by_source.values()) for k in range(8)]
    assert max(total_by_source) <= 1.01 * sum(total_by_source) / 8


def test_nodes_publish_alike():
    # The cheapest pieces are the largest: 40 + 10 rows on one node, 30 + 20 on the other.
    pieces = [Piece(f"p{m}", 0, m, (m, 8)) for m in (10, 20, 30, 40)]
    cost = CostModel(measured={"10x8": 4.0, "20x8": 3.0, "30x8": 2.0, "40x8": 1.0})
    plan = assign(pieces, MeshSpec(4, 2, 2), cost=cost)
    rows = [sum(p.shape[0] for rank in node for p in plan.pieces_of(rank)) for node in ((0, 1), (2, 3))]
    assert rows == [50, 50]


def test_equal_cost_prefers_fewer_bytes_per_owner():
    # Equal costs from a file; the large matrices must not meet on one owner.
    pieces = [Piece(n, 0, m, (m, 8)) for n, m in (("a", 64), ("b", 64), ("c", 8), ("d", 8))]
    cost = CostModel(measured={"64x8": 1.0, "8x8": 1.0})
    plan = assign(pieces, MeshSpec(2, 2, 2), cost=cost)
    assert plan.largest_cost == 2 * 10**12
    assert plan.owner_bytes() == (12 * 72 * 8, 12 * 72 * 8)


def test_more_owners_than_pieces_and_one_rank():
    pieces = OwnedSpec("w", (16, 8)).pieces() + OwnedSpec("x", (16, 8)).pieces()
    plan = assign(pieces, MeshSpec(12, 4, 8))
    assert plan.idle_owners == 10
    assert plan.imbalance == pytest.approx(6)
    assert {len(plan.pieces_of(r)) for r in range(12)} == {0, 1}
    alone = assign(pieces, MeshSpec(1, 1, 1))
    assert alone.owners == (0, 0)
    assert alone.imbalance == 1
    with pytest.raises(IndexError, match=r"owner 1 .*0\.\.0"):
        alone.pieces_of(1)
    with pytest.raises(KeyError, match="nothing"):
        alone.owner_of("nothing")


def test_replica_ownership_assigns_within_the_shard_group_whatever_the_replicas():
    plans = [assign(LLAMA3_8B, MeshSpec(8 * r, 8, 8), ownership="replica") for r in (1, 4)]
    assert plans[0].owners == plans[1].owners
    assert plans[1].n_owners == 8
    assert plans[1].imbalance < 1.001


def test_experts_are_pieces_of_their_own():
    pieces = OwnedSpec("experts.w1", (16, 64, 32)).pieces()
    plan = assign(pieces, MeshSpec(8, 8, 8))
    assert sorted(Counter(plan.owners).values()) == [2] * 8


def test_memory_cap_holds_on_every_owner_of_a_512_rank_mesh():
    # Case 24: a remainder must not pile up on one rank.
    uncapped = assign(LLAMA3_70B, MeshSpec(512, 8, 8))
    largest = max(p.numel for p in LLAMA3_70B) * OWNER_BYTES_PER_ELEMENT
    assert max(uncapped.owner_bytes()) <= largest
    # 64 ranks: going by cost alone lets some owner exceed this cap, which by bytes can be met.
    free = assign(LLAMA3_8B, MeshSpec(64, 8, 8))
    cap = max(free.owner_bytes()) - 1
    with pytest.raises(ValueError, match=r"memory_cap_bytes .*wo|memory_cap_bytes .*w[123]"):
        assign(LLAMA3_8B, MeshSpec(64, 8, 8), memory_cap_bytes=cap)  # 96 large pieces on 64 ranks: two somewhere
    pieces = [Piece(f"p{i}", 0, m, (m, 4)) for i, m in enumerate((40, 40, 10, 10, 10, 10))]
    cost = CostModel(measured={"40x4": 1.0, "10x4": 2.0})
    free, capped = (assign(pieces, MeshSpec(3, 3, 3), cost=cost, memory_cap_bytes=c) for c in (None, 40 * 4 * 12))
    assert max(capped.owner_bytes()) == 40 * 4 * 12 < max(free.owner_bytes())
    assert capped.largest_cost > free.largest_cost
    with pytest.raises(ValueError, match=r"memory_cap_bytes 1919 .*p0\[000000\] alone takes 1920"):
        assign(pieces, MeshSpec(3, 3, 3), memory_cap_bytes=1919)
    with pytest.raises(ValueError, match="fullest owner would hold"):
        assign(pieces, MeshSpec(2, 2, 2), balance="round_robin", memory_cap_bytes=1920)


def test_cost_formula():
    piece = OwnedSpec("wqkv", (128, 64), MatrixLayout(2, (32, 16, 16))).pieces()[0]
    ns = 5 * (4 * 64**3 + 2 * 64**3) + 2 * 5 * (4 * 32 * 32 * 64 + 2 * 32**3)
    assert CostModel().cost(piece) == ns + ELEMENTWISE_BYTES * FLOPS_PER_BYTE * 128 * 64
    assert CostModel(elementwise_bytes=0).cost(piece) == ns
    assert CostModel(flops=lambda m, n: m * n, elementwise_bytes=0).cost(piece) == 128 * 64


def test_default_formula_is_that_of_standard_newton_schulz():
    five = newton_schulz.NewtonSchulz()
    for m, n in ((64, 64), (96, 32), (32, 200)):
        if newton_schulz.choose_form(m, n, five, "cpu") == "standard":
            assert standard_flops(m, n) == newton_schulz.flops(m, n, five)


def test_measured_costs_come_from_the_file_and_are_part_of_the_digest(tmp_path):
    pieces = OwnedSpec("a", (8, 4)).pieces() + OwnedSpec("b", (4, 8)).pieces() + OwnedSpec("c", (4, 4)).pieces()
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"8x4": 2e-3, "4x4": 5e-3}))
    plan = assign(pieces, MeshSpec(2, 2, 2), cost=CostModel.from_file(file))
    assert plan.costs == (2 * 10**9, 2 * 10**9, 5 * 10**9)  # either orientation, picoseconds
    assert plan.largest_cost == 5 * 10**9
    # An entry no piece uses still changes the digest: the ranks read different files.
    file.write_text(json.dumps({"8x4": 2e-3, "4x4": 5e-3, "9x9": 1.0}))
    other = assign(pieces, MeshSpec(2, 2, 2), cost=CostModel.from_file(file))
    assert other.digest != plan.digest
    assert any("cost_file" in line for line in plan.difference(other))
    file.write_text(json.dumps({"8x4": 2e-3, "4x4": 5e-3, "forms": {"8x4": "gram"}}))
    formed = CostModel.from_file(file)
    assert formed.forms == {"8x4": "gram"}
    formed = assign(pieces, MeshSpec(2, 2, 2), cost=formed)
    assert formed.costs == plan.costs and formed.digest != plan.digest  # ranks with other forms would run other bits
    file.write_text(json.dumps({"8x4": 2e-3}))
    with pytest.raises(ValueError, match=r"^c: cost_file .*costs\.json has no entry 4x4"):
        assign(pieces, MeshSpec(2, 2, 2), cost=CostModel.from_file(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "invalid JSON"),
        ("[1]", "expected a JSON object"),
        ("{}", "expected a JSON object"),
        ('{"8by4": 1}', "'8by4' is not of the form"),
        ('{"8x4": 0}', "8x4 must be positive seconds, got 0"),
        ('{"8x4": true}', "8x4 must be positive seconds, got True"),
        ('{"8x4": "1"}', "8x4 must be positive seconds, got '1'"),
        ('{"8x4": NaN}', "8x4 must be positive seconds, got nan"),
        ('{"8x4": 1, "forms": {"8x4": "auto"}}', "forms must be an object"),
        ('{"8x4": 1, "forms": ["gram"]}', "forms must be an object"),
        ('{"8x4": 1, "forms": {"4x4": "gram"}}', "forms has 4x4, which was not measured"),
    ],
)
def test_bad_cost_files_are_refused(tmp_path, text, message):
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        CostModel.from_file(file)


SMALL = [p for s in (OwnedSpec("a", (8, 4)), OwnedSpec("b", (6, 4), MatrixLayout(1, (4, 2)))) for p in s.pieces()]
BASE = {"pieces": SMALL, "mesh": MeshSpec(4, 2, 2)}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"mesh": MeshSpec(8, 2, 2)}, "mesh.world: 4 against 8"),
        ({"mesh": MeshSpec(4, 4, 2)}, "mesh.shard_size: 2 against 4"),
        ({"mesh": MeshSpec(4, 2, 4)}, "mesh.ranks_per_node: 2 against 4"),
        ({"balance": "numel"}, "options.balance: 'cost' against 'numel'"),
        ({"ownership": "replica"}, "options.ownership: 'global' against 'replica'"),
        ({"memory_cap_bytes": 10**6}, "options.memory_cap_bytes: None against 1000000"),
        ({"unit_of": {"a[000000]": 0, "b[000000]": 1}}, "b[000000]: unit 0 against 1"),
        ({"cost": CostModel(flops=lambda m, n: 1)}, "a[000000]: cost"),
        ({"cost": CostModel(flops_per_byte=201)}, "options.cost"),
        ({"pieces": [SMALL[0]]}, "b[000000]: shape [6, 4] here, absent there"),
        ({"pieces": [*SMALL, Piece("c", 0, 1, (1, 1))]}, "c[000000]: absent here, shape [1, 1] there"),
        ({"pieces": [SMALL[0], Piece("b", 0, 6, (6, 5), SMALL[1].layout)]}, "b[000000]: shape [6, 4] against [6, 5]"),
        ({"pieces": [SMALL[0], replace(SMALL[1], rider=True)]}, "b[000000]: rider False against True"),
        ({"pieces": [SMALL[0], Piece("b", 0, 6, (6, 4))]}, "b[000000]: rows [4, 2] against []"),
        (
            {"pieces": [SMALL[0], Piece("b", 0, 6, (6, 4), MatrixLayout(2, (2, 1)))]},
            "b[000000]: groups 1 against 2",
        ),
    ],
)
def test_every_input_changes_the_digest_and_the_difference_names_it(change, line):
    def make(pieces, mesh, **options):
        return assign(pieces, mesh, **options)

    plan, other = make(**BASE), make(**{**BASE, **change})
    assert plan.digest != other.digest
    assert any(text.startswith(line) for text in plan.difference(other)), plan.difference(other)


def test_owners_are_compared_when_all_else_agrees_and_long_differences_are_cut():
    plan = assign(LLAMA3_8B, MeshSpec(8, 8, 8))
    moved = replace(plan, owners=(plan.owners[0] + 1 if plan.owners[0] < 7 else 0, *plan.owners[1:]))
    assert moved.digest != plan.digest
    assert plan.difference(moved) == [
        f"{plan.pieces[0].key}: owner {plan.owners[0]} against {moved.owners[0]}",
    ]
    renamed = assign([replace(p, name=f"model.{p.name}") for p in LLAMA3_8B], MeshSpec(8, 8, 8))
    lines = plan.difference(renamed)
    assert len(lines) == 9
    assert lines[-1].startswith("... and 312 more")


def test_json_has_the_stable_names_and_refuses_an_edited_file():
    plan = assign(LLAMA3_8B, MeshSpec(16, 8, 8), unit_of=layer_units(LLAMA3_8B))
    data = json.loads(plan.to_json())
    assert data["world"] == 16
    assert data["pieces"] == 160
    assert data["matrices"] == 160 + 2 * 32
    assert data["imbalance"] == data["largest_cost"] / data["mean_cost"]
    assert {"lower_bound", "idle_owners", "digest"} <= data.keys()
    assert plan.summary().items() <= data.items()
    data["owned"][0]["owner"] = (data["owned"][0]["owner"] + 1) % 16
    with pytest.raises(ValueError, match="it was edited"):
        OwnershipPlan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pieces": []}, "no pieces to assign"),
        ({"balance": "luck"}, "balance must be one of cost, numel, round_robin, got 'luck'"),
        ({"ownership": "none"}, "ownership must be one of global, replica, got 'none'"),
        ({"unit_of": {"a[000000]": 0}}, r"^b\[000000\]: belongs to no unit"),
        ({"pieces": [*SMALL, SMALL[0]]}, r"^a: rows \[0, 8\) and \[0, 8\) overlap"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        (lambda pieces, mesh, **options: assign(pieces, mesh, **options))(**{**BASE, **arguments})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 1, 1), "world must be a positive integer, got 0"),
        ((6, 4, 2), "shard_size 4 does not divide world 6"),
        ((4, True, 2), "shard_size must be a positive integer, got True"),
        ((4, 2, 1.0), "ranks_per_node must be a positive integer, got 1.0"),
    ],
)
def test_bad_meshes_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        MeshSpec(*values)


def test_a_hundred_thousand_pieces_on_four_thousand_ranks():
    specs = []
    for i in range(92):
        for w, shape in (("w1", (361, 1536, 4096)), ("w2", (361, 4096, 1536)), ("w3", (361, 1536, 4096))):
            specs.append(OwnedSpec(f"layers.{i}.experts.{w}", shape))
        specs.append(OwnedSpec(f"layers.{i}.wo", (4096, 8192)))
        specs.append(OwnedSpec(f"layers.{i}.wq", (8192, 4096)))
        specs.append(OwnedSpec(f"layers.{i}.wk", (512, 4096)))
        specs.append(OwnedSpec(f"layers.{i}.router.gate", (361, 4096)))
    pieces = [p for s in specs for p in s.pieces()]
    random.Random(0).shuffle(pieces)
    units = layer_units(pieces)
    begin = time.process_time()
    plan = assign(pieces, MeshSpec(4096, 8, 8), unit_of=units)
    spent = time.process_time() - begin
    print(f"{len(pieces)} pieces: {spent:.2f} s, largest / bound {plan.largest_cost / plan.lower_bound:.4f}")
    assert len(pieces) > 100_000
    assert plan.largest_cost <= 1.02 * plan.lower_bound
    assert spent < 5
