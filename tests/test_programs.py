"""Units in any order and subset, on each rank another: programs equal one process, and what cannot be is refused."""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchtitan_dmuon as dmuon
from torchtitan_dmuon.runtime.schedule import Item, agreed_sequence

from . import programs
from .ranks import run_ranks
from .test_runtime import Tower, backward, inputs, make_muon, own, tower

SEEDS = st.lists(st.integers(0, 2**32 - 1), min_size=50, max_size=50, unique=True)


# Without shrinking: a program names itself, and one that hangs takes its time limit each time.
@settings(
    max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(SEEDS)
def test_random_programs_equal_one_process(seeds: list[int]) -> None:
    programs.check(seeds)


def test_seeds_once_found_wrong() -> None:
    # A shared weight beside FSDP2's modules, and units that only a later forward of one backward used, in the first
    # step.
    programs.check([5101, 10241, 10255])
    # A rank whose loss reaches no unit in the first of two forwards that a backward goes through.
    program = programs.draw(50007, 3, [mesh for mesh in programs.MESHES if mesh[0] * mesh[1] == 4], 1e-3)
    run_ranks(programs.job, 4, [(program, programs.expected(program))], True, ranks_per_node=2)


# ---- programs that were once found wrong ----

ALL = (0, 1, 2)
# Mesh, ties, what FSDP2 has, and the blocks of each rank in each step.
FOUND: dict[str, tuple[tuple[int, int], tuple[tuple[int, int], ...], str, tuple[tuple[tuple[int, ...], ...], ...]]] = {
    "a unit that no rank used in the first step": ((1, 2), (), "nothing", (((1, 2), (1, 2)), ((0, 1), (0, 2)))),
    "first units in the second step": ((1, 2), (), "nothing", (((2,), (2,)), (ALL, (2,)), ((2,), ALL))),
    "a shared weight, of which a rank skips a unit": ((1, 2), ((0, 2),), "nothing", ((ALL, ALL), (ALL, (0, 1)))),
    "first units skipped beside FSDP2": ((2, 2), (), "root", ((ALL,) * 4, (ALL, ALL, (2,), ALL))),
    "the same in the first step": ((2, 2), (), "root", ((ALL, ALL, (2,), ALL),) * 2),
    "a loss that reaches no unit": ((2, 2), (), "root", ((ALL, (), (2,), ALL),) * 2),
    "a shared weight beside FSDP2's modules, whose units some skip at once": (
        (1, 4),
        ((1, 2),),
        "modules",
        (((0, 1, 2), (1, 2), (0, 1), (0, 2)),) * 2,
    ),
    "each rank in an order of its own": (
        (1, 4),
        (),
        "root",
        (((0, 1, 2), (2, 1, 0), (1, 2), (2, 0, 1)), ((2, 0, 1), (0, 1, 2), (2, 0), (1, 0, 2))),
    ),
}


def _course(blocks: tuple[int, ...], sharded: str) -> programs.Course:
    """Block 0 before FSDP2's module in the middle, if it has one."""
    before = tuple(b for b in blocks if b == 0 and sharded == "modules")
    return before, tuple(b for b in blocks if b not in before)


@pytest.mark.parametrize("name", list(FOUND))
def test_programs_once_found_wrong(name: str) -> None:
    (replicas, shards), ties, sharded, steps = FOUND[name]
    drawn = programs.draw(0)
    for options in ({"prefetch": 0}, {"prefetch": 1}, {"prefetch": 1, "reshard_after_forward": False}):
        program = programs.dataclasses.replace(
            drawn,
            mesh=(replicas, shards, 2),
            blocks=3,
            middle=int(sharded == "modules"),
            ties=ties,
            stacks=False,
            checkpointing="none",
            sharded=sharded,
            input_grad=False,
            optimizer="sgd",
            max_norm=None,
            options=tuple({"clip": "joint", "riders": None, "reshard_after_forward": True, **options}.items()),
            steps=tuple((("one", (tuple(_course(blocks, sharded) for blocks in ranks),)),) for ranks in steps),
        )
        want = programs.expected(program)
        run_ranks(programs.job, replicas * shards, [(program, want)], False, ranks_per_node=2, limit=40)


# ---- the order that follows from what ranks asked for ----


def test_what_nobody_asked_for_keeps_its_declared_place() -> None:
    out, between, end = ("gather in backward", 0, 0), ("reduce", 3, 0), ("reduce", 0, 0)
    declared: list[Item] = [out, 4, 3, between, 2, 1, end]
    assert agreed_sequence([[out, 4, 1], [out, 4, 2]], declared, {1, 2, 3, 4}) == declared
    assert agreed_sequence([[], []], declared, {1, 2, 3, 4}) == declared
    assert agreed_sequence([[out, 4, between, 1], [out, 2, between]], declared, {1, 2, 4}) == [
        out, 4, 2, between, 1, end
    ]  # fmt: skip
    assert agreed_sequence([[1, 2], [1]], [0, 1, 2], {0, 1, 2}) == [0, 1, 2]
    assert agreed_sequence([[2, 0], [1]], [0, 1, 2], {0, 1, 2}, first={1}) == [1, 2, 0]


# ---- nothing is exchanged where passes repeat ----


def _exchanges(rank: int, world: int) -> tuple[list[int], list[int]]:
    model = tower()
    owned = own(model, 2, 2)
    matrix = owned.build_optimizer(make_muon)
    counts: list[int] = []
    gather = owned.engine.control.all_gather

    def counted(value: Any) -> list[Any]:
        counts[-1] += 1
        return gather(value)

    owned.engine.control.all_gather = counted  # type: ignore[method-assign]
    for step in range(4):
        counts.append(0)
        backward(model, step, rank, skip=("1",) if rank == 1 and step > 1 else ())
        owned.clip_grad_norm_(model, 1.0)
        matrix.step()
    owned.close()
    return counts, [owned.engine.control.board._posts]


def test_ranks_agree_once() -> None:
    assert run_ranks(_exchanges, 4, ranks_per_node=2) == [([1, 0, 0, 0], [0])] * 4


# ---- a unit used again ----


class Again(Tower):
    def forward(self, x: torch.Tensor, skip: tuple[str, ...] = (), again: bool = False) -> torch.Tensor:
        x = super().forward(x, skip)
        return self.layers[0](x) if again else x


def _again(rank: int, world: int, alike: bool) -> str:
    torch.manual_seed(0)
    model = Again()
    owned = own(model, 1, 2, timeout=datetime.timedelta(seconds=3))
    matrix = owned.build_optimizer(make_muon)
    try:
        for step in range(3):
            again = step == 1 and (alike or rank == 0)
            backward(model, step, rank, again=again)
            matrix.step()
    except RuntimeError as error:
        return str(error)
    finally:
        owned.close()
    return ""


def test_a_unit_used_again_on_some_ranks_is_refused_in_words() -> None:
    assert run_ranks(_again, 2, True) == ["", ""]
    asks, other = run_ranks(_again, 2, False, limit=30)
    assert (
        "forward of step 1: layers.0 once more: this rank asks for it, ranks 1 of the data-parallel group do not"
        in asks
    )
    assert "reshard_after_forward=False" in asks
    assert "in step 1, with ranks 0" in other


# ---- hangs ----


def _hang(rank: int, world: int, debug: str) -> str:
    os.environ["DMUON_DEBUG"] = debug
    model = tower()
    owned = own(model, 1, 2, timeout=datetime.timedelta(seconds=2))
    matrix = owned.build_optimizer(make_muon)
    backward(model, 0, rank)
    matrix.step()
    try:
        if rank == 0:
            model(inputs(1, rank))
        else:  # another pass: a step without a forward
            owned.publish()
            time.sleep(0 if debug else 4)
    except RuntimeError as error:
        return str(error)
    finally:
        owned.close()
    return ""


def test_a_hang_names_the_operation_the_step_and_the_ranks() -> None:
    message = run_ranks(_hang, 2, "", limit=30)[0]
    assert "gather of (root) in step 1, with ranks 1: waiting for rank 1" in message
    assert "All ranks must run the same passes" in message


def test_debugging_finds_another_pass_before_anything_is_sent() -> None:
    first, second = run_ranks(_hang, 2, "1", limit=30)
    assert first == second
    assert (
        "different operations in step 1: operation 4 is the gather of (root) on rank 0, the publish of (root) on rank 1"
        in first
    )


def _stays_away(rank: int, world: int) -> str:
    os.environ["DMUON_DEBUG"] = "1"
    model = tower()
    owned = own(model, 1, 2, timeout=datetime.timedelta(seconds=2))
    try:
        backward(model, 0, rank)
        if rank == 0:
            model(inputs(1, rank))
        else:
            time.sleep(4)
    except RuntimeError as error:
        return str(error)
    finally:
        owned.close()
    return ""


def test_debugging_names_a_rank_that_does_not_come() -> None:
    message = run_ranks(_stays_away, 2, limit=30)[0]
    assert "this rank is about to issue the gather of (root), and waited in vain for ranks 1" in message
    assert "The last issued there: the reduce_between_nodes of (root) on rank 1" in message


# ---- FSDP2 has a module of its own between owned ones ----


class Two(nn.Module):
    """A tower that some ranks skip, and a module under FSDP2 that all use, between owned blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bridge, self.second, self.head = tower(2), nn.Linear(8, 8), tower(2), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, skip: tuple[bool, bool] = (False, False)) -> torch.Tensor:
        x = x if skip[0] else self.first(x)
        x = torch.tanh(self.bridge(x))
        return self.head(x if skip[1] else self.second(x))


def _between(rank: int, world: int) -> list[int]:
    torch.manual_seed(0)
    model = Two()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    units = [model.first, model.second]
    owned = dmuon.own_matrices(
        model, mesh, select=r"(first|second)\..*weight", units=units, ranks_per_node=2, prefetch=0
    )
    for module in (model.bridge, model.head, model):
        fully_shard(module, mesh=mesh, ignored_params=owned.parameters)
    matrix = owned.build_optimizer(make_muon)
    for step in range(3):
        backward(model, step, rank, skip=(rank == 1, rank == 2) if step != 1 else (rank == 3, rank == 0))
        matrix.step()
    owned.close()
    return [len(owned.engine.passes.forward.sequence), len(owned.engine.passes.backward.sequence)]


def test_operations_of_fsdp2_between_units_are_in_the_order() -> None:
    forward, back = run_ranks(_between, 4, ranks_per_node=2, limit=40)[0]
    assert forward >= 2 + 2  # two units, and a mark for each of FSDP2's modules inside
    assert back >= 2 + 3


# ---- FSDP2's head is called by the loss, in chunks, each with a backward of its own ----


def _chunked(rank: int, world: int, chunks: int) -> dict[tuple[str, str], int]:
    torch.manual_seed(0)
    model = Two()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    units = [model.first, model.second]
    owned = dmuon.own_matrices(model, mesh, select=r"(first|second)\..*weight", units=units, ranks_per_node=2)
    for module in (model.bridge, model.head, model):
        fully_shard(module, mesh=mesh, ignored_params=owned.parameters)
    model.head, head = nn.Identity(), model.head  # the model returns what the head is given
    model.loss = nn.ModuleList([head])
    matrix = owned.build_optimizer(make_muon)
    for step in range(2):
        hidden = model(inputs(step, rank))
        if chunks:
            given = hidden.detach().requires_grad_()
            for chunk in given.chunk(chunks):
                head(chunk).square().sum().backward()
            hidden.backward(given.grad)
        else:
            head(hidden).square().sum().backward()
        matrix.step()
    owned.close()
    return owned.engine.take_sent()


def test_a_loss_in_chunks_has_no_more_messages() -> None:
    whole, chunked = (run_ranks(_chunked, 4, chunks, ranks_per_node=2, limit=40) for chunks in (0, 4))
    assert whole == chunked and all(whole)
