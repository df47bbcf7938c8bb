"""Lanes that record instead of run beside: what CUDA streams would order, checked on CPU with vector clocks.

Decides: which accesses of a training step are ordered. A task runs at once on the training thread, as the host enqueues
it on CUDA; what a stream would order is kept apart, as one clock per stream: the model's own ("compute") and each
lane's. Submitting and tickets are those of `CudaLane`, neither more nor less. Host reads of
device values, which also order, are not counted: the order holds without them.

Every operator's tensors are accesses of the current stream; memory is a storage from an allocation to its free. Found:

- two accesses of the same bytes, one a write, on streams that nothing orders;
- memory that its stream hands out again (the caching allocator reuses at once, on the stream it was allocated on) while
  another stream that it has not waited for may still access it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_dmuon.runtime.lanes import Ticket

COMPUTE = "compute"
Clock = dict[str, int]  # stream -> how many of its operations came before


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


class _Block:
    """One allocation: who accessed which bytes last, by (stream, wrote, first byte, last byte)."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.accesses: dict[tuple[str, bool, int, int], tuple[int, str]] = {}


class Recorder(TorchDispatchMode):
    """Active on the training thread, it records; ``conflicts`` are the findings, each one line."""

    def __init__(self) -> None:
        super().__init__()
        self.conflicts: list[str] = []
        self.operations = 0
        self._clocks: dict[str, Clock] = {COMPUTE: {COMPUTE: 0}}
        self._current = COMPUTE
        self._blocks: dict[int, _Block] = {}  # storage address -> its memory
        self._watched: dict[int, weakref.finalize] = {}
        self._freed: dict[str, list[_Block]] = {}  # by the stream that may hand it out again

    # ---- streams ----

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        previous, self._current = self._current, name
        try:
            yield
        finally:
            self._current = previous

    def clock(self, stream: str | None = None) -> Clock:
        name = stream or self._current
        return self._clocks.setdefault(name, {name: 0})

    # ---- memory ----

    def _block(self, storage: torch.UntypedStorage) -> _Block:
        key = storage._cdata
        if key not in self._blocks:
            self._watched[key] = weakref.finalize(storage, self._died, key)
            self._watched[key].atexit = False
            self._blocks[key] = self._allocate()
        return self._blocks[key]

    def _allocate(self) -> _Block:
        """New memory of the current stream: perhaps what was freed to that stream before, so nobody may use that."""
        now = self.clock()
        for block in self._freed.pop(self._current, []):
            for (stream, _, _, _), (time, what) in block.accesses.items():
                if stream != self._current and now.get(stream, 0) < time:
                    self.conflicts.append(f"{self._current} reuses memory that {stream} may still access in {what}")
        return _Block(self._current)

    def _died(self, key: int) -> None:
        self._watched.pop(key)
        block = self._blocks.pop(key)
        if block.accesses:
            self._freed.setdefault(block.stream, []).append(block)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """After `resize_`: the old memory is free, the new one is written by the current stream."""
        old = self._block(storage)
        self._freed.setdefault(old.stream, []).append(old)
        self._blocks[storage._cdata] = self._allocate()
        if storage.nbytes():
            self._access(storage, 0, storage.nbytes(), True, "resize_")

    # ---- accesses ----

    def _access(self, storage: torch.UntypedStorage, first: int, last: int, writes: bool, what: str) -> None:
        block, now = self._block(storage), self.clock()
        for (stream, wrote, low, high), (time, earlier) in block.accesses.items():
            if (writes or wrote) and low < last and first < high and now.get(stream, 0) < time:
                verb, did = "writes" if writes else "reads", "wrote" if wrote else "read"
                self.conflicts.append(
                    f"{self._current} {verb} in {what} what {stream} {did} in {earlier}, {high - low} bytes, unordered"
                )
        # A later access of the same bytes by the same stream stands for the earlier ones.
        block.accesses[self._current, writes, first, last] = (now[self._current], what)

    def _touch(self, tensor: torch.Tensor, writes: bool, what: str) -> None:
        if tensor.device.type != "cpu" or not tensor.numel():
            return
        extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        first, size = tensor.storage_offset() * tensor.element_size(), extent * tensor.element_size()
        self._access(tensor.untyped_storage(), first, first + size, writes, what)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operations += 1
        self.clock()[self._current] += 1
        given = set()
        schema = func._schema
        values = [*zip(schema.arguments, args), *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs)]
        message = func.namespace == "c10d"
        for argument, value in values:
            alias = argument.alias_info
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    given.add(tensor.untyped_storage()._cdata)
                    if message:  # collectives are not annotated: what is not sent may be written
                        self._touch(tensor, func.__name__.partition(".")[0] != "send", str(func))
                    elif alias is None or alias.is_write:  # otherwise a view is made, and no element looked at
                        self._touch(tensor, alias is not None, str(func))
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                self._touch(tensor, True, str(func))
        return out

    def __enter__(self) -> Recorder:
        self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = self._resize(storage, size)
            if storage.device.type == "cpu":
                self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]  # it does not dispatch
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]


class RecordingTicket:
    def __init__(self, recorder: Recorder, clock: Clock, value: Any) -> None:
        self._recorder, self._clock, self._value = recorder, clock, value

    def wait(self) -> None:
        _join(self._recorder.clock(), self._clock)

    def result(self) -> Any:
        return self._value


class RecordingLane:
    """`CudaLane`, line by line."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self.name = recorder, name

    def submit(self, task: Callable[[], Any], after: Sequence[Ticket] = ()) -> RecordingTicket:
        recorder = self._recorder
        _join(recorder.clock(self.name), recorder.clock())
        with recorder.stream(self.name), torch.no_grad():
            for earlier in after:
                earlier.wait()
            value = task()
            return RecordingTicket(recorder, dict(recorder.clock()), value)

    def close(self) -> None:
        pass
