"""State that does not depend on who owns what, for torch.distributed.checkpoint (DCP) and for files of one rank.

Decides: what a rank contributes under a parameter's name: the whole tensor where it owns the parameter, its rows of one
global tensor where a stack has several owners, nothing otherwise. Does not decide where files go. Keeps invariant 9:
keys are parameter names, so another plan or world size reads the same state.

    state = {"model": model.state_dict(), "optimizer": optimizer_state(optimizer)}
    dcp.save(state, checkpoint_id=path)            # and to resume, on any mesh:
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    load_optimizer_state(optimizer, state["optimizer"])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from .muon import Muon
from .runtime.optimizer import OwnedOptimizer
from .runtime.partial import PartialTensor, gathered, rows_of

_NO_OPTIONS = {"params", "param_names"}  # of a parameter group


Group = dict[str, Any]
States = dict[torch.Tensor, dict[str, Any]]


@torch.no_grad()
def _as_if_begun(optimizer: OwnedOptimizer) -> tuple[States, list[Group]]:
    """State and parameter groups of everything this rank owns: what the optimizers have, and for parameters that had no
    gradient yet, what they begin with. Changes nothing."""
    states, groups = dict(optimizer.state), optimizer.state_dict()["param_groups"]
    at = 0
    for inner in optimizer.inners:
        lacking = [[p for p in group["params"] if not states.get(p)] for group in inner.param_groups]
        if isinstance(inner, Muon):
            for group, params in zip(inner.param_groups, lacking, strict=True):
                states |= {p: inner.fresh_state(p, group) for p in params}
        elif any(lacking):
            made, added = _first_step(inner, lacking)
            states |= made
            for group, options in zip(groups[at:], added, strict=False):
                group.update({**options, **group})
        at += len(inner.param_groups)
    return states, groups


def _first_step(inner: torch.optim.Optimizer, lacking: list[list[torch.Tensor]]) -> tuple[States, list[Group]]:
    """The state, and by group the options, that one step of zero gradients at rate zero makes of copies of parameters
    that are ``lacking`` it, by group. It counts as no step."""
    before = [dict(group) for group in inner.param_groups]
    copies = {p: torch.nn.Parameter(p.detach().clone()) for params in lacking for p in params}
    try:
        for group, params in zip(inner.param_groups, lacking, strict=True):
            group["params"] = [copies[p] for p in params]
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for copy in copies.values():
            copy.grad = torch.zeros_like(copy)
        inner.step()
    finally:
        made = {p: inner.state.pop(copy, {}) for p, copy in copies.items()}
        after = [dict(group) for group in inner.param_groups]
        for group, options in zip(inner.param_groups, before, strict=True):
            group.clear()
            group.update(options)
    added = [{k: v for k, v in new.items() if k not in old} for new, old in zip(after, before, strict=True)]
    for counted in (*made.values(), *added):
        if "step" in counted:
            counted["step"] = torch.zeros_like(counted["step"]) if isinstance(counted["step"], torch.Tensor) else 0
    return made, added


def optimizer_state(optimizer: OwnedOptimizer) -> dict[str, Any]:
    """Flat state of what this rank owns: ``state.{name}.{key}`` and ``param_groups.{name}.{option}``, the keys of
    TorchTitan's checkpoints. Tensors are the optimizer's own, so a DCP load writes them in place."""
    return _flat_state(optimizer, set(_params(optimizer)))


def _flat_state(optimizer: OwnedOptimizer, of: set[torch.Tensor]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    rows: dict[str, dict[int, torch.Tensor]] = {}
    states, groups = _as_if_begun(optimizer)
    for group, name, row, param in _owned(optimizer, groups):
        if param not in of:
            continue
        for key, value in states.get(param, {}).items():
            flat_key = _state_key(name, row, key, value)
            if row is not None and flat_key == _state_key(name, None, key, value):
                rows.setdefault(flat_key, {})[row] = value
            else:
                flat[flat_key] = value
        for option, value in group.items():
            if option not in _NO_OPTIONS:
                flat[f"param_groups.{name}.{option}"] = value
    for flat_key, held in rows.items():
        name = flat_key.removeprefix("state.").rpartition(".")[0]
        first = next(iter(held.values()))
        shape = (optimizer.stack_sizes[name], *first.shape)
        flat[flat_key] = rows_of(shape, held, flat_key, first.dtype, first.device)
    return flat


def _state_key(name: str, row: int | None, key: str, value: Any) -> str:
    """Rows of a stack share one tensor, but each has counters of its own, since they may have skipped steps apart."""
    if row is None or (isinstance(value, torch.Tensor) and value.ndim > 0):
        return f"state.{name}.{key}"
    return f"state.{name}[{row}].{key}"


def full_optimizer_state(optimizer: OwnedOptimizer, *, cpu_offload: bool = False) -> dict[str, Any]:
    """:func:`optimizer_state` of the whole cluster, every tensor whole: for `torch.save`, and for
    :func:`load_optimizer_state` on any plan. With ``cpu_offload`` on the CPU and on rank 0 alone, empty elsewhere. A
    collective, of one tensor at a time."""
    engine = optimizer.engine
    # Under replica ownership several ranks have the same piece.
    once: set[torch.Tensor] = {unit.master_of[key] for unit in engine.units for key in unit.rooted}
    mine = _flat_state(optimizer, once)
    described: dict[str, Any] = {}
    for each in engine.control.all_gather(pytree.tree_map_only(torch.Tensor, _Described, mine)):
        described = {**each, **described}
    keeps = not cpu_offload or not dist.is_initialized() or dist.get_rank() == 0
    full: dict[str, Any] = {}
    for key in sorted(described):
        parts = iter([v for v in pytree.tree_leaves(mine.get(key)) if isinstance(v, torch.Tensor)])

        def whole(of: _Described, key: str = key, parts: Any = parts) -> torch.Tensor:
            part = next(parts, PartialTensor(of.shape, {}, key, of.dtype, engine.device))
            value = gathered(part.to(engine.device), engine.control.all_reduce)
            return value.to("cpu" if cpu_offload or of.on_cpu else value.device)

        value = pytree.tree_map_only(_Described, whole, described[key])
        if keeps:
            full[key] = value
    return full


class _Described:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.on_cpu = tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu"


def load_optimizer_state(optimizer: OwnedOptimizer, flat: Mapping[str, Any], *, strict: bool = True) -> None:
    """Inverse of :func:`optimizer_state`, and of :func:`full_optimizer_state`; keys of other optimizers are ignored.

    What is missing on any rank is a KeyError with its name on every rank, and nothing changes. Unless ``strict``, an
    option that is missing keeps its value, and a parameter without any state begins anew. A collective: every rank
    takes the options of every group.
    """
    # Through the optimizers' own loads, which check conventions and convert dtypes.
    states, groups = _as_if_begun(optimizer)
    loaded: list[dict[str, Any]] = []
    missing: list[str] = []
    for group, name, row, param in _owned(optimizer, groups):
        for option in group.keys() - _NO_OPTIONS:
            key = f"param_groups.{name}.{option}"
            if key in flat:
                group[option] = flat[key]
            elif strict:
                missing.append(key)
        state: dict[str, Any] = {}
        lacking: list[str] = []
        for key, current in states.get(param, {}).items():
            flat_key = _state_key(name, row, key, current)
            value = flat.get(flat_key)
            if row is not None and isinstance(value, torch.Tensor) and value.ndim > 0:
                value = value[row]
            if flat_key not in flat or isinstance(value, PartialTensor):
                lacking.append(flat_key)
            else:
                state[key] = value
        loaded.append(state)
        missing += lacking if strict or state else []
    if names := [n for each in optimizer.engine.control.all_gather(missing[:1]) for n in each]:
        raise KeyError(
            f"the checkpoint has no {names[0]!r}: it was written without this optimizer's state, or for another model"
        )
    # Who owns nothing of a group has read nothing of it: all take what the first that owns some of it has read.
    read = [_options(group) if group["params"] else {} for group in groups]
    for group, by_rank in zip(groups, zip(*optimizer.engine.control.all_gather(read)), strict=True):
        for option, value in next(filter(None, by_rank), {}).items():
            own = group.get(option)
            group[option] = value.to(own.device) if isinstance(own, torch.Tensor) else value
    state_of = {index: state for index, state in enumerate(loaded) if state}
    optimizer.load_state_dict({"state": state_of, "param_groups": groups})


def _params(optimizer: OwnedOptimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


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
