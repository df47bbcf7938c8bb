"""State that does not depend on who owns what, for torch.distributed.checkpoint (DCP).

Decides: what a rank contributes under a parameter's name: the whole tensor where it owns the parameter, its rows of one
global tensor where a stack has several owners, nothing otherwise. Does not decide where files go. Keeps invariant 9:
keys are parameter names, so another plan or world size reads the same state.

    state = {"model": model.state_dict(), "optimizer": optimizer_state(optimizer)}
    dcp.save(state, checkpoint_id=path)            # and to resume, on any mesh:
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"], strict=False)
    load_optimizer_state(optimizer, state["optimizer"])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .runtime.optimizer import OwnedOptimizer
from .runtime.row_shards import RowShards

_NO_OPTIONS = {"params", "param_names"}  # of a parameter group


@torch.no_grad()
def materialize_state(optimizer: OwnedOptimizer) -> None:
    """Let the inner optimizers create their state without moving a weight: one step of zero gradients at rate zero."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or not params or any(p.grad is not None for p in params):
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for p in params:
        p.grad = torch.zeros_like(p)
    try:
        for inner in optimizer.inners:
            inner.step()
    finally:
        for p in params:
            p.grad = None
        for group, rate in zip(optimizer.param_groups, rates):
            if rate is not None:
                group["lr"] = rate


def optimizer_state(optimizer: OwnedOptimizer) -> dict[str, Any]:
    """Flat state of what this rank owns: ``state.{name}.{key}`` and ``param_groups.{name}.{option}``, the keys of
    TorchTitan's checkpoints. Tensors are the optimizer's own, so a DCP load writes them in place."""
    materialize_state(optimizer)
    flat: dict[str, Any] = {}
    rows: dict[str, dict[int, torch.Tensor]] = {}
    states = optimizer.state
    for group, name, piece_row, param in _owned(optimizer, optimizer.state_dict()["param_groups"]):
        for key, value in states.get(param, {}).items():
            if piece_row is None:
                flat[f"state.{name}.{key}"] = value
            elif isinstance(value, torch.Tensor) and value.ndim > 0:
                rows.setdefault(f"state.{name}.{key}", {})[piece_row] = value
            else:  # a counter: each piece its own, since pieces may have skipped steps apart
                flat[f"state.{name}[{piece_row}].{key}"] = value
        for option, value in group.items():
            if option not in _NO_OPTIONS:
                flat[f"param_groups.{name}.{option}"] = value
    for key, held in rows.items():
        name = key.removeprefix("state.").rpartition(".")[0]
        first = next(iter(held.values()))
        flat[key] = RowShards((optimizer.stack_sizes[name], *first.shape), held)
    return flat


def load_optimizer_state(optimizer: OwnedOptimizer, flat: Mapping[str, Any]) -> None:
    """Inverse of :func:`optimizer_state`; keys of other optimizers are ignored. KeyError names what is missing. A
    collective: every rank takes the options of every group."""
    materialize_state(optimizer)
    # Through the optimizers' own loads, which check conventions and convert dtypes.
    packed = optimizer.state_dict()
    loaded: dict[torch.Tensor, dict[str, Any]] = {}
    states = optimizer.state
    for group, name, row, param in _owned(optimizer, packed["param_groups"]):
        for option in group.keys() - _NO_OPTIONS:
            group[option] = _required(flat, f"param_groups.{name}.{option}")
        state = {}
        for key, current in states.get(param, {}).items():
            if row is None:
                state[key] = _required(flat, f"state.{name}.{key}")
            elif isinstance(current, torch.Tensor) and current.ndim > 0:
                state[key] = _required(flat, f"state.{name}.{key}").rows[row]
            else:
                state[key] = _required(flat, f"state.{name}[{row}].{key}")
        loaded[param] = state
    # Who owns nothing of a group has read nothing of it: all take what the first that owns some of it has read.
    read = [_options(group) if group["params"] else {} for group in packed["param_groups"]]
    for group, by_rank in zip(packed["param_groups"], zip(*optimizer.engine.control.all_gather(read)), strict=True):
        for option, value in next(filter(None, by_rank), {}).items():
            own = group[option]
            group[option] = value.to(own.device) if isinstance(own, torch.Tensor) else value
    index = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            packed["state"][index] = loaded[param]
            index += 1
    optimizer.load_state_dict(packed)


def _owned(
    optimizer: OwnedOptimizer, packed: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], str, int | None, torch.Tensor]]:
    """(its group in ``packed``, parameter name, row of a stack or None, master) of everything this rank owns."""
    found = []
    for group, saved in zip(optimizer.param_groups, packed, strict=True):
        for key, param in zip(group["param_names"], group["params"], strict=True):
            name, bracket, row = key.partition("[")
            found.append((saved, name, int(row.rstrip("]")) if bracket else None, param))
    return found


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors on the CPU, to be sent."""
    return {o: v.cpu() if isinstance(v, torch.Tensor) else v for o, v in group.items() if o not in _NO_OPTIONS}


def _required(flat: Mapping[str, Any], key: str) -> Any:
    if key not in flat:
        raise KeyError(
            f"the checkpoint has no {key!r}: it was written without this optimizer's state, or for another model"
        )
    return flat[key]
