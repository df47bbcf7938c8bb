"""The [dmuon] table, which parameters each optimizer group takes, and the Trainer.Config they live in.

Decides: the options of DMuon with their choices, and the one rule by which
`optimizer.param_groups` claims parameters. Does not read files (`toml_config.py`) and does not check a run against a
machine (`checks.py`). Keeps: a [dmuon] table is checked without TorchTitan, so its errors come before that import.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan_dmuon.matrices import canonical_name
from torchtitan_dmuon.titan.names import is_owned, takes_matrices


class ConfigError(ValueError):
    """A setting that cannot be used. ``path`` is the dotted key (``training.steps``), "" when it is about the file.
    ``old``: whether an older TorchTitan had this key."""

    def __init__(self, message: str, path: str = "", old: bool = False) -> None:
        super().__init__(message)
        self.path = path
        self.old = old
        self.unseen = 0

    @property
    def errors(self) -> list[ConfigError]:
        return [self]


class NonFiniteGradients(RuntimeError):
    """Training stops, on all ranks alike: see `on_nonfinite` and `max_skipped_steps` of the [dmuon] table."""


class ConfigErrors(ConfigError):
    """Several at once, a line each. ``unseen``: keys that nobody looked at, because enough was wrong already."""

    def __init__(self, errors: Sequence[ConfigError], unseen: int = 0, head: str = "") -> None:
        more = [f"... and {unseen:,} more keys, not looked at yet"] if unseen else []
        super().__init__("\n".join([*([head] if head else []), *map(str, errors), *more]), errors[0].path)
        self._errors = list(errors)
        self.unseen = unseen

    @property
    def errors(self) -> list[ConfigError]:
        return self._errors


def raise_all(errors: Sequence[ConfigError], unseen: int = 0) -> None:
    """Raise what was found, alone or together; nothing when there is nothing."""
    if errors:
        raise errors[0] if len(errors) == 1 and not unseen else ConfigErrors(errors, unseen)


@dataclass(kw_only=True, slots=True)
class DMuonConfig:
    ownership: Literal["global", "replica"] = "global"
    """
    "global": each matrix has one owner among all data-parallel ranks. "replica": one owner in every replica, which
    updates it again; the price of AdamW's redundancy, for runs that must survive the loss of a replica.
    """

    balance: Literal["cost", "numel", "round_robin"] = "cost"
    """What owners are balanced by: cost of the update, elements, or nothing but turns."""

    cost_file: str = ""
    """JSON file of measured costs (``dmuon plan --calibrate``); "" computes costs from FLOPs."""

    routing: Literal["two_level", "flat"] = "two_level"
    """"two_level": inside nodes first, then between them. "flat": every rank talks to the owner."""

    holders: Literal["shard_group", "node"] = "shard_group"
    """Where compute-dtype copies stay between steps: one rank per shard group, or one per node."""

    publish: Literal["async", "sync"] = "async"
    """"async": updated weights travel behind the next forward. "sync": the step ends when they have arrived."""

    prefetch: int = 1
    """Units gathered ahead of the one that computes. At least 0."""

    defer_reduce: bool | Literal["auto"] = "auto"
    """
    Whether gradients cross nodes once per step (true) or once per micro-batch (false). "auto": once per step where the
    planned peak memory stays at AdamW's.
    """

    ranks_per_node: int = 0
    """Ranks on one node; 0 takes LOCAL_WORLD_SIZE. Another value emulates nodes, for tests."""

    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype in which gradients of owned parameters are summed across ranks."""

    clip: Literal["joint", "adamw_only", "per_matrix"] = "joint"
    """
    Gradient clipping: by the norm over all parameters, over AdamW's alone, or per matrix. With the last two, matrices
    do not wait for a norm, and Newton-Schulz runs during backward.
    """

    qk_clip: float = 0.0
    """MuonClip's tau: heads whose attention logits grew past it have their query and key rows scaled; 0: none."""

    on_nonfinite: Literal["skip", "raise"] = "skip"
    """What a gradient that is not finite on some rank does: its step is skipped on every rank, or the run stops."""

    max_skipped_steps: int = 10
    """Skipped steps in a row after which the run stops; 0: it goes on for ever."""

    deterministic: bool = False
    """Also fix the batches of Newton-Schulz, so that bits do not depend on the plan."""

    riders: bool = True
    """
    Whether small parameters that AdamW updates (norm weights, biases) travel in the buffers of their block's matrices,
    so that FSDP2 has nothing to gather there.
    """

    on_optimizer_change: Literal["error", "restart_state"] = "error"
    """
    What a resume does with parameters that had another optimizer in the checkpoint: stop, or load everything else and
    begin their optimizer state anew.
    """

    def __post_init__(self) -> None:
        for name in ("prefetch", "ranks_per_node", "qk_clip", "max_skipped_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 0", name)
        if not math.isfinite(self.qk_clip):
            raise ConfigError(f"qk_clip = {self.qk_clip}: must be a finite number; 0 switches it off", "qk_clip")
        if self.ownership == "replica" and self.holders == "node":
            raise ConfigError('holders = "node" needs ownership = "global"; choose "shard_group"', "holders")


@dataclass(frozen=True)
class Assignment:
    """``groups[i]``: canonical names that group i takes. ``fell_through``: (name, group that matched but cannot)."""

    groups: tuple[tuple[str, ...], ...]
    fell_through: tuple[tuple[str, int], ...]


def assign_parameters(shapes: Mapping[str, Sequence[int]], groups: Sequence[tuple[str, str]]) -> Assignment:
    """Give each parameter to the first (pattern, optimizer name) group that matches and can take it.

    ``shapes`` maps parameter names, with or without wrapper components, to shapes; patterns are ``re.search``ed in the
    canonical names. A matrix optimizer takes no parameter of fewer than 2 dimensions. Raises :class:`ConfigError`, with
    the path of the group, for an invalid pattern, a group left empty, and parameters that no group takes.
    """
    names = {canonical_name(name): tuple(shape) for name, shape in shapes.items()}
    taken: list[list[str]] = []
    owner: dict[str, int] = {}
    fell_through: list[tuple[str, int]] = []
    for index, (pattern, optimizer_name) in enumerate(groups):
        path = f"optimizer.param_groups.{index}.pattern"
        try:
            regex = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"pattern '{pattern}' is not a regular expression: {error}", path) from None
        matched = [name for name in names if regex.search(name)]
        if not matched:
            raise ConfigError(
                f"pattern '{pattern}' matches no parameter; names look like {', '.join(_spread(list(names)))}", path
            )
        free = [name for name in matched if name not in owner]
        if not free:
            first = groups[owner[matched[0]]][0]
            raise ConfigError(
                f"pattern '{pattern}' is left without a parameter: earlier groups (such as '{first}') take all "
                f"{len(matched)} it matches; the first match wins",
                path,
            )
        mine = [n for n in free if not takes_matrices(optimizer_name) or not _is_vector(names[n])]
        if not mine:
            raise ConfigError(
                f"pattern '{pattern}' matches only vectors (fewer than 2 dimensions, or one row or column: {free[0]}, "
                f"...), which {optimizer_name} cannot take",
                path,
            )
        fell_through += [(name, index) for name in free if name not in mine]
        owner.update(dict.fromkeys(mine, index))
        taken.append(mine)
    left = [name for name in names if name not in owner]
    if left:
        some = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
        message = f"no group takes {len(left)} parameters ({some}); add a last group with pattern = '.*'"
        raise ConfigError(message, "optimizer.param_groups")
    return Assignment(tuple(tuple(group) for group in taken), tuple(fell_through))


def _is_vector(shape: Sequence[int]) -> bool:
    """Fewer than 2 dimensions, or one row or column: the gate [1, dim] of a shared expert. Orthogonalizing such a thing
    only sets its length."""
    return len(shape) < 2 or (len(shape) == 2 and min(shape) == 1)


def _spread(names: list[str], count: int = 4) -> list[str]:
    """A few names that look different: one per shape of the name, numbers aside."""
    seen = {re.sub(r"\d+", "N", name): name for name in reversed(names)}
    return list(reversed(seen.values()))[:count]


def optimizer_names(config: Any) -> list[str]:
    """Names of the optimizers of a Trainer.Config, in the order of its groups."""
    return [group.optimizer_name for group in config.optimizer.param_groups]


def uses_dmuon(config: Any) -> bool:
    """Whether some group gives matrices to owners: "DMuon", or another optimizer as "Owned:..."."""
    return any(map(is_owned, optimizer_names(config)))


def owned_group(config: Any) -> Any:
    """The first group whose matrices have owners."""
    return next(group for group in config.optimizer.param_groups if is_owned(group.optimizer_name))


def retype(config: Any, target: type) -> Any:
    """The same values in another config class that has at least the fields of this one."""
    if type(config) is target:
        return config
    missing = {f.name for f in dataclasses.fields(config)} - {f.name for f in dataclasses.fields(target)}
    if missing:
        lacks = ", ".join(sorted(missing))
        raise TypeError(f"{target.__qualname__} has no {lacks}, which {type(config).__qualname__} has")
    return target(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init})


def to_dmuon_config(config: Any, trainer_cls: type) -> Any:
    """A registry's Trainer.Config as ``trainer_cls.Config``: the same values plus the [dmuon] table's defaults."""
    return retype(config, trainer_cls.Config)


def with_dmuon_optimizer(config: Any) -> Any:
    """Put the container that knows "DMuon" and "GatherMuon" into a Trainer.Config, in place, and return it.

    A container that is no plain OptimizersContainer is kept: its owner chose it.
    """
    from torchtitan.components.optimizer import OptimizersContainer

    from torchtitan_dmuon.titan.optimizer import DMuonOptimizersContainer

    if type(config.optimizer) is OptimizersContainer.Config:
        config.optimizer = retype(config.optimizer, DMuonOptimizersContainer.Config)
    return config
