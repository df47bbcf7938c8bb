"""What the options of `own_matrices` may be, checked before anything else happens.

Decides: kinds of values and dtypes, each refused by the option's name. Does not decide what they mean, nor choices that
the topology, the plan and the transport check themselves.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..costs import CostModel
from ..matrices import MatrixLayout
from .clip import CLIPS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of weights, gathered or given, and of gradient sums


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "units": (lambda v: isinstance(v, Iterable), "modules of the model"),
    "mp_policy": (lambda v: v is None or isinstance(v, MixedPrecisionPolicy), "a MixedPrecisionPolicy"),
    "layouts": (
        lambda v: v is None or (isinstance(v, Mapping) and all(isinstance(x, MatrixLayout) for x in v.values())),
        "a mapping of name patterns to MatrixLayout",
    ),
    "reshard_after_forward": (lambda v: isinstance(v, bool), "True or False"),
    "gradient_divide_factor": (
        lambda v: v is None or (isinstance(v, int | float) and 0 < v < math.inf),
        "a finite number above 0",
    ),
    "cost": (lambda v: v is None or isinstance(v, CostModel), "a CostModel"),
    "publish": (lambda v: v in ("async", "sync"), "one of 'async', 'sync'"),
    "prefetch": (_is_count, "an integer, at least 0"),
    "clip": (lambda v: v in CLIPS, f"one of {', '.join(map(repr, CLIPS))}"),
    "ranks_per_node": (_is_count, "an integer, at least 0"),
    "timeout": (lambda v: v is None or isinstance(v, datetime.timedelta), "a datetime.timedelta"),
}


def check_options(**given: Any) -> None:
    """ValueError that names the first option of `own_matrices` with a value of another kind."""
    for name, value in given.items():
        fits, wanted = _OPTIONS[name]
        if not fits(value):
            raise ValueError(f"{name} = {value!r}: must be {wanted}")


def unit_dtypes(
    grouped: list[tuple[str, list[str]]],
    chosen: Mapping[str, list[tuple[nn.Module, str]]],
    policy: MixedPrecisionPolicy,
) -> list[torch.dtype]:
    """dtype of the gathered weights of each unit. ValueError for one not in DTYPES, and for several in a unit."""
    allowed = ", ".join(map(str, DTYPES))
    for option in ("param_dtype", "reduce_dtype"):
        dtype = getattr(policy, option)
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"mp_policy: {option} = {dtype}: must be one of {allowed}")
    found: list[torch.dtype] = []
    for unit_name, names in grouped:
        given = {}
        for name in names:
            module, attribute = chosen[name][0]
            given[name] = module._parameters[attribute].dtype  # type: ignore[union-attr]
            if given[name] not in DTYPES:
                raise ValueError(f"{name} is {given[name]}: owned parameters are one of {allowed}")
        dtypes = {policy.param_dtype} if policy.param_dtype is not None else set(given.values())
        if len(dtypes) > 1:
            raise ValueError(
                f"{unit_name}: owned parameters of one unit have dtypes {sorted(map(str, dtypes))}; "
                "give mp_policy a param_dtype, make them equal, or take no riders of another dtype"
            )
        found += dtypes
    return found
