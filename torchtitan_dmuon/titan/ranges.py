"""What values a key can have, by its type and by its range: TorchTitan takes most numbers and texts as they come.

Decides: for every number of TorchTitan's config sections the range in which it means something, and what no value of a
type may be (NaN, more than 32 bits, text with NUL or that is no UTF-8). Does not decide how keys go together
(`checks.py`) nor what files must exist (`places.py`). Keeps: a key that is not listed is held to what its type allows;
`tests/test_bad_values.py` fails for a number that TorchTitan has and this table lacks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from torchtitan_dmuon.titan.config import ConfigError, raise_all
from torchtitan_dmuon.titan.tables import shown

INT = 2**31 - 1  # what C and every library below take


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, and those of ``also``, which mean something else. ``above``: not ``low``
    itself. ``note`` ends the sentence that says what was expected."""

    low: float = 1
    high: float = INT
    also: tuple[int, ...] = ()
    above: bool = False
    note: str = ""

    def misfit(self, value: float) -> str:
        """What was expected instead of this number; "" when it fits."""
        if value in self.also or (self.low < value or value == self.low and not self.above) and value <= self.high:
            return ""
        if value > self.high:
            return f"at most {self.high:,}"
        return (f"a number above {self.low}" if self.above else f"at least {self.low}") + self.note


COUNT, FROM_0 = Range(), Range(0)
SHARE = Range(0, 1, note=" and at most 1")

# By the dotted key, else by its last part (those of data loaders, which stand in several places).
RANGES: dict[str, Range] = {
    "training.local_batch_size": COUNT,
    "training.global_batch_size": Range(also=(-1,), note=", or -1 for one micro-batch a rank"),
    "training.seq_len": COUNT,
    "training.steps": COUNT,
    "training.gc_freq": COUNT,
    "training.max_norm": Range(0, math.inf, above=True, note="; inf clips nothing"),
    "metrics.log_freq": COUNT,
    "lr_scheduler.warmup_steps": FROM_0,
    "lr_scheduler.total_steps": COUNT,
    "lr_scheduler.decay_ratio": SHARE,
    "lr_scheduler.min_lr_factor": SHARE,
    **dict.fromkeys(
        (
            f"parallelism.{axis}_degree"
            for axis in (
                "data_parallel_replicate",
                "tensor_parallel",
                "pipeline_parallel",
                "context_parallel",
                "expert_parallel",
            )
        ),
        COUNT,
    ),
    "parallelism.data_parallel_shard_degree": Range(also=(-1,), note=", or -1 for the ranks left over"),
    "parallelism.pipeline_parallel_first_stage_less_layers": FROM_0,
    "parallelism.pipeline_parallel_last_stage_less_layers": FROM_0,
    "parallelism.pipeline_parallel_layers_per_stage": COUNT,
    "parallelism.pipeline_parallel_microbatch_size": COUNT,
    "checkpoint.interval": COUNT,
    "checkpoint.keep_latest_k": FROM_0,
    "checkpoint.load_step": Range(0, also=(-1,), note=", or -1 for the latest"),
    "validator.freq": COUNT,
    "validator.steps": Range(also=(-1,), note=", or -1 for the whole set"),
    "profiler.profile_freq": COUNT,
    "profiler.profiler_repeat": FROM_0,
    "profiler.profiler_skip_first": FROM_0,
    "profiler.profiler_skip_first_wait": FROM_0,
    "profiler.profiler_active": COUNT,
    "profiler.profiler_warmup": FROM_0,
    "profiler.memory_snapshot_freq": COUNT,
    "profiler.memory_snapshot_max_entries": COUNT,
    "comm.init_timeout_seconds": COUNT,
    "comm.train_timeout_seconds": COUNT,
    "comm.trace_buf_size": Range(0, 10**7),  # entries of a buffer that is made at once
    "loss.num_chunks": COUNT,
    "activation_checkpoint.memory_budget": SHARE,
    "debug.seed": Range(0, 2**63 - 1),
    "global_vocab_size": COUNT,
    "num_workers": Range(0, 1024),  # processes of each rank
    "prefetch_factor": Range(1, 1024),
}

# Texts with few meanings, where TorchTitan's types list none.
CHOICES: dict[str, tuple[str, ...]] = {
    "activation_checkpoint.determinism_check": ("default", "none"),
    "compile.components": ("model", "loss"),
    "checkpoint.exclude_from_loading": ("optimizer", "dataloader", "lr_scheduler", "train_state"),
}


def check(config: Any) -> None:
    """Raise ConfigError, for all of them at once, where a value of a Trainer.Config is none for its type or key."""
    found = []
    try:
        for key, value in leaves(config):
            if expected := misfit(key, value):
                found.append(ConfigError(f"{_last(key)} = {shown(value)}: expected {expected}", key))
    except RecursionError:
        raise ConfigError("a value is nested too deeply") from None
    raise_all(found)


def misfit(key: str, value: Any) -> str:
    """What was expected instead of the value of this dotted key; "" when it fits."""
    if isinstance(value, str):
        return _text_misfit(key, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    if isinstance(value, float) and math.isnan(value):
        return "a number, not nan"
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a smaller number"
    allowed = RANGES.get(key) or RANGES.get(_last(key))
    if allowed is not None:
        return allowed.misfit(value)
    if isinstance(value, float):
        return "" if math.isfinite(value) else "a finite number"
    return "" if -INT <= value <= INT else f"at most {INT:,} in size"


def _text_misfit(key: str, value: str) -> str:
    if "\0" in value:
        return "a text without NUL characters"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "a text in UTF-8"
    legal = CHOICES.get(key) or CHOICES.get(key.rpartition(".")[0])  # of an array: key.0, key.1
    return f"one of {', '.join(legal)}" if legal and value not in legal else ""


def _last(key: str) -> str:
    """The last part of a dotted key that is no number of an array's item."""
    return next((part for part in reversed(key.split(".")) if not part.isdecimal()), key)


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a config that is no table or array itself; the model aside."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.name != "model_spec":
                yield from leaves(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, str(index)))
    else:
        yield ".".join(path), value
