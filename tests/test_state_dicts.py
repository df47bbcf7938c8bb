"""State dicts that are not DCP's: whole ones are whole, a rank's own fits its own plan, and what is neither raises with
a name on every rank."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from torchtitan_dmuon.checkpoint import full_optimizer_state, load_optimizer_state, optimizer_state

from . import toy
from .parity_table import RIDERS
from .ranks import run_ranks
from .test_checkpoint import MUON, build, train

FULL = StateDictOptions(full_state_dict=True)


def toys(shape: tuple[int, int], **options: Any) -> Any:
    model = toy.make_toy(layers=2)
    owned = toy.shard(model, toy.mesh_of(*shape), riders=RIDERS, **options)
    return model, owned, owned.build_optimizer(MUON, riders=toy.adamw)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    toy.loss_of(model, 0, 0, rank).backward()
    optimizer.step()


def reference() -> dict[str, torch.Tensor]:
    return dict(toy.make_toy(layers=2).state_dict())


def _whole(rank: int, world: int) -> None:
    model, owned, optimizer = toys((1, world))
    expected = reference()
    for cpu_offload in (False, True):
        state = owned.full_state_dict(cpu_offload=cpu_offload)
        assert state.keys() == (expected.keys() if rank == 0 or not cpu_offload else set())
        assert all(type(v) is torch.Tensor and torch.equal(v, expected[k]) for k, v in state.items())
    # torch's own has every name; what it cannot gather says so when it is used.
    state = get_model_state_dict(model, options=FULL)
    assert state.keys() == expected.keys()
    with pytest.raises(
        RuntimeError, match=r"layers\.\d.*pickling \(torch.save\) needs all of .* of which this rank holds"
    ):
        torch.save(state, io.BytesIO())
    with pytest.raises(RuntimeError, match=r"layers\.\d.*copying it into an ordinary tensor"):
        toy.make_toy(layers=2).load_state_dict(state)
    copy.deepcopy(state)
    # A whole one, loaded on every rank.
    changed = {k: v + 1 for k, v in expected.items() if k in owned.names}
    model.load_state_dict(changed, strict=False)
    assert all(torch.equal(v, changed[k]) for k, v in owned.full_state_dict().items() if k in owned.names)
    step(model, optimizer, rank)
    before = full_optimizer_state(optimizer)
    fresh = toys((world, 1))[2]
    load_optimizer_state(fresh, copy.deepcopy(before))
    after = full_optimizer_state(fresh)
    assert after.keys() == before.keys() and len(before) > 100
    for key, value in before.items():
        assert torch.equal(after[key], value) if isinstance(value, torch.Tensor) else after[key] == value, key
    assert not any(isinstance(v, DTensor) for v in before.values())


def test_whole_state_is_whole_and_what_is_not_says_so() -> None:
    run_ranks(_whole, 2)


def _refused(rank: int, world: int) -> None:
    model, _, optimizer = toys((1, world))
    match = "an owned optimizer's state is in pieces on their owners"
    for each in (FULL, StateDictOptions(), StateDictOptions(full_state_dict=True, cpu_offload=True)):
        with pytest.raises(RuntimeError, match=match):
            get_optimizer_state_dict(model, [optimizer], options=each)
    with pytest.raises(RuntimeError, match=match):
        set_optimizer_state_dict(model, [optimizer], {"state": {}, "param_groups": []})
    rest = toy.adamw([p for p in model.parameters() if isinstance(p, DTensor)])
    assert "embed.weight" in get_optimizer_state_dict(model, [rest], options=FULL)["state"]


def test_torchs_optimizer_state_dicts_are_refused_for_owned_optimizers_on_every_rank() -> None:
    run_ranks(_refused, 4)


def _per_rank(rank: int, world: int) -> Any:
    model, owned, optimizer = build(world, (1, world))
    train(model, owned, optimizer, range(2), rank, world)
    saved = copy.deepcopy(optimizer.state_dict())
    before = {n: optimizer.inners[0].state[p]["momentum_buffer"].clone() for n, p in named(optimizer)}
    # In another order, as another version might keep them.
    for group in saved["param_groups"]:
        group["param_names"] = group["param_names"][::-1]
        group["params"] = group["params"][::-1]
    _, _, again = build(world, (1, world))
    again.load_state_dict(saved)
    assert all(torch.equal(again.inners[0].state[p]["momentum_buffer"], before[n]) for n, p in named(again))
    # Rank 2 gets the dict of another owner: refused on every rank.
    every: list[Any] = [None] * world
    dist.all_gather_object(every, saved)
    _, _, other = build(world, (1, world))
    saved = every[0 if rank == 2 else rank]
    with pytest.raises(KeyError, match=r"has another owner now.*full_optimizer_state"):
        other.load_state_dict(saved)
    assert not dict(other.state)
    # A key that one owner misses, on every rank.
    flat = optimizer_state(optimizer)
    key = "state.layers.1.out.weight.momentum_buffer"
    had = flat.pop(key, None) is not None
    with pytest.raises(KeyError, match=f"the checkpoint has no '{key}'"):
        load_optimizer_state(optimizer, flat)
    load_optimizer_state(again, flat, strict=False)
    names = [n for n, p in named(again) if not again.state.get(p)]
    assert names == (["layers.1.out.weight"] if had else [])
    return had


def named(optimizer: Any) -> list[tuple[str, torch.Tensor]]:
    return [pair for g in optimizer.param_groups for pair in zip(g["param_names"], g["params"], strict=True)]


def test_a_ranks_own_state_loads_by_name_or_is_refused_on_every_rank() -> None:
    assert sorted(run_ranks(_per_rank, 4)) == [False, False, False, True]
