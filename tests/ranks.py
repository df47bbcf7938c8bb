"""Run a function on N gloo ranks by forking: torch is imported once, a job of 4 ranks costs 0.3 s.

Every job has a hard time limit. A rank that raises, dies or hangs fails the test with that rank's traceback;
only processes forked here are ended.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
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
import torch._dynamo  # noqa: F401  (module hooks use it; imported once here, not once in every rank)
import torch.distributed as dist

torch.set_num_threads(1)
gc.freeze()  # what was imported is none of a test's objects: collections and walks over them pass it by


class RankFailed(AssertionError):
    """A rank raised, died or ran past the limit."""


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _rank_main(fn, args, rank, world, ranks_per_node, port, limit, pipe, init) -> None:
    code = 1
    try:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_RANK=str(rank % ranks_per_node),
            LOCAL_WORLD_SIZE=str(ranks_per_node),
            GROUP_RANK=str(rank // ranks_per_node),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
            OMP_NUM_THREADS="1",
        )
        torch.set_num_threads(1)
        if init:
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=limit))
        value = fn(rank, world, *args)
        if init:
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


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    ranks_per_node: int | None = None,
    limit: float = 60.0,
    init: bool = True,
) -> list[Any]:
    """Fork ``world`` gloo ranks and return ``[fn(rank, world, *args)]`` in rank order.

    ``ranks_per_node`` only sets LOCAL_WORLD_SIZE and friends: all ranks talk over loopback. ``init=False`` leaves the
    default process group to ``fn``.
    Raises :class:`RankFailed` with the first failing rank's traceback, or after ``limit`` seconds.
    """
    port = _free_port()
    children: dict[int, tuple[int, int]] = {}  # read end of the pipe -> (rank, pid)
    for rank in range(world):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            _rank_main(fn, args, rank, world, ranks_per_node or world, port, limit, write_end, init)
        os.close(write_end)
        children[read_end] = (rank, pid)

    results: list[Any] = [None] * world
    buffers = dict.fromkeys(children, b"")
    live, deadline, failure = set(children), time.monotonic() + limit, None
    while live and failure is None:
        for end in select.select(list(live), [], [], 0.2)[0]:
            if chunk := os.read(end, 1 << 20):
                buffers[end] += chunk
                continue
            live.discard(end)
            rank = children[end][0]
            ok, value = pickle.loads(buffers[end]) if buffers[end] else (False, "died without a result")
            if ok:
                results[rank] = value
            else:
                failure = f"rank {rank} of {world}: {value}"
        if time.monotonic() > deadline:
            failure = failure or f"ranks {sorted(children[e][0] for e in live)} still ran after {limit} s"
    for end, (_, pid) in children.items():
        if failure is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(end)
        os.waitpid(pid, 0)
    if failure is not None:
        raise RankFailed(failure)
    return results
