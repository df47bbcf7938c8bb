"""FSDP2 with three ways to reduce gradients, through its public settings: the best that plain FSDP2 can do on gloo.

Decides: which process group moves FSDP2's gradients, with which operation and when. Keeps: gradients after `wait` are
the sum over all ranks, whatever the way and the accumulation.

    stock   a 2-D mesh as it comes: reduce-scatter inside, then a blocking all-reduce between replicas
    tuned   the same with a reduce-scatter made of one all-to-all and a local sum, which on gloo sends a third
    async   `tuned`, on a 1-D mesh, whose all-reduce between replicas starts from FSDP2's all-reduce hook and runs
            behind the rest of the backward; waited for before the step. What NCCL does by itself
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

WAYS = ("stock", "tuned", "async")
# The model itself decides the dtype of its activations.
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


class ExchangeAndSum(ReduceScatter):
    """Reduce-scatter as one all-to-all and a sum in rank order. Gloo's own sends as much as a whole all-reduce."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), 0, out=output_tensor)


class Fsdp:
    """Shards the parts of one model over ``mesh`` [R, S] and reduces their gradients in one of the WAYS."""

    def __init__(self, mesh: DeviceMesh, way: str) -> None:
        self.way = way
        self.replicas = mesh.size(0)
        self.overlapped = way == "async" and self.replicas > 1
        # One replica has nothing between replicas: a 1-D mesh, and `async` is `tuned`.
        self.mesh = mesh["dp_shard"] if self.overlapped or self.replicas == 1 else mesh
        self.between = mesh.get_group("dp_replicate")
        self.modules: list[FSDPModule] = []
        self.waited = 0.0
        self._last = True
        self._works: list[tuple[dist.Work, torch.Tensor]] = []
        self._partial: dict[int, torch.Tensor] = {}  # index of the module -> sums of earlier micro-batches

    def shard(self, model: nn.Module, parts: Iterable[nn.Module], ignored: set[nn.Parameter] | None = None) -> None:
        """`fully_shard` on each part and on the model. Gradients are summed: the loss is divided by all tokens."""
        for part in (*parts, model):
            fully_shard(part, mesh=self.mesh, mp_policy=POLICY, ignored_params=ignored)
        self.modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        for index, module in enumerate(self.modules):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            if self.way != "stock":
                module.set_custom_reduce_scatter(ExchangeAndSum())
            if self.overlapped:
                module.set_all_reduce_hook(functools.partial(self._between_replicas, index))

    def begin_backward(self, last: bool) -> None:
        """``last``: the step follows. Otherwise sums stay inside each replica until the last."""
        self._last = last
        if not self.overlapped and self.replicas > 1:
            for module in self.modules:
                module.set_requires_all_reduce(last, recurse=False)

    def end_backward(self, parameters: Iterable[nn.Parameter]) -> None:
        if self.overlapped and not self._last:
            for p in parameters:  # `_partial` has those of FSDP2's; the last backward starts anew
                if isinstance(p, DTensor):
                    p.grad = None

    def _between_replicas(self, index: int, output: torch.Tensor) -> None:
        if not self._last:
            earlier = self._partial.get(index)
            self._partial[index] = output if earlier is None else earlier.add_(output)
            return
        if (earlier := self._partial.pop(index, None)) is not None:
            output.add_(earlier)
        self._works.append((dist.all_reduce(output, group=self.between, async_op=True), output))

    def wait(self) -> None:
        begin = time.perf_counter()
        for work, _ in self._works:
            work.wait()
        self._works.clear()
        self.waited += time.perf_counter() - begin
