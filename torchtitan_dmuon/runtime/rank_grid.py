"""The data-parallel group before any of ours is made: a mesh's ranks, their nodes, and which of them this process is.

Decides: what a mesh and the launcher's environment may be. Makes no process group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..topology import Topology


@dataclass(frozen=True)
class RankGrid:
    """The data-parallel group: global ranks, ascending, ``shard_size`` per shard group. ``groups``: process groups that
    exist, which reach all ranks one after the other, as :class:`Control` takes them; none for a single rank."""

    ranks: tuple[int, ...]
    shard_size: int
    device_type: str
    groups: tuple[dist.ProcessGroup, ...] = ()

    def __post_init__(self) -> None:
        if list(self.ranks) != sorted(set(self.ranks)):
            raise ValueError(f"the ranks of the mesh must ascend, row by row, got {str(self.ranks):.80}")

    @staticmethod
    def of(mesh: DeviceMesh | RankGrid) -> RankGrid:
        if isinstance(mesh, RankGrid):
            return mesh
        if not isinstance(mesh, DeviceMesh):
            raise ValueError(f"mesh = {mesh!r}: must be a DeviceMesh")
        if mesh.ndim not in (1, 2):
            raise ValueError(f"the mesh must be 1-D [shard] or 2-D [replicate, shard], got {mesh.ndim} dimensions")
        groups = tuple(mesh.get_group(d) for d in reversed(range(mesh.ndim)) if mesh.size(d) > 1)
        return RankGrid(tuple(mesh.mesh.flatten().tolist()), mesh.shape[-1], mesh.device_type, groups)

    def topology(self, ranks_per_node: int, routing: str, holders: str, ownership: str) -> Topology:
        """Nodes of ``ranks_per_node`` ranks, or of the launcher's LOCAL_WORLD_SIZE where it is 0. Raises ValueError."""
        if ownership == "replica" and holders == "node":
            raise ValueError(
                'ownership = "replica" with holders = "node" is not supported: use holders = "shard_group"'
            )
        world = len(self.ranks)
        local = os.environ.get("LOCAL_WORLD_SIZE", str(world))
        if not ranks_per_node and (not local.isdecimal() or int(local) == 0):
            raise ValueError(f"LOCAL_WORLD_SIZE = {local!r} in the environment: must be a positive integer")
        return Topology(world, self.shard_size, ranks_per_node or int(local), routing, holders, ownership)

    def own_index(self) -> int:
        """Of this process among the ranks. ValueError where it is none of them."""
        rank = dist.get_rank()
        if rank not in self.ranks:
            raise ValueError(f"this is rank {rank}, which is not among those of the mesh: {str(self.ranks):.80}")
        return self.ranks.index(rank)

    def device(self) -> torch.device:
        if self.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device_type)
