"""Transports: how the messages of a stage move. One interface, chosen by the process group's backend.

Decides: the operations that carry a stage. Does not decide who sends what (`topology.py`) nor when (`engine.py`).
Messages are exact ranges, never padded; a pair's messages travel in the order both ends list them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

Parcel = tuple[int, torch.Tensor]  # (peer within the group, contiguous tensor)


class Transport(Protocol):
    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Callable[[], None]:
        """Start one stage; the returned call orders the caller after it. Tensors are kept alive until then."""


class PointToPoint:
    """Send and receive, one operation per message.

    On gloo each message goes out at once and moves in the background: exactly its bytes cross, where `dist.reduce` and
    `reduce_scatter_tensor` send up to three times as much. On NCCL a stage is one group of sends and receives.
    """

    def __init__(self, group: dist.ProcessGroup, grouped: bool) -> None:
        self.group = group
        self._grouped = grouped

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Callable[[], None]:
        if not sends and not recvs:
            return lambda: None
        works: list[dist.Work | None]
        if self._grouped:
            ops = [dist.P2POp(dist.irecv, t, group=self.group, group_peer=p) for p, t in recvs]
            ops += [dist.P2POp(dist.isend, t, group=self.group, group_peer=p) for p, t in sends]
            works = list(dist.batch_isend_irecv(ops))
        else:
            works = [dist.irecv(t, group=self.group, group_src=p) for p, t in recvs]
            works += [dist.isend(t, group=self.group, group_dst=p) for p, t in sends]
        tensors = [t for _, t in (*sends, *recvs)]

        def wait() -> None:
            for work in works:
                if work is not None:
                    work.wait()
            tensors.clear()

        return wait


class Logged:
    """Records every message of a transport as (phase, peer, elements, bytes, sent) before passing it on; with no inner
    transport it only records, which serves tests of large worlds in one process."""

    def __init__(self, phase: str, log: list[tuple[str, int, int, int, bool]], inner: Transport | None = None) -> None:
        self.phase, self.log, self.inner = phase, log, inner

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Callable[[], None]:
        for sent, parcels in ((False, recvs), (True, sends)):
            self.log += [(self.phase, p, t.numel(), t.numel() * t.element_size(), sent) for p, t in parcels]
        return self.inner.exchange(sends, recvs) if self.inner is not None else lambda: None


def make_transport(group: dist.ProcessGroup) -> Transport:
    """The transport that suits the group's backend."""
    return PointToPoint(group, grouped=dist.get_backend(group) == "nccl")
