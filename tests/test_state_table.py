"""State that leaves by every way and comes back on every layout: {DCP, asynchronous DCP, one file of whole tensors, a
copy in memory} x {whole matrices, stacks, riders, a part without gradients so far} x {mesh, ownership}. What a run
restores is compared piece by piece, in every replica, and so are the steps that follow."""

from __future__ import annotations

import functools
import itertools
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import torchtitan_dmuon as dmuon
from torchtitan_dmuon import checkpoint

from . import toy
from .ranks import run_ranks

DIM = 8
KINDS = {  # kind -> (stacks, riders, whether the last block is used before the state is saved, inner optimizer)
    "stack": (True, False, True, "Muon"),
    "unused": (True, True, False, "Muon"),
    "unused, torch's Muon": (False, True, False, "torch.optim.Muon"),
    "unused, AdamW": (True, True, False, "torch.optim.AdamW"),
}
FACTORIES = {
    "Muon": functools.partial(dmuon.Muon, lr=0.02, ns_dtype="float32"),
    "torch.optim.Muon": functools.partial(torch.optim.Muon, lr=0.02),
    "torch.optim.AdamW": functools.partial(torch.optim.AdamW, lr=0.01),
}
Layout = tuple[int, int, str]
SAVED_BY: list[Layout] = [(1, 2, "global"), (2, 2, "global"), (2, 2, "replica")]
LOADED_BY: list[Layout] = [(1, 1, "global"), (1, 2, "global"), (2, 1, "replica"), (2, 2, "global"), (2, 2, "replica")]
WAYS = ("dcp", "async", "file")
BY_EVERY_WAY = [(kind, layout) for kind in ("stack", "unused") for layout in SAVED_BY[2:]]


class Block(nn.Module):
    def __init__(self, stacks: bool, riders: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM) if riders else nn.Identity()
        self.up, self.down = nn.Linear(DIM, 6, bias=riders), nn.Linear(6, DIM, bias=False)
        self.w_EMN = nn.Parameter(torch.randn(5, 6, DIM) * 0.3) if stacks else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        mixed = self.up(x)
        if self.w_EMN is not None:
            mixed = mixed + torch.einsum("emn,bn->bem", self.w_EMN, x).mean(1)
        return x + self.down(mixed.tanh())


class Model(nn.Module):
    def __init__(self, stacks: bool, riders: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(stacks, riders) for _ in range(3))

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        for layer in self.layers[:used]:
            x = layer(x)
        return x


def build(kind: str, layout: Layout) -> Any:
    stacks, riders, _, inner = KINDS[kind]
    model = Model(stacks, riders)
    owned = dmuon.own_matrices(
        model,
        toy.mesh_of(*layout[:2]),
        select=r"(up|down)\.weight|w_EMN" if stacks else r"(up|down)\.weight",
        units=model.layers,
        stacks="w_EMN" if stacks else None,
        riders=r"norm|bias" if riders else None,
        ownership=layout[2],
    )
    return model, owned, owned.build_optimizer(FACTORIES[inner], riders=functools.partial(torch.optim.AdamW, lr=0.01))


def train(parts: Any, steps: range, used: int) -> None:
    """Four virtual ranks, whatever the world."""
    model, owned, optimizer = parts
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in steps:
        for virtual in range(rank, 4, world):
            x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * step + virtual))
            owned.set_is_last_backward(virtual + world >= 4)
            ((model(x, used) - x.roll(1, 0)).square().mean() * world / 4).backward()
        owned.clip_grad_norm_(model, 1.0)
        optimizer.step()


def everything(parts: Any) -> dict[str, torch.Tensor]:
    """Masters and optimizer state of all ranks, asked of nothing that is tested here; replicas must agree."""
    _, owned, optimizer = parts
    mine: dict[str, Any] = {key: master.clone() for key, master in owned.masters().items()}
    for inner in optimizer.inners:
        for group in inner.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                state = inner.state.get(param, {})
                mine |= {f"{name}:{key}": torch.as_tensor(value).clone() for key, value in state.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    found: dict[str, torch.Tensor] = {}
    for each in every:
        assert [k for k, v in each.items() if k in found and not torch.equal(found[k], v)] == [], "replicas differ"
        found |= each
    return found


def state_of(parts: Any) -> dict[str, Any]:
    model, _, optimizer = parts
    return {"model": model.state_dict(), "optimizer": checkpoint.optimizer_state(optimizer)}


def save(parts: Any, path: pathlib.Path, ways: tuple[str, ...]) -> None:
    dcp.save(state_of(parts), checkpoint_id=path / "dcp")
    if ways == ("dcp",):
        return
    dcp.async_save(state_of(parts), checkpoint_id=path / "async").result()
    _, owned, optimizer = parts
    whole = owned.full_state_dict(cpu_offload=True)
    rest = checkpoint.full_optimizer_state(optimizer, cpu_offload=True)
    assert bool(whole) == bool(rest) == (dist.get_rank() == 0)
    if whole:
        torch.save({"model": whole, "optimizer": rest}, path / "file")


def load(parts: Any, path: pathlib.Path, way: str) -> None:
    model, _, optimizer = parts
    if way == "file":
        state = torch.load(path / "file")
    else:
        state = state_of(parts)
        dcp.load(state, checkpoint_id=path / way)
    model.load_state_dict(state["model"])
    checkpoint.load_optimizer_state(optimizer, state["optimizer"])


def save_all(rank: int, world: int, folder: pathlib.Path) -> dict[tuple[str, Layout], Any]:
    results = {}
    for kind in KINDS:
        for layout in (each for each in SAVED_BY if each[0] * each[1] == world):
            parts = build(kind, layout)
            train(parts, range(2), 3 if KINDS[kind][2] else 2)
            before = everything(parts)
            save(parts, folder / kind / str(layout), WAYS if (kind, layout) in BY_EVERY_WAY else WAYS[:1])
            assert everything(parts).keys() == before.keys()  # no state came by saving
            train(parts, range(2, 4), 3)
            results[kind, layout] = before, everything(parts)
            parts[1].close()
    return results if rank == 0 else {}


def load_all(rank: int, world: int, folder: pathlib.Path, saved: dict[tuple[str, Layout], Any]) -> list[str]:
    wrong = []
    for layout in (each for each in LOADED_BY if each[0] * each[1] == world):
        for kind in KINDS:
            parts = build(kind, layout)
            for origin, way in itertools.product(SAVED_BY, WAYS):
                before, after = saved[kind, origin]
                if way != "dcp" and (kind, origin) not in BY_EVERY_WAY:
                    continue
                load(parts, folder / kind / str(origin), way)
                found = everything(parts)
                # What had no gradient yet begins with zeros, if it has state at all.
                bad = [k for k, v in before.items() if k not in found or not torch.equal(found[k], v)]
                bad += [k for k in found if k not in before and found[k].any()]
                if way == "dcp":
                    train(parts, range(2, 4), 3)
                    end = everything(parts)
                    bad += [k for k in after if not torch.allclose(end[k], after[k], rtol=1e-4, atol=1e-5)]
                wrong += [f"{kind}, {origin} to {layout} by {way}: {bad[0]}"] if bad else []
            parts[1].close()
    return wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[pathlib.Path, dict[tuple[str, Layout], Any]]:
    folder = tmp_path_factory.mktemp("state")
    for kind in KINDS:
        for layout in SAVED_BY:
            (folder / kind / str(layout)).mkdir(parents=True)
    return folder, {k: v for world in (2, 4) for k, v in run_ranks(save_all, world, folder, limit=120)[0].items()}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_way_and_kind_comes_back_on_every_layout(saved, world: int) -> None:
    folder, states = saved
    assert len(states) == len(KINDS) * len(SAVED_BY)
    assert run_ranks(load_all, world, folder, states, limit=200) == [[]] * world
