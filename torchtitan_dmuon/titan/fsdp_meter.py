"""What FSDP2's own collectives send and wait for, in the figures that owned parameters have.

Decides: which calls are counted, by FSDP2's public settings (`set_custom_all_gather`, `set_custom_reduce_scatter`,
`set_all_reduce_hook`; read in torch 2.14), and what a call sends: as `footprint.ring_bytes`, which the plan uses too.
Does not change what is sent. Keeps: what cannot be measured is absent, never 0. On CPU a collective blocks the model's
computation and is timed; on CUDA no public setting tells when the computation waits for one, so there is no time there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_dmuon.footprint import ring_bytes

DISTANCES = ("intra_node", "inter_node")


class FsdpMeter:
    """Counts on every rank since the last :meth:`take`. ``unmetered``: why some module's collectives are not seen."""

    def __init__(self, model_parts: Iterable[nn.Module], ranks_per_node: int, timed: bool) -> None:
        self.timed = timed
        self.unmetered = ""
        self._ranks_per_node = ranks_per_node
        self._nodes: dict[Any, int] = {}
        self._clear()
        for module in (m for part in model_parts for m in part.modules()):
            if isinstance(module, FSDPModule):
                try:
                    self._attach(module)
                except (ValueError, AttributeError) as error:
                    self.unmetered = str(error)

    def _clear(self) -> None:
        self._seconds = {"gather": 0.0, "reduce": 0.0}
        self._sent = dict.fromkeys(DISTANCES, 0.0)

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """(seconds waited by phase, bytes that this rank sent by distance) since the last call."""
        taken = self._seconds, self._sent
        self._clear()
        return taken

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """What happens in here is in no figure."""
        kept = self.take()
        yield
        self._seconds, self._sent = kept

    def add_sent(self, total: float, group: Any, all_reduce: bool = False) -> None:
        """A whole tensor of ``total`` bytes was gathered, scattered or all-reduced over a group."""
        near, far = ring_bytes(total, dist.get_world_size(group), self._spans(group), all_reduce)
        self._sent["intra_node"] += near
        self._sent["inter_node"] += far

    def _spans(self, group: Any) -> int:
        """Nodes that a group's ranks lie on."""
        if group not in self._nodes:
            ranks = dist.get_process_group_ranks(group)
            self._nodes[group] = len({rank // self._ranks_per_node for rank in ranks})
        return self._nodes[group]

    def _attach(self, module: FSDPModule) -> None:
        module.set_custom_all_gather(_AllGather(self))
        reduce = _ReduceScatter(self)
        module.set_custom_reduce_scatter(reduce)
        params = (p for p in module.parameters() if isinstance(p, DTensor))  # type: ignore[attr-defined]
        for param in params:
            for dim, placement in enumerate(param.placements):
                if isinstance(placement, Replicate) and param.device_mesh.size(dim) > 1:
                    module.set_all_reduce_hook(reduce.all_reduced(param.device_mesh.get_group(dim)))
                    return
            return

    def timing(self, phase: str, since: float) -> None:
        if self.timed:
            self._seconds[phase] += time.perf_counter() - since


class _AllGather(DefaultAllGather):
    def __init__(self, meter: FsdpMeter) -> None:
        self._meter = meter

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False):  # type: ignore[no-untyped-def]
        begin = time.perf_counter()
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        self._meter.timing("gather", begin)
        self._meter.add_sent(output_tensor.numel() * output_tensor.itemsize, group)
        return work


class _ReduceScatter(DefaultReduceScatter):
    """And the all-reduce behind it: the time from the end of one to the hook behind the other."""

    def __init__(self, meter: FsdpMeter) -> None:
        self._meter = meter
        self._ended = 0.0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = super().allocate(size, dtype=dtype, device=device)
        self._ended = time.perf_counter()  # where one rank holds all rows, nothing is scattered after this
        return made

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ):  # type: ignore[no-untyped-def]  # noqa: E501
        begin = time.perf_counter()
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        self._meter.timing("reduce", begin)
        self._meter.add_sent(input_tensor.numel() * input_tensor.itemsize, group)
        self._ended = time.perf_counter()
        return work

    def all_reduced(self, group: Any) -> Callable[[torch.Tensor], None]:
        def hook(summed: torch.Tensor) -> None:
            self._meter.timing("reduce", self._ended)
            self._meter.add_sent(summed.numel() * summed.itemsize, group, all_reduce=True)

        return hook
