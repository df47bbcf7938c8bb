"""Dynamic loss scaling with owned matrices: one verdict and one scale for all ranks and optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchtitan_dmuon as dmuon

from . import toy
from .ranks import run_ranks
from .test_bad_steps import PLACES, _spoil
from .test_clip import make_muon
from .test_misuse import alone
from .test_runtime import backward, merged, same

SCALE = 2.0**10


def _train(rank: int, mode: str, place: str, clip: bool, scaled: bool) -> Any:
    """Four steps, the second overflowing in one place on one rank; with a scaler, or unscaled and without that step."""
    model = toy.make_toy(2)
    owned = toy.shard(model, toy.mesh_of(2, 2), clip=mode, ranks_per_node=2, riders=r"norm\d")
    optimizer = owned.build_optimizer(make_muon, riders=toy.adamw)
    others = toy.adamw([p for p in model.parameters() if p not in owned.parameters])
    scaler = dmuon.GradScaler(owned, "cpu", init_scale=SCALE, growth_interval=2, enabled=scaled)
    scales = []
    for step in range(4):
        overflows = step == 1
        if overflows and not scaled:
            continue
        if overflows and rank == 3:
            _spoil(owned, place, float("inf"))
        scaler.scale(toy.loss_of(model, step, 0, rank)).backward()
        if overflows and rank in (1, 3) and place == "embed.weight":
            model.embed.weight.grad.to_local().view(-1)[0] = float("inf")
        both = (optimizer, others) if mode == "joint" else (others, optimizer)  # any order will do
        if clip:
            for each in both:
                scaler.unscale_(each)
            owned.clip_grad_norm_(model, 1.0)
        for each in both:
            scaler.step(each)
        scaler.update()
        for each in (optimizer, others):
            each.zero_grad()
        scales.append(scaler.get_scale())
    found = {k: v.clone() for k, v in owned.masters().items()}
    rest = {str(i): p.to_local().clone() for i, p in enumerate(others.param_groups[0]["params"])}
    owned.close()
    return found, rest, scales, optimizer.skipped_steps


CASES = [
    ("joint", PLACES[0], True),
    ("per_matrix", PLACES[1], True),
    ("joint", PLACES[2], True),
    ("joint", PLACES[0], False),
]


def test_an_overflow_anywhere_skips_all_and_halves_every_rank_s_scale() -> None:
    """The rest is the run without scaling, to the last bit, since scales are powers of two."""

    def job(rank: int, world: int) -> Any:
        return [(_train(rank, *case, True), _train(rank, *case, False)) for case in CASES]

    results = run_ranks(job, 4, ranks_per_node=2, limit=120)
    for index, case in enumerate(CASES):
        for (found, rest, scales, skipped), (expected, other, _, _) in (r[index] for r in results):
            assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE], case
            assert skipped == 1, case
            assert same(found, expected) and same(rest, other), case
    assert merged([r[0][0][0] for r in results])


def test_torch_s_own_scaler_is_refused_by_name() -> None:
    model, owned = alone()
    optimizer = owned.build_optimizer(make_muon)
    before = {k: v.clone() for k, v in owned.masters().items()}
    for unscale in (False, True):
        scaler = torch.amp.GradScaler("cpu")
        backward(model, 0, 0)
        scaler.scale(torch.ones(()))
        if unscale:
            scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"torch.amp.GradScaler sees .*torchtitan_dmuon.GradScaler\("):
            scaler.step(optimizer)
        assert same(before, dict(owned.masters()))
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.step(optimizer)
    assert not same(before, dict(owned.masters()))
    owned.close()


def test_a_sparse_gradient_is_refused_by_its_name() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(4, 4, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.words(x)

    model = Words()
    owned = dmuon.own_matrices(model, dmuon.runtime.rank_grid.RankGrid((0,), 1, "cpu"), "words", [model])
    with pytest.raises(RuntimeError, match=r"words.weight: its gradient is torch.sparse_coo, and owned .* sparse=True"):
        model(torch.tensor([1, 2])).sum().backward()
    owned.close()
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.eye(4).to_sparse()
    with pytest.raises(ValueError, match="words: Muon needs dense gradients, got a sparse one"):
        dmuon.Muon([{"params": [weight], "param_names": ["words"]}]).step()
