"""Every access of a step is ordered by streams, under every setting, and the ranks issue one total order (invariant 5).

Steps run on recording lanes (`recording.py`), which execute each operation where it is issued. So a rank that issued
operations in another order than its peers would wait for them forever.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchtitan_dmuon as dmuon
from torchtitan_dmuon.runtime import engine as engine_module
from torchtitan_dmuon.runtime.engine import Engine
from torchtitan_dmuon.runtime.lanes import Ticket
from torchtitan_dmuon.runtime.schedule import GatherOrder, ReduceQueue
from torchtitan_dmuon.runtime.unit import Unit
from torchtitan_dmuon.runtime.wires import LogEntry, Logged

from .ranks import run_ranks
from .recording import Recorder, RecordingLane
from .test_runtime import Tower, backward, inputs, make_muon, own, tower


@contextlib.contextmanager
def recorded(model: nn.Module, *shape: int, **options: Any) -> Iterator[tuple[Recorder, dmuon.OwnedMatrices]]:
    """The model's matrices owned, on recording lanes, also those that an optimizer adds."""
    make_lane = engine_module.make_lane
    with Recorder() as recorder:
        engine_module.make_lane = lambda name, *_, **__: RecordingLane(recorder, name)  # type: ignore[assignment]
        try:
            yield recorder, own(model, *shape, **options)
        finally:
            engine_module.make_lane = make_lane


def checkpointed() -> Tower:
    model = tower()
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def steps(
    model: nn.Module,
    owned: dmuon.OwnedMatrices,
    rank: int,
    micros: int = 1,
    skip: tuple[str, ...] = (),
    defer: bool = True,
) -> None:
    """Two steps, an evaluation and publishes that nobody gathers; rank 1 skips units from the second backward on.
    Without ``defer`` any backward may be the last, and its early updates are dropped by the next."""
    matrix = owned.build_optimizer(make_muon)
    for step in range(2):
        for micro in range(micros):
            if defer:
                owned.set_is_last_backward(micro == micros - 1)
            backward(model, 10 * step + micro, rank, skip=skip if rank == 1 and step + micro else ())
        owned.clip_grad_norm_(model, 1.0)
        matrix.step()
        owned.publish()
    with torch.no_grad():
        model(inputs(99, rank))
    owned.engine.finish_reduces()  # compares what was issued


Setting = tuple[tuple[int, int], dict[str, Any], dict[str, Any]]  # mesh, options of own_matrices, options of `steps`
SETTINGS: dict[str, Setting] = {
    "recomputed, one prefetched": ((2, 2), {}, {"skip": ("2",)}),
    "sync, none prefetched": ((2, 2), {"publish": "sync", "prefetch": 0}, {"skip": ("first", "0", "2")}),
    "kept": ((2, 2), {"reshard_after_forward": False}, {"skip": ("idle 1",), "micros": 2}),
    "shard groups over nodes": ((1, 4), {"prefetch": 2, "clip": "per_matrix"}, {"micros": 2}),
    "replica": ((2, 2), {"ownership": "replica", "clip": "adamw_only"}, {"skip": ("0",), "micros": 2, "defer": False}),
    "flat": ((2, 2), {"routing": "flat", "select": r"layers\.0\.(up|down)"}, {}),
    "collectives": ((2, 2), {"transport": "collective", "prefetch": 2}, {"skip": ("1",), "micros": 2}),
    "padded collectives": ((1, 4), {"transport": "padded", "holders": "node"}, {}),
}


def _ordered(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    os.environ["DMUON_DEBUG"] = "1"
    found = {}
    for name in names:
        shape, options, how = SETTINGS[name]
        model = checkpointed() if "recomputed" in name else tower()
        with recorded(model, *shape, **options) as (recorder, owned):
            log: list[LogEntry] = []
            wires = owned.engine.transport.wires
            for phase, inner in wires.items():
                wires[phase] = Logged(phase, log, inner)
            steps(model, owned, rank, **how)
        assert recorder.operations > 400
        assert ("clip" in options) == (recorder.clock("update")["update"] > 0)  # operations in the lane for early work
        found[name] = recorder.conflicts, log
    return found


def test_every_access_of_a_step_is_ordered_and_ranks_issue_one_total_order() -> None:
    by_rank = run_ranks(_ordered, 4, list(SETTINGS), ranks_per_node=2, limit=60)
    for name in SETTINGS:
        for rank, found in enumerate(by_rank):
            assert found[name][0] == [], f"{name}, rank {rank}"
            for peer in range(4):
                sent = [(e[0], e[4]) for e in found[name][1] if e[1:3] == ("send", peer)]
                received = [(e[0], e[4]) for e in by_rank[peer][name][1] if e[1:3] == ("recv", rank)]
                assert sent == received, f"{name}, rank {rank} to {peer}"


# ---- planted faults: each is one wait, or what stands for one, less ----


def _forget_after(engine: Engine) -> None:
    submit = engine._lanes["gather"].submit
    engine._lanes["gather"].submit = lambda task, after=(): submit(task)


def _forget_before_free(engine: Engine) -> None:
    engine._free = lambda unit: unit.free() if unit.gathered or unit.gathering else None


def _forget_contribution(engine: Engine) -> None:
    class Forgetful(deque):
        def append(self, item: tuple[Ticket, torch.Tensor]) -> None:
            super().append((item[0], torch.empty(0)))

    engine._contributions = Forgetful()


def _forget_node_sums(engine: Engine) -> None:
    class Forgetful(deque):
        def append(self, item: tuple[Ticket, dict]) -> None:
            super().append((item[0], {}))

    engine._node_sums = Forgetful()


def _forget_earlier_publish(engine: Engine) -> None:
    publish = engine.publish

    def forgetful(unit: Unit) -> None:
        unit.published = None
        publish(unit)

    engine.publish = forgetful


def _forget_waits(engine: Engine, of: str) -> None:
    wait = engine.exposure.wait
    engine.exposure.wait = lambda phase, ticket: None if phase == of else wait(phase, ticket)


def _forget_level_2(engine: Engine) -> None:
    update_early = engine.update_early

    def forgetful(early: Callable[[Unit], Any]) -> None:
        update_early(early)
        submit = engine._early_lane.submit
        engine._early_lane.submit = lambda task, after=(): submit(task)

    engine.update_early = forgetful


FAULTS: dict[str, tuple[Callable[[Engine], None], str]] = {
    "a gather does not wait for the publish": (_forget_after, "gather reads .* what publish wrote"),
    "a free does not wait for the gather": (_forget_before_free, "compute reuses memory that gather"),
    "a contribution is dropped before its reduce": (_forget_contribution, "compute reuses memory that reduce"),
    "node sums are dropped before level 2": (_forget_node_sums, "reduce reuses memory that reduce_between_nodes"),
    "a publish does not wait for the last one": (
        _forget_earlier_publish,
        "compute writes .* what publish (read|wrote)",
    ),
    "a step does not wait for the reduces": (
        functools.partial(_forget_waits, of="reduce"),
        "compute reads .* what reduce_between_nodes wrote",
    ),
}
EARLY_FAULTS: dict[str, tuple[Callable[[Engine], None], str]] = {  # where updates are made during backward
    "an early update does not wait for level 2": (_forget_level_2, "update reads .* what reduce_between_nodes wrote"),
    "a step does not wait for the early updates": (
        functools.partial(_forget_waits, of="update"),
        "compute reads .* what update wrote",
    ),
}


def _faulty(rank: int, world: int) -> dict[str, list[str]]:
    found = {}
    for name, (plant, _) in (FAULTS | EARLY_FAULTS).items():
        model = tower()
        with recorded(model, 2, 2, clip="adamw_only" if name in EARLY_FAULTS else "joint") as (recorder, owned):
            plant(owned.engine)
            steps(model, owned, rank, skip=("1", "2"))  # the last: it is freed as soon as it has been asked for
        found[name] = recorder.conflicts
    return found


def test_each_missing_wait_is_found() -> None:
    by_rank = run_ranks(_faulty, 4, ranks_per_node=2, limit=60)
    for name, (_, expected) in (FAULTS | EARLY_FAULTS).items():
        lines = [line for found in by_rank for line in found[name]]
        assert any(re.search(expected, line) for line in lines), (name, sorted(set(lines))[:10])


# ---- the check for debugging ----


def _crossed(rank: int, world: int, debug: str) -> str:
    os.environ["DMUON_DEBUG"] = debug
    model = tower()
    owned = own(model, 2, 1, per_node=1)  # one rank a cell: gathers send nothing, so a wrong order does no harm
    matrix = owned.build_optimizer(make_muon)
    try:
        for step in range(2):
            if step == 1:
                for index in (1, 2) if rank == 0 else (2, 1):
                    owned.engine._gather(index)
                owned.engine.free_all()
            backward(model, step, rank)
            matrix.step()
    except RuntimeError as error:
        return str(error)
    finally:
        owned.close()
    return ""


def test_debugging_finds_the_rank_that_issues_in_another_order() -> None:
    first, second = run_ranks(_crossed, 2, "1", ranks_per_node=1)
    assert first == second
    assert "ranks 0 and 1 of the data-parallel group issued different operations in step 1:" in first
    assert "the gather of layers.0 on rank 0, the gather of layers.1 on rank 1" in first
    assert run_ranks(_crossed, 2, "", ranks_per_node=1) == ["", ""]


# ---- the rule behind it, without ranks ----


def test_a_rank_that_skips_a_unit_puts_its_reduce_between_the_same_gathers() -> None:
    def run(asked: list[int], prefetch: int) -> list[str]:
        issued: list[str] = []
        queue = ReduceQueue(lambda unit: issued.append(f"reduce {unit}"))
        gather = lambda unit: issued.append(f"gather {unit}")  # noqa: E731
        order = GatherOrder(prefetch, gather, [4, 3, 2, 1, 0], queue.give_up_before, queue.passed)
        order.begin()
        queue.begin([4, 3, 2, 1, 0], {unit: order.end_of(unit) for unit in order.units})
        for unit in asked:
            order.request(unit)
            queue.ready([unit])
        queue.ready(queue.sequence)
        order.end()
        queue.finish()
        return issued

    for prefetch in range(4):
        even = run([4, 3, 2, 1, 0], prefetch)
        for asked in ([4, 3, 1, 0], [3, 2, 1, 0], [4, 3, 2, 1], [4, 0], [2], [4, 1], []):
            assert run(asked, prefetch) == even, (prefetch, asked)
