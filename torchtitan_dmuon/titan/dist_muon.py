"""TorchTitan's own DistMuon as an `optimizer_name` of a TOML file, as a baseline beside GatherMuon.

Decides: the arguments that no TOML file can say (which mesh axis owns a matrix while it is updated, and which matrices
move together) from the model, and where that cannot work. Does not decide the update: it is TorchTitan's, which takes a
fused weight as one matrix unless `per_head` cuts it. Keeps: a registry config that brings these arguments is left as
it is. Read in torchtitan 0.3.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchtitan_dmuon.matrices import OwnedSpec
from torchtitan_dmuon.titan import seams
from torchtitan_dmuon.titan.config import ConfigError
from torchtitan_dmuon.titan.models import owned_specs, sharded_modules
from torchtitan_dmuon.titan.names import LAYOUT_OPTIONS
from torchtitan_dmuon.titan.platform import on_cpu

NAME = "DistMuon"


def brings_arguments(config: Any) -> bool:
    """Whether a Trainer.Config comes with the arguments of a DistMuon of its own."""
    return bool(config.optimizer.optimizer_factory_kwargs_by_name.get(NAME))


def is_dist_muon(optimizer: torch.optim.Optimizer) -> bool:
    from torchtitan.distributed.flex_shard.dist_muon import DistMuon

    return isinstance(optimizer, DistMuon)


def check(config: Any, world_size: int | None) -> None:
    """Raise ConfigError where DistMuon cannot be built from the file."""
    groups = [i for i, group in enumerate(config.optimizer.param_groups) if group.optimizer_name == NAME]
    if not groups or brings_arguments(config):
        return
    if len(groups) > 1:
        raise ConfigError(
            "DistMuon takes one parameter group; let one pattern match all of its matrices",
            f"optimizer.param_groups.{groups[1]}.optimizer_name",
        )
    mesh = config.parallelism
    for key in ("tensor", "pipeline", "context", "expert"):
        degree = getattr(mesh, f"{key}_parallel_degree")
        if degree > 1:
            raise ConfigError(
                f"{key}_parallel_degree = {degree}: DistMuon from a file is for data parallelism alone; set it to 1, "
                "or use a registry config that says how its matrices are laid out there",
                f"parallelism.{key}_parallel_degree",
            )
    if world_size == 1:
        raise ConfigError(
            "DistMuon updates FSDP2's shards, and one rank has none; use DMuon or GatherMuon there",
            f"optimizer.param_groups.{groups[0]}.optimizer_name",
        )


def build(model: nn.Module, groups: list[dict[str, Any]], **brought: Any) -> torch.optim.Optimizer:
    """DistMuon over FSDP2's shards of the groups' matrices; ``brought``: what a registry config says itself."""
    from torchtitan.distributed.flex_shard import build_dist_muon

    given = [{key: value for key, value in group.items() if key not in LAYOUT_OPTIONS} for group in groups]
    if not brought:
        (group,) = groups
        names = group["param_names"]
        specs = owned_specs(model, names, names if group.get("per_head") else ())
        mesh = group["params"][0].device_mesh
        axis = next(a for a in ("dp_shard", "dp_replicate") if a in mesh.mesh_dim_names and mesh[a].size() > 1)
        brought = arguments(specs, sharded_modules(model), axis)
    with seams.dist_muon_on_cpu():
        made = build_dist_muon(given, **brought)
    if on_cpu():
        made.__class__ = _on_cpu(type(made))
    return made


def _on_cpu(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class, which steps where its work is admitted to the CPU."""

    def step(self: Any, closure: Any = None) -> Any:
        with seams.dist_muon_on_cpu():
            return cls.step(self, closure)

    return type(cls.__name__, (cls,), {"step": step})


def arguments(specs: Iterable[OwnedSpec], units: Iterable[str], axis: str) -> dict[str, Any]:
    """`compute_sharding_by_fqn` and `bucket_configs`: each matrix has one owner along ``axis`` of the mesh while it is
    updated, and the matrices of a unit travel together."""
    from torchtitan.distributed.flex_shard import BlockShard, BucketConfig, ComputeLayout, Owned

    def sharding(spec: OwnedSpec) -> Any:
        rows = set(spec.layout.rows)
        if spec.layout.groups == 1 and len(spec.layout.rows) > 1 and len(rows) == 1:  # heads, one after the other
            return BlockShard(dim=0, block_size=rows.pop())
        return Owned()

    specs = list(specs)
    by_name = {s.name: ComputeLayout(shardings_by_mesh_axis={axis: sharding(s)}) for s in specs}
    found = {unit: tuple(n for n in by_name if n.startswith(f"{unit}.")) for unit in units}
    rest = tuple(n for n in by_name if not any(n in names for names in found.values()))
    buckets = [BucketConfig(name=unit, patterns=names) for unit, names in [*found.items(), ("rest", rest)] if names]
    return {"compute_sharding_by_fqn": by_name, "bucket_configs": tuple(buckets)}
