"""Lanes: in-order queues of work beside the model's own computation; a thread on CPU, a stream on CUDA.

Decides: how work is ordered against the model's computation and against other lanes. Does not decide what is sent.
Work submitted to one lane runs in submission order, so a lane with a process group of its own issues the same
operations in the same order on every rank (invariant 5). Readiness is order, never polling: a task names the tickets
it needs, and they are waited for where the task runs. A ticket keeps its task's buffers alive until it is waited for.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch


class Ticket(Protocol):
    """Completion of one task."""

    def wait(self) -> None:
        """Order the caller (its host thread on CPU, its current stream on CUDA) after the task."""

    def result(self) -> Any:
        """What the task returned; on CUDA available at once, its tensors valid after :meth:`wait`."""


class Lane(Protocol):
    def submit(self, task: Callable[[], Any], after: Sequence[Ticket] = ()) -> Ticket: ...

    def close(self) -> None: ...


class _CpuTicket:
    def __init__(self) -> None:
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def finish(self, value: Any, error: BaseException | None) -> None:
        self._value, self._error = value, error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise RuntimeError(
                f"communication failed on this rank: {self._error}. All ranks must run the same passes: where this is "
                "a timeout, look for a rank that died, that skipped a forward or backward, or whose loss reached no "
                "owned weight while another's did"
            ) from self._error

    def result(self) -> Any:
        self.wait()
        return self._value


_lanes: weakref.WeakSet[CpuLane] = weakref.WeakSet()  # those whose threads run
_EXIT_SECONDS = 10.0


def _finish_lanes() -> None:
    """Before the interpreter ends: what was submitted is sent. A daemon thread that comes back from a collective into
    an interpreter that is gone aborts the process. Bounded, for a rank that failed has work that nobody answers."""
    deadline = time.monotonic() + _EXIT_SECONDS
    lanes = list(_lanes)
    for lane in lanes:
        lane.close(wait_seconds=0)
    for lane in lanes:
        lane.close(max(0.0, deadline - time.monotonic()))


class CpuLane:
    """A daemon thread that runs tasks in order. After a failed task every later one fails with the same error: the
    ranks no longer agree on what was sent."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Sequence[Ticket], _CpuTicket] | None]
        self._tasks = queue.SimpleQueue()
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name=f"dmuon-{name}", daemon=True)
        if not _lanes:
            atexit.unregister(_finish_lanes)
            atexit.register(_finish_lanes)
        _lanes.add(self)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        torch.set_grad_enabled(False)
        failure: BaseException | None = None
        while (item := self._tasks.get()) is not None:
            task, after, ticket = item
            value = None
            try:
                if failure is not None:
                    raise failure
                for earlier in after:
                    earlier.wait()
                value = task()
            except BaseException as error:
                failure = error
            ticket.finish(value, failure)
            del item, task, after, ticket, value

    def submit(self, task: Callable[[], Any], after: Sequence[Ticket] = ()) -> Ticket:
        ticket = _CpuTicket()
        self._tasks.put((task, tuple(after), ticket))
        return ticket

    def close(self, wait_seconds: float = 5.0) -> None:
        self._tasks.put(None)
        self._thread.join(wait_seconds)


class _CudaTicket:
    def __init__(self, event: torch.cuda.Event, value: Any) -> None:
        self._event, self._value = event, value

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def result(self) -> Any:
        return self._value


class CudaLane:
    """A stream. A task's kernels and collectives are enqueued at once, ordered after the submitting stream's work so
    far and after the tickets it names; nothing blocks the host. NCCL picks the lane's stream up as current stream."""

    def __init__(self, device: torch.device, high_priority: bool) -> None:
        self._stream = torch.cuda.Stream(device=device, priority=-1 if high_priority else 0)

    def submit(self, task: Callable[[], Any], after: Sequence[Ticket] = ()) -> Ticket:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            for earlier in after:
                earlier.wait()
            value = task()
            event = torch.cuda.Event()
            event.record(self._stream)
        return _CudaTicket(event, value)

    def close(self) -> None:
        pass


def make_lane(name: str, device: torch.device, high_priority: bool = True) -> Lane:
    """A lane for tasks on ``device``."""
    return CudaLane(device, high_priority) if device.type == "cuda" else CpuLane(name)


class Exposure:
    """Seconds of the model's own computation, by phase: what it waited, or what it spent. On CPU the host is timed. On
    CUDA it is the gap between two events on the computing stream, read out once they have passed; the events serve
    again, so their number is that of the pairs under way."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._pairs: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        if not self._cuda:
            begin_s = time.perf_counter()
            yield
            self.add(phase, time.perf_counter() - begin_s)
            return
        while self._pairs and self._pairs[0][2].query():
            self._read_out()
        begin, end = (self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._pairs.append((phase, begin, end))

    def _read_out(self) -> None:
        """The oldest pair, which has passed."""
        phase, begin, end = self._pairs.popleft()
        self.add(phase, begin.elapsed_time(end) / 1e3)
        self._spare += (begin, end)

    def wait(self, phase: str, ticket: Ticket) -> None:
        with self.timed(phase):
            ticket.wait()

    def add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Figures since the last call, and start anew. On CUDA this waits for the recorded events."""
        if self._pairs:
            self._pairs[-1][2].synchronize()
        while self._pairs:
            self._read_out()
        seconds, self._seconds = self._seconds, {}
        return seconds
