"""The names that are replaced inside TorchTitan 0.3.0 while one of our calls runs, and put back after it.

Decides: nothing but where TorchTitan is entered. Each context manager says why there is no other way in, and fails
loudly when the seam has moved. (Replacements for machines without an accelerator are in `platform.py`.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from torchtitan_dmuon.titan.platform import on_cpu

READ_IN = "torchtitan 0.3.0"


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """``module.name`` is ``value`` inside the block; a module or an object. RuntimeError if it has no such name."""
    if not hasattr(module, name):
        what = getattr(module, "__name__", type(module).__name__)
        raise RuntimeError(f"{what} has no {name!r}: the seam read in {READ_IN} has moved")
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextlib.contextmanager
def fsdp_ignoring(parameters_of: Callable[[], Iterable[nn.Parameter]]) -> Iterator[list[nn.Module]]:
    """`fully_shard` inside `torchtitan.distributed.fsdp` leaves these parameters alone; yields the modules it gets.

    Every decoder is sharded there, and no config reaches the call (distributed/fsdp.py:98). The parameters are asked
    for at each call, because parallelizing registers new ones in between.
    """
    import torchtitan.distributed.fsdp as fsdp

    sharded: list[nn.Module] = []
    original = fsdp.fully_shard

    def fully_shard(module: Any, **kwargs: Any) -> Any:
        sharded.extend(module if isinstance(module, list | tuple) else [module])
        kwargs["ignored_params"] = {*(kwargs.get("ignored_params") or ()), *parameters_of()}
        return original(module, **kwargs)

    with replaced(fsdp, "fully_shard", fully_shard):
        yield sharded


@contextlib.contextmanager
def clip_by(clip: Callable[[Iterable[nn.Parameter], float], Any]) -> Iterator[None]:
    """The train step clips by our norm: TorchTitan's cannot mix plain and sharded gradients (trainer.py:940)."""
    import torchtitan.distributed.utils as utils

    def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float, *_: Any, **__: Any) -> Any:
        return clip(parameters, max_norm)

    with replaced(utils, "clip_grad_norm_", clip_grad_norm_):
        yield


@contextlib.contextmanager
def also_set_timeouts(of_groups: Callable[[Any], None]) -> Iterator[None]:
    """When the Trainer shortens the timeouts of its groups after the first step, ``of_groups(timeout)`` follows
    (trainer.py:1062 sets those of the mesh alone)."""
    import torchtitan.distributed.utils as utils

    original = utils.set_pg_timeouts

    def set_pg_timeouts(timeout: Any, parallel_dims: Any) -> None:
        original(timeout=timeout, parallel_dims=parallel_dims)
        of_groups(timeout)

    with replaced(utils, "set_pg_timeouts", set_pg_timeouts):
        yield


@contextlib.contextmanager
def saves_held(checkpointer: Any, hold: Callable[[int], bool]) -> Iterator[None]:
    """No checkpoint of a step for which ``hold(step)``: the Trainer saves whatever the step did (trainer.py:1043). The
    last one of a run is saved all the same."""
    original = checkpointer.save

    def save(curr_step: int, last_step: bool = False) -> bool:
        return False if not last_step and hold(curr_step) else original(curr_step, last_step)

    with replaced(checkpointer, "save", save):
        yield


@contextlib.contextmanager
def dist_muon_on_cpu() -> Iterator[None]:
    """TorchTitan's DistMuon can be built and step on CPU and gloo; nothing changes on CUDA. Two lines admit CUDA only:
    the check of the parameters' device (distributed/flex_shard/dist_muon.py:366), and a stream made with a device
    (distributed/flex_shard/_optimizer_reshard_runtime.py:267), which `torch.cpu.Stream` does not take."""
    if not on_cpu():
        yield
        return
    from torchtitan.distributed.flex_shard.dist_muon import DistMuon

    class Stream(torch.cpu.Stream):
        def __init__(self, device: Any = None, priority: int = -1) -> None:
            super().__init__(priority)

    check = replaced(DistMuon, "_validate_parameter_storage", lambda self: torch.device("cpu"))
    with check, replaced(torch.cpu, "Stream", Stream):
        yield
