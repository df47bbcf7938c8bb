"""Wires: the operations of one process group, and the process groups themselves.

Decides: which library call carries an operation, how several become one, and which groups exist. Does not decide who
sends what (`topology.py`), in which operations (`transport.py`) nor when (`engine.py`). Ranges are exact, never padded;
every rank of a group lists the same operations in the same order (invariant 5). No operation blocks the host on CUDA:
each is ordered on the current stream, which is its lane's.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from .board import Board

Parcel = tuple[int, torch.Tensor]  # (rank within the group, contiguous tensor)

# Renamed in torch 2.13; the old names warn there, and the new ones are missing in 2.11.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Wire(Protocol):
    """All operations end before the call returns (on CUDA: are ordered before what follows on the current stream)."""

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> None:
        """Point to point, by peer; a pair's messages travel in the order both ends list them."""

    def broadcast(self, parcels: Sequence[Parcel]) -> None:
        """Each tensor from its rank to the whole group."""

    def reduce(self, parcels: Sequence[Parcel]) -> None:
        """Each tensor summed over the group into its rank's; the others' values are undefined afterwards."""

    def all_gather(self, output: torch.Tensor, mine: torch.Tensor) -> None:
        """Equal parts of all ranks, in their order."""

    def reduce_scatter(self, mine: torch.Tensor, parts: torch.Tensor) -> None:
        """The sum over the group of this rank's part of ``parts``."""


class GroupWire:
    """On gloo each message goes out at once and moves in the background: exactly its bytes cross, where gloo's
    collectives send up to three times as much. On NCCL a list of operations is one group, hence one launch."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self._device = group, device
        self._grouped = bool(getattr(group._get_backend(device), "supports_coalescing", False))

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> None:
        if self._grouped:
            ops = [dist.P2POp(dist.irecv, t, group=self.group, group_peer=p) for p, t in recvs]
            ops += [dist.P2POp(dist.isend, t, group=self.group, group_peer=p) for p, t in sends]
            for grouped in dist.batch_isend_irecv(ops):
                grouped.wait()
            return
        received = [(p, dist.irecv(t, group=self.group, group_src=p)) for p, t in recvs]
        sent = [(p, dist.isend(t, group=self.group, group_dst=p)) for p, t in sends]
        for peer, work in (*received, *sent):
            try:
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"waiting for rank {peer}: {error}") from error

    def broadcast(self, parcels: Sequence[Parcel]) -> None:
        self._together([functools.partial(dist.broadcast, t, group=self.group, group_src=p) for p, t in parcels])

    def reduce(self, parcels: Sequence[Parcel]) -> None:
        self._together([functools.partial(dist.reduce, t, group=self.group, group_dst=p) for p, t in parcels])

    def _together(self, calls: Sequence[Callable[..., Any]]) -> None:
        if not self._grouped or len(calls) < 2:
            for call in calls:
                call()
            return
        # torch has no public call for a group of broadcasts or reduces with several roots; its own send and receive
        # batches go through this one (2.11 to 2.14). Only asynchronous operations are on the stream whose progress the
        # watchdog and the flight recorder see; the wait orders the current stream behind them, not the host. An
        # exception between the calls leaves NCCL's group open: the process cannot go on.
        with dist.distributed_c10d._coalescing_manager(self.group, self._device, async_ops=True) as together:
            for call in calls:
                call(async_op=True)
        together.wait()

    def all_gather(self, output: torch.Tensor, mine: torch.Tensor) -> None:
        _all_gather(output, mine, group=self.group)

    def reduce_scatter(self, mine: torch.Tensor, parts: torch.Tensor) -> None:
        _reduce_scatter(mine, parts, group=self.group)


LogEntry = tuple[str, str, int, int, int]


class Logged:
    """Records every operation as (phase, operation, peer or root, elements, bytes) before passing it on; without an
    inner wire it only records, which serves tests of large worlds in one process. Even operations have no root: -1."""

    def __init__(self, phase: str, log: list[LogEntry], inner: Wire | None = None) -> None:
        self.phase, self.log, self.inner = phase, log, inner

    def _note(self, operation: str, parcels: Sequence[Parcel]) -> None:
        self.log += [(self.phase, operation, p, t.numel(), t.numel() * t.element_size()) for p, t in parcels]

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> None:
        self._note("recv", recvs)
        self._note("send", sends)
        if self.inner is not None:
            self.inner.exchange(sends, recvs)

    def broadcast(self, parcels: Sequence[Parcel]) -> None:
        self._note("broadcast", parcels)
        if self.inner is not None:
            self.inner.broadcast(parcels)

    def reduce(self, parcels: Sequence[Parcel]) -> None:
        self._note("reduce", parcels)
        if self.inner is not None:
            self.inner.reduce(parcels)

    def all_gather(self, output: torch.Tensor, mine: torch.Tensor) -> None:
        self._note("all_gather", [(-1, output)])
        if self.inner is not None:
            self.inner.all_gather(output, mine)

    def reduce_scatter(self, mine: torch.Tensor, parts: torch.Tensor) -> None:
        self._note("reduce_scatter", [(-1, parts)])
        if self.inner is not None:
            self.inner.reduce_scatter(mine, parts)


def on_nccl(device: torch.device) -> bool:
    """Whether tensors of ``device`` travel by NCCL; the default group may have a backend for each kind of device."""
    return device.type == "cuda" and not {"nccl", "cuda:nccl"}.isdisjoint(dist.get_backend_config().split(","))


def make_group(ranks: Sequence[int], device: torch.device, timeout: datetime.timedelta | None) -> dist.ProcessGroup:
    """A group of global ``ranks``, connected on return. Called by its members alone, in one order on every rank."""
    options, backend = None, None
    if on_nccl(device):
        backend, options = "nccl", dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if timeout is not None:
            options._timeout = timeout  # new_group warns where the two differ
    with _unbound():
        made = dist.new_group(
            list(ranks), timeout=timeout, backend=backend, pg_options=options, use_local_synchronization=True
        )
    group = cast(dist.ProcessGroup, made)
    if backend == "nccl":  # a communicator is made by its first collective, which must have all ranks in it
        dist.broadcast(torch.zeros(1, device=device), group=group, group_src=0)
    return group


@contextlib.contextmanager
def _unbound() -> Iterator[None]:
    """The default group is bound to no device (`init_process_group(device_id=...)`). From a bound one torch makes a new
    group by splitting its communicator, in which ranks outside the new group must take part; ours are made by their
    members alone, who may be a part of the world (torch 2.11 to 2.14, `_new_process_group_helper`)."""
    world = dist.group.WORLD
    assert world is not None
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


class Control:
    """Small exchanges of the whole data-parallel group. ``groups``: one of all its ranks, or several that reach all of
    them one after the other, in rank order (a node's ranks, then equal local ranks); none on a single rank. ``board``:
    where they post words beside the groups."""

    def __init__(self, groups: Sequence[dist.ProcessGroup] = (), board: Board | None = None) -> None:
        self.groups, self.board = tuple(groups), board or Board([0], 0)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Sum, or largest, in place."""
        for group in self.groups:
            dist.all_reduce(tensor, op=op, group=group)

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order."""
        values = [value]
        for group in self.groups:
            every: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(every, values, group=group)
            values = [v for each in every for v in each]
        return values
