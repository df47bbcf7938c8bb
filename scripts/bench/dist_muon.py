"""TorchTitan's own DistMuon on CPU, for comparison in the bench only.

Decides: how it is configured (whole matrices owned inside the shard group, one bucket a layer) and what of torchtitan
0.3.0 is replaced while an optimizer is built or steps: what admits it to the CPU (`titan/seams.py`), and its
Newton-Schulz. That is bfloat16 always, tens of times slower than float32 on a CPU without bfloat16 instructions: it
runs ours, the same polynomial, so that all variants pay alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import torchtitan_dmuon.muon
from torchtitan_dmuon.newton_schulz import NewtonSchulz
from torchtitan_dmuon.titan import seams


def _newton_schulz(
    update: torch.Tensor, *, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> torch.Tensor:
    # Through the module: the bench times the name there.
    return torchtitan_dmuon.muon.orthogonalize(update, NewtonSchulz(ns_steps, ns_coefficients, eps=eps))


@contextlib.contextmanager
def _cpu_admitted() -> Iterator[None]:
    from torchtitan.distributed.flex_shard import dist_muon

    with seams.dist_muon_on_cpu(), seams.replaced(dist_muon, "_zeropower_via_newtonschulz", _newton_schulz):
        yield


def make_dist_muon(named: list[tuple[str, nn.Parameter]], **options: Any) -> torch.optim.Optimizer:
    """DistMuon over FSDP2's shards of the named matrices."""
    from torchtitan.distributed.flex_shard import BucketConfig, ComputeLayout, Owned
    from torchtitan.distributed.flex_shard.dist_muon import DistMuon

    class OnCpu(DistMuon):
        def step(self, closure: Any = None) -> Any:
            with _cpu_admitted():
                return super().step(closure)

    layers = list(dict.fromkeys(name.rsplit(".", 2)[0] for name, _ in named))
    group = {"params": [p for _, p in named], "param_names": [n for n, _ in named]}
    owned = ComputeLayout(shardings_by_mesh_axis={"dp_shard": Owned()})
    with _cpu_admitted():
        return OnCpu(
            [group],
            compute_sharding_by_fqn={name: owned for name, _ in named},
            bucket_configs=tuple(BucketConfig(name=layer, patterns=(f"{layer}.*",)) for layer in layers),
            **options,
        )
