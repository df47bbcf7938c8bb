"""Which norm clips which gradients, and Newton-Schulz during backward where nothing couples the matrices: the same
bits, once per matrix, and nothing changed before a sound step."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import torchtitan_dmuon as dmuon
from torchtitan_dmuon.runtime.rank_grid import RankGrid

from . import toy
from .ranks import run_ranks
from .test_runtime import merged, same

make_muon = functools.partial(dmuon.Muon, lr=0.02, weight_decay=0.1, ns_dtype="float32", batch_bytes=0)
MAX_NORM = 0.3  # bites on every step, and on most pieces


class Reference(toy.Reference):
    def __init__(self, mode: str, factory: Any) -> None:
        super().__init__(4, factory, micros=2, max_norm=MAX_NORM)
        self.mode = mode

    def update(self) -> float:
        rest = [p for n, p in self.model.named_parameters() if n not in self.owned]
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
        torch.nn.utils.clip_grad_norm_(rest, MAX_NORM)
        if self.mode == "per_matrix":
            for p in self.owned.values():
                torch.nn.utils.clip_grad_norm_([p], MAX_NORM)
        for optimizer in (self.matrix, self.rest):
            optimizer.step()
        self.model.zero_grad()
        return norm.item()


def _train(rank: int, world: int, mode: str, factory: Any, early: bool, options: dict[str, Any]) -> Any:
    """Four steps, the third with an inf on one rank. Returns what this rank owns in the end, the norms, Newton-Schulz
    runs of the last step (before `step`, in it), and where something changed that should not."""
    model = toy.make_toy()
    owned = toy.shard(model, toy.mesh_of(2, 2), clip=mode, ranks_per_node=2, **options)
    matrix = owned.build_optimizer(factory)
    rest = toy.adamw([p for n, p in model.named_parameters() if n not in owned.names])
    if not early:
        owned.engine.early = None
    runs = toy.counted_matrices()

    def state() -> dict[str, torch.Tensor]:
        named = [(n, p) for g in matrix.param_groups for n, p in zip(g["param_names"], g["params"])]
        found = {n: p.detach().clone() for n, p in named}
        return found | {f"{n} {k}": v.clone() for n, p in named for k, v in matrix.state.get(p, {}).items()}

    norms, changed = [], []
    for step in range(4):
        before = state()
        runs.clear()
        for micro in range(2):
            owned.set_is_last_backward(micro == 1)
            loss = toy.loss_of(model, step, micro, rank)
            (loss * float("inf") if step == 2 and rank == 3 else loss).backward()
        norms.append(owned.clip_grad_norm_(model, MAX_NORM).item())
        early_runs = runs["matrices"]
        if not same(before, state()):
            changed.append(f"before step {step}")
        matrix.step()
        if step == 2 and not same(before, state()):
            changed.append("in a step that is not finite")
        if step != 2:
            rest.step()
        model.zero_grad()
    found = state()
    owned.close()
    return found, norms, (early_runs, runs["matrices"] - early_runs), changed


def _run(mode: str, factory: Any = make_muon, early: bool = True, **options: Any) -> Any:
    return run_ranks(_train, 4, mode, factory, early, options, ranks_per_node=2)


@pytest.mark.parametrize("mode", ["adamw_only", "per_matrix"])
def test_newton_schulz_during_backward_gives_the_same_bits_once_per_matrix(mode: str) -> None:
    found, plain = _run(mode), _run(mode, early=False)
    assert same(merged([f for f, *_ in found]), merged([f for f, *_ in plain]))
    assert str([n for _, n, _, _ in found]) == str([n for _, n, _, _ in plain])  # one of them is nan
    assert all(changed == [] for *_, changed in found)
    runs = [r for _, _, r, _ in found]
    assert sum(before for before, _ in runs) == 18 and sum(inside for _, inside in runs) == 0
    assert sum(inside for _, _, (_, inside), _ in plain) == 18


@pytest.mark.parametrize("mode", ["adamw_only", "per_matrix"])
@pytest.mark.parametrize("factory", [make_muon, toy.sgd], ids=["muon", "sgd"])
def test_each_mode_equals_one_process(mode: str, factory: Any) -> None:
    results = _run(mode, factory)
    found = merged([f for f, *_ in results])
    reference = Reference(mode, factory)
    norms = [reference.step(step) for step in (0, 1)]
    reference.backward(3)
    norms.append(reference.update())
    assert [results[0][1][i] for i in (0, 1, 3)] == pytest.approx(norms, rel=1e-5) and min(norms) > 2 * MAX_NORM
    for name, p in reference.owned.items():
        assert (found[name] - p).norm() <= 1e-5 * p.norm(), name
        momentum = reference.matrix.state[p]["momentum_buffer"]
        assert (found[f"{name} momentum_buffer"] - momentum).norm() <= 1e-5 * momentum.norm(), name


def _other_bound(rank: int, world: int) -> dict[str, torch.Tensor]:
    """A bound that changes from step to step, and a step without a clip: scratch of another bound is not used."""
    found = []
    for early in (True, False):
        model = toy.make_toy()
        owned = toy.shard(model, toy.mesh_of(1, 2), clip="per_matrix")
        matrix = owned.build_optimizer(make_muon)
        if not early:
            owned.engine.early = None
        for step, bound in enumerate((1.0, 0.1, None, 0.5)):
            toy.loss_of(model, step, 0, rank).backward()
            if bound is not None:
                owned.clip_grad_norm_(model, bound)
            matrix.step()
            model.zero_grad()
        found.append({k: v.clone() for k, v in owned.masters().items()})
        owned.close()
    assert same(*found)


def test_a_bound_that_changes() -> None:
    run_ranks(_other_bound, 2)


@pytest.mark.parametrize("mode", ["joint", "adamw_only", "per_matrix"])
def test_riders_are_clipped_with_what_adamw_updates_and_by_nothing_else(mode: str) -> None:
    model = toy.make_toy(2)
    grid = RankGrid((0,), 1, "cpu")
    options = {"layouts": toy.LAYOUTS, "riders": r"layers.*(norm\d|bias)", "clip": mode}
    owned = dmuon.own_matrices(model, grid, toy.OWNED, model.layers, **options)
    toy.loss_of(model, 0, 0, 0).backward()
    owned.engine.finish_reduces()
    masters = {n.split("[")[0]: p for u in owned.engine.units for n, p in u.master_of.items()}
    every = masters | {n: p for n, p in model.named_parameters() if n not in owned.names}
    before = {n: p.grad.clone() for n, p in every.items() if p.grad is not None}
    norm = owned.clip_grad_norm_(model, 1e-3)

    def factor(names: Any) -> float:
        return 1e-3 / float(torch.stack([before[n].norm() for n in names]).norm())

    matrices = set(owned.names) - owned.riders
    assert len(owned.riders) == 6 and norm * factor(before) == pytest.approx(1e-3, rel=1e-4)
    together = factor(before) if mode == "joint" else factor(before.keys() - matrices)
    alone = {"joint": lambda n: together, "adamw_only": lambda n: 1.0, "per_matrix": lambda n: factor([n])}[mode]
    for name, grad in before.items():
        expected = grad * (alone(name) if name in matrices else together)
        assert torch.allclose(every[name].grad, expected, rtol=1e-3, atol=0), name
    owned.close()


def test_an_unknown_mode_is_refused() -> None:
    model = toy.make_toy()
    with pytest.raises(ValueError, match="clip = 'matrix': must be one of 'joint', 'adamw_only', 'per_matrix'"):
        dmuon.own_matrices(model, RankGrid((0,), 1, "cpu"), select=toy.OWNED, units=model.layers, clip="matrix")
