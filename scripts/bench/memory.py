"""Peak memory of one variant's training step on CPU, per rank.

Decides: what counts. The bytes of all tensors alive between steps, counted one storage at a time, plus how far the
process's resident memory rises above that within a step. Allocations of 64 KiB and more are mapped one by one for the
purpose, so that memory returns to the kernel when it is freed and the rise is the step's own, on all threads.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from .model import Settings
from .variants import make_variant

# mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4


def _live_storages() -> dict[int, int]:
    found = {}
    with torch._C.DisableTorchFunctionSubclass():  # weights that are not gathered refuse to be looked at
        for thing in gc.get_objects():
            if not issubclass(type(thing), torch.Tensor):  # isinstance would wake lazy objects
                continue
            tensor = thing._local_tensor if isinstance(thing, DTensor) else thing
            storage = tensor.untyped_storage()
            if storage.device.type == "cpu" and storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def _status(key: str) -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(key))


def peak_bytes(rank: int, world: int, name: str, settings: Settings, replicas: int) -> dict[str, int]:
    """The largest rank's {"peak_bytes_per_rank", "rest_bytes_per_rank"}. It changes how its processes allocate."""
    libc = ctypes.CDLL(None)
    for option, value in ((_M_MMAP_THRESHOLD, 1 << 16), (_M_TRIM_THRESHOLD, 1 << 16), (_M_MMAP_MAX, 1 << 20)):
        libc.mallopt(option, value)
    before = set(_live_storages())
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("dp_replicate", "dp_shard"))
    variant = make_variant(name, settings, mesh)
    for index in range(2):  # the first steps fault in code and make state
        variant.train_step(index)
    variant.drain()
    gc.collect()
    rest = sum(size for address, size in _live_storages().items() if address not in before)
    dist.barrier()
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # the high-water mark becomes the present size
    at_rest = _status("VmRSS")
    variant.train_step(2)
    rise = max(0, _status("VmHWM") - at_rest)
    variant.drain()
    variant.close()
    figures: list[Any] = [None] * world
    dist.all_gather_object(figures, (rest + rise, rest))
    peak, at_rest = (max(values) for values in zip(*figures))
    return {"peak_bytes_per_rank": peak, "rest_bytes_per_rank": at_rest}
