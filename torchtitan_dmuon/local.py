"""`python -m torchtitan_dmuon.local N ARGUMENTS`: the ranks of one CPU machine, forked after one import.

Decides: how N gloo ranks start where importing torch and TorchTitan N times would take longer than training (a laptop,
the quickstart). Each rank sees the environment that torchrun would give it and runs `torchtitan_dmuon.train` with the
arguments. Not for CUDA, whose processes do not survive a fork, nor for several nodes: use torchrun there.

Rank 0 writes to the terminal; the others to files, whose end is shown if a rank fails. When one rank ends badly, or on
a signal, the rest are ended. Keeps: no signal that can be handled leaves a rank or the folder of those files behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_GRACE_SECONDS = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the first bad exit code of a rank, or 0."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or not argv[0].isdecimal() or int(argv[0]) < 1:
        print("usage: python -m torchtitan_dmuon.local N ARGUMENTS of torchtitan_dmuon.train", file=sys.stderr)
        return 2
    world, arguments = int(argv[0]), argv[1:]

    import torch

    from torchtitan_dmuon.titan import platform

    if not platform.on_cpu():
        print("error: this machine has an accelerator; start with torchrun instead", file=sys.stderr)
        return 2
    threads = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(threads)
    platform.prepare()
    import torchtitan.trainer  # noqa: F401

    import torchtitan_dmuon.titan.optimizer  # noqa: F401
    from torchtitan_dmuon import train

    return _launch(world, arguments, train.main)


def _launch(world: int, arguments: list[str], run: Callable[[list[str]], int]) -> int:
    """``run(arguments)`` on every rank. Returns the first bad exit code, after saying whose it was."""
    import torch.distributed as dist

    received: list[int] = []  # signals are only noted here, so that none comes between a rank's start and its end
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def run_rank(arguments: list[str]) -> int:
        restore()
        return 128 + received[0] if received else run(arguments)

    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _frame: received.append(number))
    with contextlib.ExitStack() as stack:
        stack.callback(restore)
        logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="dmuon-ranks-"))
        # The port where ranks meet is this process's from before they start: none other can take it in between.
        meeting = socket.create_server(("127.0.0.1", 0), backlog=max(128, world))
        pids = _fork(world, arguments, Path(logs), run_rank, meeting)
        port, fd = meeting.getsockname()[1], meeting.detach()
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
        code, culprit = _wait(pids, received)
        del store
        names = {s.value: s.name for s in signal.Signals}
        how = f"was ended by {names[code - 128]}" if code - 128 in names else f"ended with code {code}"
        if code and culprit:
            lines = Path(logs, f"{culprit}.log").read_text(errors="replace").splitlines()
            print(f"rank {culprit} {how}; the end of its log:", *lines[-20:], sep="\n", file=sys.stderr)
        elif code not in (0, 2):  # 2: it has said why in one line
            print(f"rank 0 {how}; its log is above", file=sys.stderr)
    return code


def _fork(
    world: int, arguments: list[str], logs: Path, run: Callable[[list[str]], int], meeting: socket.socket
) -> list[int]:
    sys.stdout.flush()
    sys.stderr.flush()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        code = 1
        try:
            # A launcher that is killed outright takes its ranks along (prctl's PR_SET_PDEATHSIG; Linux).
            with contextlib.suppress(AttributeError):
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
            os.environ.update(GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(meeting.getsockname()[1]))
            os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")  # as torchrun
            meeting.close()
            if rank:
                log = os.open(logs / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
            code = run(arguments)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pids


def _wait(pids: list[int], received: list[int]) -> tuple[int, int]:
    """(exit code, rank) of the first rank that ended badly, after ending the rest; (0, -1) if none did. SystemExit with
    the first signal that is ``received`` meanwhile."""
    live = dict(enumerate(pids))
    failed = (0, -1)
    try:
        while live and not failed[0]:
            for rank, pid in list(live.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del live[rank]
                    code = os.waitstatus_to_exitcode(status)
                    if code and not failed[0]:
                        failed = (code if code > 0 else 128 - code, rank)
            if received:
                raise SystemExit(128 + received[0])
            time.sleep(0.05)
    finally:
        deadline = time.monotonic() + _GRACE_SECONDS
        for number in (signal.SIGTERM, signal.SIGKILL):
            for rank, pid in list(live.items()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                while number == signal.SIGKILL or time.monotonic() < deadline:
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        del live[rank]
                        break
                    time.sleep(0.05)
    return failed


if __name__ == "__main__":
    sys.exit(main())
