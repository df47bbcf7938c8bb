"""The lab: gloo ranks forked into the nodes of a small cluster, or onto plain loopback when no lab is needed.

Decides: how ranks are forked, placed, limited in time and ended. Does not decide how nodes are made
(`namespaces.py`). Keeps: torch is imported once, by the parent; a rank never outlives its parent, a failed sibling or
the time limit; only processes forked here are ended.

    with Lab(nodes=2) as lab:
        lab.shape("200mbit")
        results = lab.run(train, 2, args, limit=60)     # train(rank, world, args) on 2 x 2 ranks
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import itertools
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .namespaces import INTERFACE, LabForbidden, Namespaces

__all__ = ["Lab", "LabForbidden", "RankFailed", "run_on_loopback"]

_PR_SET_PDEATHSIG = 1
_ports = itertools.count(20011)


class RankFailed(RuntimeError):
    """A rank raised, died or ran past the limit. The message has its traceback."""


class Lab:
    """``nodes`` namespaces with links between them. A context manager; :meth:`run` may be called several times.

    Raises :class:`LabForbidden` where the kernel does not allow namespaces.
    """

    def __init__(self, nodes: int) -> None:
        self.namespaces = Namespaces.create(nodes)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.namespaces.close()

    def shape(self, rate: str | float) -> None:
        """Limit the links between nodes; see :meth:`Namespaces.shape`."""
        self.namespaces.shape(rate)

    def run(self, fn: Callable[..., Any], ranks_per_node: int, *args: Any, limit: float = 60.0) -> list[Any]:
        """``[fn(rank, world, *args)]`` in rank order; rank r is on node r // ranks_per_node.

        Raises :class:`RankFailed` with the first failing rank's traceback, or after ``limit`` seconds.
        """
        # A port of the node's own namespace: nothing else listens there.
        where = (self.namespaces.address(0), next(_ports), INTERFACE)
        world = len(self.namespaces.nodes) * ranks_per_node
        enter = lambda rank: self.namespaces.enter(rank // ranks_per_node)  # noqa: E731
        return _run(fn, args, world, ranks_per_node, where, enter, limit)


def run_on_loopback(
    fn: Callable[..., Any], world: int, *args: Any, ranks_per_node: int | None = None, limit: float = 60.0
) -> list[Any]:
    """As :meth:`Lab.run` without namespaces: ``ranks_per_node`` only sets the environment of the ranks."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return _run(fn, args, world, ranks_per_node or world, ("127.0.0.1", port, "lo"), lambda _rank: None, limit)


def _run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world: int,
    ranks_per_node: int,
    where: tuple[str, int, str],
    enter: Callable[[int], None],
    limit: float,
) -> list[Any]:
    ranks: dict[int, tuple[int, int]] = {}  # read end of a pipe -> (rank, process id)
    parent = os.getpid()
    try:
        for rank in range(world):
            read_end, write_end = os.pipe()
            pid = os.fork()
            if pid == 0:
                for end in (read_end, *ranks):
                    os.close(end)
                _rank_main(fn, args, rank, world, ranks_per_node, where, enter, limit, write_end, parent)
            os.close(write_end)
            ranks[read_end] = (rank, pid)
        return _collect(ranks, limit)
    finally:
        for end, (_, pid) in ranks.items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # has ended already, unless something failed
            os.close(end)
            os.waitpid(pid, 0)


def _collect(ranks: dict[int, tuple[int, int]], limit: float) -> list[Any]:
    results: list[Any] = [None] * len(ranks)
    buffers = dict.fromkeys(ranks, b"")
    live, deadline = set(ranks), time.monotonic() + limit
    while live:
        for end in select.select(list(live), [], [], 0.2)[0]:
            if chunk := os.read(end, 1 << 20):
                buffers[end] += chunk
                continue
            live.discard(end)
            rank = ranks[end][0]
            ok, value = pickle.loads(buffers[end]) if buffers[end] else (False, "died without a result")
            if not ok:
                raise RankFailed(f"rank {rank} of {len(ranks)}: {value}")
            results[rank] = value
        if live and time.monotonic() > deadline:
            raise RankFailed(f"ranks {sorted(ranks[e][0] for e in live)} of {len(ranks)} still ran after {limit:g} s")
    return results


def _rank_main(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world: int,
    ranks_per_node: int,
    where: tuple[str, int, str],
    enter: Callable[[int], None],
    limit: float,
    pipe: int,
    parent: int,
) -> None:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(code)
        enter(rank)
        address, port, interface = where
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_RANK=str(rank % ranks_per_node),
            LOCAL_WORLD_SIZE=str(ranks_per_node),
            GROUP_RANK=str(rank // ranks_per_node),
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME=interface,
            OMP_NUM_THREADS="1",
        )
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=limit))
        value = fn(rank, world, *args)
        dist.barrier()
        dist.destroy_process_group()
        data, code = pickle.dumps((True, value)), 0
    except BaseException:  # reported to the parent, whatever it was
        data = pickle.dumps((False, traceback.format_exc()))
    with os.fdopen(pipe, "wb") as f:
        f.write(data)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
