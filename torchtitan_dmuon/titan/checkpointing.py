"""Optimizer state of a checkpoint, compared with what this run's optimizers need before anything is read.

Decides: whether the optimizer that wrote a parameter's state is the one that would read it, what happens where it is
not (`[dmuon] on_optimizer_change`), and that options and states which an older run lacked begin with this run's values.
Does not decide what state looks like (`checkpoint.py`) nor where it is stored. Keeps: every rank decides the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer.base import OPTIMIZER
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.tools.logging import logger

from torchtitan_dmuon.titan.config import ConfigError
from torchtitan_dmuon.titan.optimizer import DMuonOptimizersContainer

# An option of this package's Muon alone: other classes cannot take its other values up, such as names of coefficients.
_OURS = "momentum_form"


class DMuonCheckpointManager(CheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    on_optimizer_change = "error"  # set by the trainer, whose config has it

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        optimizers = state_dict.get(OPTIMIZER)
        if not isinstance(optimizers, DMuonOptimizersContainer):
            return super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        keys = _keys_of(checkpoint_id)
        restarted = _compare(optimizers.state_dict(), keys, checkpoint_id, self.on_optimizer_change)
        with optimizers.reading(lambda flat: {k: v for k, v in flat.items() if _is_there(k, v, keys, restarted)}):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)


class _Metadata(dcp.DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.keys = set(metadata.state_dict_metadata)


def _keys_of(checkpoint_id: str) -> set[str]:
    """Keys of the optimizers' state in a checkpoint, in whatever storage."""
    planner = _Metadata()
    dcp.load({}, checkpoint_id=checkpoint_id, planner=planner)
    return {key.removeprefix(f"{OPTIMIZER}.") for key in planner.keys if key.startswith(f"{OPTIMIZER}.")}


@dataclass
class Kept:
    """What is kept of one parameter: the names of its states and of its group's options."""

    states: set[str] = field(default_factory=set)
    options: set[str] = field(default_factory=set)


def kept_of(keys: Iterable[str], names: set[str]) -> dict[str, Kept]:
    """By parameter, what ``state.{name}.*`` and ``param_groups.{name}.*`` hold; a row's own, ``state.{name}[3].step``,
    is the parameter's."""
    found: dict[str, Kept] = defaultdict(Kept)
    for key in keys:
        kind, *parts = key.split(".")
        for at in range(len(parts) - 1, 0, -1):
            if (name := ".".join(parts[:at]).partition("[")[0]) in names:
                (found[name].states if kind == "state" else found[name].options).add(parts[at])
                break
    return dict(found)


def is_changed(now: Kept, then: Kept) -> bool:
    """Whether another rule wrote the state. A class may get options, and may have had others: not both at once."""
    if not then.options or (then.states and then.states != now.states):
        return True
    gone = then.options - now.options
    return _OURS in gone or bool(gone and now.options - then.options)


def _compare(mine: Mapping[str, Any], keys: set[str], checkpoint_id: str, on_change: str) -> set[str]:
    """The parameters whose state begins anew. ConfigError if there are some and that is not asked for."""
    every: list[Any] = [None] * dist.get_world_size()
    names = {key.partition(".")[2].rpartition(".")[0] for key in mine if key.startswith("param_groups.")}
    dist.all_gather_object(every, (kept_of(mine, names), [k for k, v in mine.items() if not _is_there(k, v, keys)]))
    now: dict[str, Kept] = {}
    for kept, _ in every:
        for name, each in kept.items():
            so_far = now.setdefault(name, Kept())
            so_far.states |= each.states
            so_far.options |= each.options
    then = kept_of(keys, set(now))
    changed = sorted(name for name in now if is_changed(now[name], then.get(name, Kept())))
    if changed:
        name = changed[0]
        has, needs = (", ".join(sorted(k.states)) or "no state" for k in (then.get(name, Kept()), now[name]))
        what = (
            f"the checkpoint {checkpoint_id} was written with another optimizer for {len(changed)} of {len(now)} "
            f"parameters (first {name}: it has {has}; this run has {needs})"
        )
        if on_change == "error":
            raise ConfigError(
                f'{what}. [dmuon] on_optimizer_change = "restart_state" loads everything else and begins their '
                f'optimizer state anew; [checkpoint] exclude_from_loading = ["{OPTIMIZER}"] begins that of all anew',
                "dmuon.on_optimizer_change",
            )
        logger.warning(f"{what}: their optimizer state begins anew")
    lacking = {key for _, absent in every for key in absent}
    for kind, line in (
        ("options", "the checkpoint has no {} for {} parameters ({}): they keep the values of this run"),
        ("states", "the checkpoint has no {} for {} parameters ({}), which had no gradient yet: it begins anew"),
    ):
        of: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for name, each in sorted(kept_of(lacking, set(now) - set(changed)).items()):
            if absent := getattr(each, kind):
                of[tuple(sorted(absent))].append(name)
        for what_lacks, whose in of.items():
            logger.warning(line.format(", ".join(what_lacks), len(whose), ", ".join(whose[:2])))
    return set(changed)


def _is_there(key: str, value: Any, keys: set[str], restarted: Iterable[str] = ()) -> bool:
    """Whether the checkpoint has all of a value, and it is wanted."""
    name = key.partition(".")[2]
    if any(name.startswith((f"{each}.", f"{each}[")) for each in restarted):
        return False
    return all(leaf in keys for leaf in _leaves(key, value))


def _leaves(key: str, value: Any) -> Iterable[str]:
    """The keys under which DCP stores a value, as its own planner says: not every list is taken apart."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({key: value})
    return planner.mappings
