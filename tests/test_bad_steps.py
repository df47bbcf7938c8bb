"""A step with a gradient that is not finite, wherever it is: counted, and nothing of it is left anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import toy
from .ranks import run_ranks
from .test_clip import make_muon
from .test_misuse import alone
from .test_runtime import backward, same

# A matrix, a rider and a parameter of FSDP2's, by name; whose clip; what the gradient is on one rank.
PLACES = ("layers.1.w1.weight", "layers.0.norm1.weight", "embed.weight")
MODES = ("joint", "adamw_only", "per_matrix")
BAD = [*zip(PLACES, MODES, ("inf", "nan", "inf")), *zip(PLACES, MODES[::-1], ("nan", "inf", "nan"))]


# Skipped steps in all and in a row, whether the last was one, hooks that ran.
COUNTS = [(0, 0, False, 2), (1, 1, True, 2), (2, 2, True, 2), (2, 0, False, 4), (2, 0, False, 6)]


def _spoil(owned: Any, place: str, value: float) -> None:
    """One element of this rank's next gradient of a parameter; FSDP2's after its backward."""
    for unit in owned.engine.units:
        for key in unit.pieces:
            if key.startswith(place):
                take = unit.take_gradients

                def spoiled(unit: Any = unit, key: str = key, take: Any = take) -> torch.Tensor:
                    contrib = take()
                    contrib[unit.layout.slots[key]] = value
                    unit.take_gradients = take
                    return contrib

                unit.take_gradients = spoiled


def _train(rank: int, bad: tuple[str, str, str] | str) -> dict[str, Any]:
    """The loop of the README over five steps, the second and third of them spoilt; or over the sound ones alone."""
    place, mode, value = bad if isinstance(bad, tuple) else ("", bad, "0")
    model = toy.make_toy(2)
    owned = toy.shard(model, toy.mesh_of(2, 2), clip=mode, ranks_per_node=2, riders=r"norm\d")
    optimizer = owned.build_optimizer(make_muon, riders=toy.adamw)
    others = toy.adamw([p for p in model.parameters() if p not in owned.parameters])
    hooked: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: hooked.append("before"))
    optimizer.register_step_post_hook(lambda *_: hooked.append("after"))
    counts = []

    def state() -> dict[str, torch.Tensor]:
        named = [(n, p) for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"])]
        named += [(f"others {i}", p) for i, p in enumerate(others.param_groups[0]["params"])]
        found = {}
        for name, p in named:
            states = (others if name.startswith("others") else optimizer).state.get(p, {})
            for key, each in {"value": p.detach(), **states}.items():
                found[f"{name} {key}"] = (each.to_local() if hasattr(each, "to_local") else each).clone()
        return found

    for step in range(5):
        spoilt = step in (1, 2)
        if spoilt and not place:
            continue
        before = state()
        if spoilt and rank == 3:
            _spoil(owned, place, float(value))
        toy.loss_of(model, step, 0, rank).backward()
        if spoilt and rank in (1, 3) and place == "embed.weight":  # both replicas of a shard
            model.embed.weight.grad.to_local().view(-1)[0] = float(value)
        owned.clip_grad_norm_(model, 1.0)
        optimizer.step()
        if not optimizer.step_was_skipped:
            others.step()
        for each in (optimizer, others):
            each.zero_grad()
        counts.append((optimizer.skipped_steps, optimizer.skipped_in_a_row, optimizer.step_was_skipped, len(hooked)))
        assert same(before, state()) == spoilt, f"step {step} of {bad}"
    found = state()
    owned.close()
    return {"state": found, "counts": counts, "hooked": hooked}


def test_nothing_of_a_skipped_step_is_left_anywhere() -> None:
    def job(rank: int, world: int) -> Any:
        return {bad: _train(rank, bad) for bad in [*BAD, *MODES]}

    for results in run_ranks(job, 4, ranks_per_node=2, limit=120):
        for bad in BAD:
            found, sound = results[bad], results[bad[1]]
            assert same(found["state"], sound["state"]), bad
            assert found["counts"] == [
                (0, 0, False, 2),
                (1, 1, True, 2),
                (2, 2, True, 2),
                (2, 0, False, 4),
                (2, 0, False, 6),
            ]
            assert found["hooked"] == sound["hooked"] == ["before", "after"] * 3


def test_hooks_around_a_step_that_has_a_closure_or_no_backward() -> None:
    """As torch's, but that the closure's backward comes before them: only then it is known whether this is a step."""
    model, owned = alone()
    optimizer = owned.build_optimizer(make_muon)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda self, args, kwargs: seen.append(f"before {self is optimizer}"))
    optimizer.register_step_post_hook(lambda self, args, kwargs: seen.append("after"))

    def closure() -> float:
        seen.append("closure")
        backward(model, 0, 0)
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert seen == ["closure", "before True", "after"]
    optimizer.skip_step()
    assert optimizer.step_was_skipped and len(seen) == 3
    optimizer.step()  # no backward since: nothing to skip
    assert not optimizer.step_was_skipped and optimizer.skipped_steps == 1 and len(seen) == 5
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    owned.close()
