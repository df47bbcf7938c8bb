"""Owned training equals one process (DESIGN invariant 1), and itself to the last bit where nothing may differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .parity_table import MESHES, RIDERS, Case, NotEqual, cases_of, check, check_equal, run_cases

QUAD = (2, 2, 2)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"{m[0]}x{m[1]}")
def test_every_mesh_equals_one_process(mesh: tuple[int, int, int]) -> None:
    cases = cases_of(mesh)[: 6 if mesh == QUAD else 3]
    for case, outcome in zip(cases, run_cases(cases)):
        check(case, outcome)


# Two levels with a ragged last node, one node, a node per rank, and the other placements of holders and owners.
@pytest.mark.parametrize(
    "case",
    [
        Case(3, 1, 2).but(riders=RIDERS),
        Case(1, 3, 2).but(holders="node"),
        Case(2, 2, 1).but(holders="node"),
        Case(2, 2, 2, micros=2).but(ownership="replica", riders=RIDERS),
        Case(1, 1, 1),
    ],
    ids=lambda c: f"{c.replicas}x{c.shards} {c.ranks_per_node} a node {dict(c.options)}",
)
def test_other_node_shapes_equal_one_process(case: Case) -> None:
    case = replace(case, steps=2)
    check(case, run_cases([case])[0])


def test_bit_equal_across_routes_holders_order_of_publish_prefetch_and_plans() -> None:
    base = Case(*QUAD, steps=3, micros=2).but(riders=RIDERS)
    variants = [
        base.but(routing="flat"),
        base.but(holders="node"),
        base.but(publish="sync", prefetch=0),
        base.but(prefetch=2, reshard_after_forward=False),
        base.but(balance="numel"),
        base.but(balance="round_robin", routing="flat", holders="node"),
    ]
    first, *others = run_cases([base, *variants])
    for variant, other in zip(variants, others):
        check_equal(first, other, f"{dict(variant.options)} against the defaults")


def test_bit_equal_when_the_shard_group_spans_nodes() -> None:
    base = Case(1, 4, 2, steps=3)
    variants = [base.but(routing="flat"), base.but(holders="node"), base.but(holders="node", routing="flat")]
    first, *others = run_cases([base, *variants])
    for variant, other in zip(variants, others):
        check_equal(first, other, f"{dict(variant.options)} against the defaults")


def test_ten_repeats_are_bit_equal() -> None:  # CASES 14
    case = Case(1, 2, 2, steps=2).but(prefetch=2)
    first, *others = run_cases([case] * 10)
    for other in others:
        check_equal(first, other, "a repeat")


FAULTS = {
    "one matrix skipped": 1,
    "fused q, k, v as one matrix": 1,
    "divided by the world size once more": 1,
    "one rider skipped": 1,
    "one micro-batch dropped": 3,
    "one unit not published": 1,
}


def test_planted_faults_are_seen() -> None:
    sound = {micros: Case(*QUAD, micros=micros, steps=3) for micros in (1, 3)}
    faulty = [replace(sound[micros], fault=fault).but(riders=RIDERS) for fault, micros in FAULTS.items()]
    outcomes = run_cases([*sound.values(), *faulty])
    for case, outcome in zip(sound.values(), outcomes):
        check(case, outcome)
    for case, outcome in zip(faulty, outcomes[len(sound) :]):
        try:
            check(case, outcome)
        except NotEqual:
            continue
        pytest.fail(f"not seen: {case.fault}")


def test_a_difference_in_the_last_bit_is_seen() -> None:
    case = Case(1, 1, 1, steps=1)
    one, other = run_cases([case, case])
    weight = other.weights["layers.0.w1.weight"]
    weight.view(-1)[0] = weight.view(-1)[0].nextafter(weight.new_tensor(9.0))
    with pytest.raises(NotEqual, match="layers.0.w1.weight"):
        check_equal(one, other, "planted")
