"""Initial weights that depend on (seed, parameter name) alone, for every parameter of a TorchTitan model.

Decides: from which stream each parameter is drawn, and that a rank keeps its part of a draw of the whole parameter.
Does not decide distributions: each parameter's own init function is run. Keeps: DESIGN invariant 7 (the same weights on
every mesh, plan and optimizer) and 8 (one parameter is whole at a time, never the model).

TorchTitan 0.3.0 keeps init functions in `Module._param_init` (protocols/module.py), called by `init_states` on the
parameters left by FSDP2. On CPU a draw into a DTensor is not coordinated between ranks at all (both shards of the
embedding come out equal), and on CUDA it is, but otherwise than on one rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_dmuon.matrices import canonical_name
from torchtitan_dmuon.seeding import stream_seed

Init = Callable[[torch.Tensor], Any]

# Init functions that treat every element alike, whatever the tensor's shape: an expert's slice can be drawn alone.
_ELEMENTWISE = (
    torch.nn.init.normal_,
    torch.nn.init.trunc_normal_,
    torch.nn.init.uniform_,
    torch.nn.init.constant_,
    torch.nn.init.ones_,
    torch.nn.init.zeros_,
)


def is_elementwise(init: Init) -> bool:
    """Whether ``init``, partial applications aside, is known to treat every element alike."""
    while isinstance(init, functools.partial):
        init = init.func
    return init in _ELEMENTWISE


def draw(
    init: Init, name: str, seed: int, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """The whole initial value of parameter ``name`` (canonical), of ``shape``. Leaves the random state as it was.

    A stack [E, M, N] under an elementwise init is drawn expert by expert, expert e from stream e, so that
    :func:`draw_rows` can draw one alone. Everything else is drawn from stream 0.
    """
    value = torch.empty(tuple(shape), dtype=dtype, device=device)
    if value.ndim == 3 and is_elementwise(init):
        for index, slice_MN in enumerate(value):
            _run(init, slice_MN, stream_seed(seed, name, index))
    else:
        _run(init, value, stream_seed(seed, name))
    return value


def draw_rows(
    init: Init,
    name: str,
    seed: int,
    shape: Sequence[int],
    start: int,
    stop: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> torch.Tensor:
    """Rows [start, stop) on dim 0 of what :func:`draw` returns; without drawing the rest where a stack allows it."""
    if len(shape) == 3 and is_elementwise(init):
        value = torch.empty((stop - start, *shape[1:]), dtype=dtype, device=device)
        for index, slice_MN in enumerate(value, start):
            _run(init, slice_MN, stream_seed(seed, name, index))
        return value
    return draw(init, name, seed, shape, dtype=dtype, device=device)[start:stop].clone()


def install_named_init(model: torch.nn.Module, seed: int) -> None:
    """Make ``model.init_states()`` draw every parameter from its own stream. Call it after parallelizing, before init.

    Parameters may be DTensors of any placement, or plain and whole; not plain local parts of a tensor (TorchTitan's
    tensor and expert parallelism under spmd_types), see :func:`supports`. Parameters left to another initializer, or
    skipped (tied weights), stay so.
    """
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.protocols.module import Module

    for path, module in model.named_modules():
        if not isinstance(module, Module):
            continue
        prefix = canonical_name(path)
        if module._param_init is not None:
            module._param_init = {
                key: init if init is skip_param_init else _named(init, f"{prefix}.{key}".lstrip("."), seed)
                for key, init in module._param_init.items()
            }
        elif callable(getattr(module, "reset_parameters", None)) and module._parameters:
            module.reset_parameters = functools.partial(_reset_whole, module, module.reset_parameters, prefix, seed)


def supports(parallel_dims: Any) -> bool:
    """Whether every parameter is whole or a DTensor, and every rank has the same seed, under these ParallelDims."""
    return parallel_dims.tp == 1 and parallel_dims.ep == 1 and parallel_dims.pp == 1


def with_named_init(spec: Any) -> Any:
    """A ModelSpec whose models are initialized by name; unchanged under parallelism that :func:`supports` rules out.

    The seed is torch's initial seed, which TorchTitan sets to ``debug.seed``, or to one agreed on among the ranks,
    before it parallelizes.
    """
    parallelize = spec.parallelize_fn

    @functools.wraps(parallelize)
    def wrapped(model: torch.nn.Module, *, parallel_dims: Any, **kwargs: Any) -> torch.nn.Module:
        model = parallelize(model, parallel_dims=parallel_dims, **kwargs)
        if supports(parallel_dims):
            install_named_init(model, torch.initial_seed())
        return model

    return dataclasses.replace(spec, parallelize_fn=wrapped)


def keep_part(param: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a rank's part of ``whole`` into ``param``: all of it, or the shard of a DTensor. No communication."""
    with torch.no_grad():
        if isinstance(param, DTensor):
            everywhere = [Replicate()] * param.device_mesh.ndim
            whole = DTensor.from_local(whole, param.device_mesh, everywhere, run_check=False)
        param.copy_(whole)


def _named(init: Init, name: str, seed: int) -> Init:
    def draw_and_keep(param: torch.Tensor) -> None:
        if param.device.type != "meta":
            keep_part(param, draw(init, name, seed, param.shape, dtype=param.dtype, device=param.device))

    draw_and_keep.original = init  # type: ignore[attr-defined]  # for whoever places the draw elsewhere
    return draw_and_keep


def _reset_whole(module: torch.nn.Module, reset: Callable[[], None], prefix: str, seed: int) -> None:
    """Run torch's own ``reset_parameters`` on whole stand-ins of the parameters; its draws are one stream together."""
    own = {key: param for key, param in module._parameters.items() if param is not None}
    if any(param.device.type == "meta" for param in own.values()):
        return
    whole = {k: torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=p.device)) for k, p in own.items()}
    try:
        module._parameters.update(whole)
        with _seeded(stream_seed(seed, prefix), next(iter(whole.values())).device):
            reset()
    finally:
        module._parameters.update(own)
    for key, param in own.items():
        keep_part(param, whole[key].detach())


def _run(init: Init, tensor: torch.Tensor, seed: int) -> None:
    with torch.no_grad(), _seeded(seed, tensor.device):
        init(tensor)


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(seed)
        yield
