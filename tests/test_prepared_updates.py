"""What an update prepared during backward was made from may change before the step: it is then made again.

The table has every option of a parameter group, so a new option needs a row; beside it, what else goes in: momentum,
gradients and the bound of a clip. Each row equals the run that prepares nothing, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchtitan_dmuon as dmuon
from torchtitan_dmuon import muon

from .test_misuse import alone
from .test_runtime import backward, make_muon, masters, same

OTHER: dict[str, Any] = {
    "lr": 0.3,
    "weight_decay": 0.4,
    "momentum": 0.5,
    "nesterov": False,
    "ns_coefficients": "polar_express",
    "eps": 0.5,
    "ns_steps": 2,
    "adjust_lr_fn": "match_rms_adamw",
    "ns_form": "gram",
    "ns_dtype": "float64",
    "ns_kernels": "quack",
    "ns_compile": True,
    "momentum_form": "heavy_ball",
    "momentum_dtype": "bfloat16",
    "cautious_weight_decay": True,
    "row_beta": 0.9,
}


def _set(option: str) -> Callable[[Any, Any], None]:
    return lambda owned, optimizer: optimizer.param_groups[0].update({option: OTHER[option]})


def _of_each(change: Callable[[torch.Tensor, Any], None]) -> Callable[[Any, Any], None]:
    return lambda owned, optimizer: [change(p, optimizer) for g in optimizer.param_groups for p in g["params"]]  # type: ignore[return-value]


def _edit_table(owned: Any, optimizer: Any) -> None:
    """In place, where a user's own table is a list."""
    optimizer.param_groups[0]["ns_coefficients"][0][1] = -4.8


CHANGES: dict[str, Callable[[Any, Any], None]] = (
    {"nothing": lambda owned, optimizer: None}
    | {option: _set(option) for option in OTHER}
    | {
        "a table of coefficients, in place": _edit_table,
        "momentum in place": _of_each(lambda p, o: o.state[p]["momentum_buffer"].mul_(-1)),
        "another momentum": _of_each(lambda p, o: o.state[p].update(momentum_buffer=p.detach().clone())),
        "no momentum": _of_each(lambda p, o: o.state[p].clear()),
        "gradients in place": _of_each(lambda p, o: p.grad.add_(p.detach())),
        "gradients in place, all at once": lambda owned, o: torch._foreach_sub_(
            [p.grad for g in o.param_groups for p in g["params"]], [p.detach() for p in o.param_groups[0]["params"]]
        ),
        "other gradients": _of_each(lambda p, o: setattr(p, "grad", p.detach().clone())),
        "no gradient for one": lambda owned, o: setattr(o.param_groups[0]["params"][0], "grad", None),
        "another bound": lambda owned, o: owned.clip_grad_norm_(owned.model, 0.01),
    }
)


# What makes no difference: the dtype of a momentum that is there, a bound far below or, where nothing is clipped, any.
NO_MATTER = ("momentum_dtype", "eps", "another bound")


def _run(mode: str, change: str, early: bool, before_clip: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Two steps, the change between the second's backward and step. Masters and momenta, and the updates prepared."""
    model, owned = alone(clip=mode)
    own_table = {"ns_coefficients": [[3.4445, -4.7750, 2.0315]]} if change.startswith("a table") else {}
    optimizer = owned.build_optimizer(make_muon, momentum_form="ema", **own_table)
    if own_table:
        optimizer.param_groups[0]["ns_coefficients"] = [[3.4445, -4.7750, 2.0315]]
    made: list[Any] = []
    prepare = owned.engine.early
    assert prepare is not None
    owned.engine.early = (lambda unit: made.append(prepare(unit)) or made[-1]) if early else None
    for step in range(2):
        backward(model, step, 0)
        owned.engine.finish_reduces()
        if step == 1 and before_clip:
            CHANGES[change](owned, optimizer)
        owned.clip_grad_norm_(model, 0.1)
        if step == 1 and not before_clip:
            CHANGES[change](owned, optimizer)
        optimizer.step()
    inner = optimizer.inners[0]
    found = masters(owned) | {
        f"{n} {key}": value
        for g in inner.param_groups
        for n, p in zip(g["param_names"], g["params"])
        for key, value in inner.state[p].items()
    }
    owned.close()
    return found, sum(len(updates) for _, updates in made)


@functools.cache
def unchanged(mode: str) -> dict[str, torch.Tensor]:
    return _run(mode, "nothing", True, True)[0]


@pytest.fixture
def executions_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that this machine lacks, and a compiler that takes long, as factors."""
    plain = muon.orthogonalize

    def orthogonalize(stack_BMN: torch.Tensor, settings: Any, execution: Any) -> torch.Tensor:
        factor = (2.0 if execution.compile else 1.0) * (3.0 if execution.kernels == "quack" else 1.0)
        return plain(stack_BMN, settings) * factor

    monkeypatch.setattr(muon, "orthogonalize", orthogonalize)


def test_the_table_has_every_option() -> None:
    group = dmuon.Muon([torch.nn.Parameter(torch.ones(2, 2))]).param_groups[0]
    assert OTHER.keys() == group.keys() - {"params"}
    assert all(group[option] != value for option, value in OTHER.items())


@pytest.mark.parametrize("mode", ["adamw_only", "per_matrix"])
@pytest.mark.parametrize("change", [c for c in CHANGES if c != "nothing"])
def test_a_change_between_backward_and_step_reaches_the_update(executions_differ: None, mode: str, change: str) -> None:
    for before_clip in (False,) if change in OTHER else (False, True):
        found, prepared = _run(mode, change, True, before_clip)
        expected, nothing = _run(mode, change, False, before_clip)
        assert prepared and not nothing
        assert change in NO_MATTER or not same(expected, unchanged(mode))
        assert same(found, expected), f"changed {'before' if before_clip else 'after'} the clip"


def test_what_changes_nothing_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates that a schedule moves, and what the step itself reads, cost no second Newton-Schulz."""
    for mode in ("adamw_only", "per_matrix"):
        model, owned = alone(clip=mode)
        optimizer = owned.build_optimizer(make_muon)
        for step in range(3):
            backward(model, step, 0)
            owned.clip_grad_norm_(model, 0.1)
            for option in ("lr", "weight_decay", "adjust_lr_fn", "cautious_weight_decay"):
                optimizer.param_groups[0][option] = OTHER[option]
            with monkeypatch.context() as patch:
                if step:
                    patch.setattr(muon, "orthogonalize", lambda *_: pytest.fail("made again"))
                optimizer.step()
        owned.close()
