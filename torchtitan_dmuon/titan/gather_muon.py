"""Gather-then-replicate Muon over FSDP2 parameters: the baseline that DMuon is compared with.

Decides: when an update's input is gathered, and which rows of the full update a rank applies. The rule itself is
`muon.py`'s. Keeps: the update of one process, on every mesh. Every rank of every replica repeats the Newton-Schulz work
of all matrices, which is the point of comparing.

Shape suffixes: M rows, N columns of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchtitan_dmuon.muon import (
    Muon,
    StepStats,
    decay_weight,
    execution_of,
    layout_of,
    momentum_update,
    orthogonalized_updates,
    settings_of,
)
from torchtitan_dmuon.newton_schulz import compute_dtype, flops


class GatherMuon(Muon):
    """Muon over 2-D DTensor parameters (FSDP2, HSDP) or plain ones; arguments as :class:`torchtitan_dmuon.muon.Muon`.

    Momentum has the parameter's placement; NorMuon's row moments are whole on every rank. A step gathers each update
    input in the Newton-Schulz dtype, so every rank must have a gradient for the same parameters. At most
    ``batch_bytes`` of gathered inputs, and at least one, exist at a time. Raises ValueError at construction, naming
    what is allowed. ``gathered(bytes, group)``, where it is set, is told of each gather.
    """

    gathered: Callable[[int, Any], None] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.stats = StepStats()
        for group in self.param_groups:
            settings = settings_of(group)
            lr = float(group["lr"])
            for params in self._batches(group):
                inputs_MN = _gathered([self._local_input(param, group) for param in params], params[0])
                self._tell(inputs_MN, params[0])
                layouts = [layout_of(param) for param in params]
                moments = [self._row_moment(param, group) for param in params]
                updates_MN = orthogonalized_updates(
                    inputs_MN,
                    layouts,
                    settings,
                    group["adjust_lr_fn"],
                    self.batch_bytes,
                    moments,
                    group["row_beta"],
                    execution_of(group),
                )
                for param, layout, update_MN in zip(params, layouts, updates_MN, strict=True):
                    local, update = _local(param), _local_part(update_MN, param)
                    decay_weight(local, update, lr * group["weight_decay"], group["cautious_weight_decay"])
                    local.add_(update, alpha=-lr)
                    for shape in layout.shapes(param.shape):
                        self.stats.ns_calls += 1
                        self.stats.ns_flops += flops(*shape, settings, local.device.type)
        return loss

    def _tell(self, inputs_MN: list[torch.Tensor], like: torch.Tensor) -> None:
        if self.gathered is None or not isinstance(like, DTensor):
            return
        for dim, placement in enumerate(like.placements):
            if isinstance(placement, Shard):
                self.gathered(sum(x.numel() * x.itemsize for x in inputs_MN), like.device_mesh.get_group(dim))

    def _batches(self, group: dict[str, Any]) -> Iterator[list[torch.Tensor]]:
        """Parameters with a gradient, sharded alike; the same on every rank; ``batch_bytes`` gathered at most."""
        alike: dict[tuple[object, ...], list[torch.Tensor]] = {}
        for param in group["params"]:
            if param.grad is not None:
                sharding = (param.device_mesh, param.placements) if isinstance(param, DTensor) else ()
                alike.setdefault((param.shape, *sharding), []).append(param)
        for params in alike.values():
            shape = params[0].shape
            # The input in its dtype, and the update in float32.
            each = shape.numel() * (compute_dtype(settings_of(group), params[0].device).itemsize + 4)
            size = max(1, self.batch_bytes // each)
            for start in range(0, len(params), size):
                yield params[start : start + size]

    def _local_input(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """This rank's part of the update's input, in the Newton-Schulz dtype."""
        assert param.grad is not None
        buffer = _local(self._momentum(param, group))
        mixed = momentum_update(
            buffer, _local(param.grad), group["momentum"], group["nesterov"], group["momentum_form"]
        )
        return mixed.to(compute_dtype(settings_of(group), mixed.device))


def _gathered(parts: list[torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
    """Whole tensors [M, N] of which ``parts`` are this rank's, each sharded as ``like``; in one gather for all."""
    if not isinstance(like, DTensor):
        return parts
    parts_BMN = torch.stack(parts)
    placements = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in like.placements]
    shape = torch.Size((len(parts), *like.shape))
    stride = (like.numel(), *like.stride())
    stacked = DTensor.from_local(parts_BMN, like.device_mesh, placements, run_check=False, shape=shape, stride=stride)
    return list(stacked.full_tensor().unbind())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_part(full_MN: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds of ``param``; slicing only, uneven shards included."""
    if not isinstance(param, DTensor):
        return full_MN
    whole = DTensor.from_local(full_MN, param.device_mesh, [Replicate()] * param.device_mesh.ndim, run_check=False)
    return whole.redistribute(placements=param.placements).to_local()
