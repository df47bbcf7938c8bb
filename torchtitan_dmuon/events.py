"""A small discrete-event engine: tasks on serial lanes that share the bandwidth of ports. Pure.

Decides: when a task runs, given what it waits for and whom it shares a link with. Knows nothing of training. Keeps:
tasks of one lane run in the order they were added, whatever is ready (the shape of invariant 5), and time is a function
of the graph alone.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_TINY = 1e-12
# Times its own rate that a port passes what it has saved up (`Schedule.savings`).
_AT_ONCE = 50.0


@dataclass(eq=False)
class Task:
    """``seconds`` with its ports to itself, after ``latency`` that shares nothing. ``ports``: the share of each port's
    capacity that it takes then."""

    name: str
    lane: Hashable | None
    seconds: float
    latency: float = 0.0
    ports: Mapping[Hashable, float] = field(default_factory=dict)
    after: tuple[Task, ...] = field(default=(), repr=False)
    info: Any = None
    start: float = -1.0
    end: float = -1.0

    @property
    def alone(self) -> float:
        """Seconds that it takes with its ports to itself."""
        return self.seconds + self.latency


class Schedule:
    """Tasks in the order they are added; :meth:`run` gives each its start and end.

    ``savings``: the seconds of its full rate that a port saves up while idle, as the token bucket of a shaped link
    does; it begins with them.
    """

    def __init__(self, savings: Callable[[Hashable], float] = lambda port: 0.0) -> None:
        self.tasks: list[Task] = []
        self.savings = savings

    def add(
        self,
        name: str,
        lane: Hashable | None,
        seconds: float,
        after: Iterable[Task | None] = (),
        ports: Mapping[Hashable, float] | None = None,
        latency: float = 0.0,
        info: Any = None,
    ) -> Task:
        waits = tuple(dict.fromkeys(t for t in after if t is not None))
        task = Task(name, lane, max(0.0, seconds), latency, ports or {}, waits, info)
        self.tasks.append(task)
        return task

    def run(self) -> float:
        """Seconds from the first start to the last end. Tasks may only wait for tasks added before them."""
        queues: dict[Hashable, deque[Task]] = defaultdict(deque)
        waiting: dict[Task, int] = {}
        followers: dict[Task, list[Task]] = defaultdict(list)
        for task in self.tasks:
            queues[task if task.lane is None else task.lane].append(task)
            waiting[task] = len(task.after)
            for earlier in task.after:
                followers[earlier].append(task)
        now = 0.0
        silent: dict[Task, float] = {}  # running its latency: when that ends
        moving: dict[Task, float] = {}  # running its work: seconds of it left

        def try_head(lane: Hashable) -> None:
            if queues[lane] and waiting[queues[lane][0]] == 0 and queues[lane][0].start < 0:
                task = queues[lane][0]
                task.start = now
                silent[task] = now + task.latency

        saved = {port: self.savings(port) for task in self.tasks for port in task.ports}
        for lane in list(queues):
            try_head(lane)
        while silent or moving:
            load: dict[Hashable, float] = defaultdict(float)
            for task in moving:
                for port, share in task.ports.items():
                    load[port] += share
            rate = {}
            for task in moving:
                tight = [load[p] for p in task.ports if saved[p] <= _TINY]
                rate[task] = 1 / max((1.0, *tight)) if tight or not task.ports else _AT_ONCE
            used: dict[Hashable, float] = dict.fromkeys((p for p in saved if self.savings(p)), 0.0)
            for task in moving:
                for port in task.ports.keys() & used.keys():
                    used[port] += task.ports[port] * rate[task]
            step = min(
                min((end - now for end in silent.values()), default=float("inf")),
                min((left / rate[t] for t, left in moving.items()), default=float("inf")),
                min((saved[p] / (u - 1) for p, u in used.items() if u > 1 and saved[p] > _TINY), default=float("inf")),
            )
            now += step
            for port, u in used.items():
                saved[port] = min(self.savings(port), max(0.0, saved[port] + (1 - u) * step))
            for task in moving:
                moving[task] -= step * rate[task]
            for task in [t for t, end in silent.items() if end <= now + _TINY]:
                del silent[task]
                moving[task] = task.seconds
            for task in [t for t, left in moving.items() if left <= _TINY]:
                del moving[task]
                task.end = now
                lane = task if task.lane is None else task.lane
                queues[lane].popleft()
                try_head(lane)
                for follower in followers[task]:
                    waiting[follower] -= 1
                    if waiting[follower] == 0:
                        try_head(follower if follower.lane is None else follower.lane)
        stuck = [t.name for t in self.tasks if t.end < 0]
        if stuck:
            raise RuntimeError(f"{len(stuck)} tasks never ran, first {stuck[0]}: lanes and waits form a circle")
        return now


def trace_events(tasks: Iterable[Task], process: str, number: int) -> list[dict[str, Any]]:
    """Chrome's trace format (Perfetto opens it): one track per lane."""
    shown = [t for t in tasks if t.lane is not None and t.end > t.start]
    lanes = {lane: i for i, lane in enumerate(dict.fromkeys(str(t.lane) for t in shown))}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": number, "args": {"name": process}}]
    for lane, i in lanes.items():
        events.append({"ph": "M", "name": "thread_name", "pid": number, "tid": i, "args": {"name": lane}})
    for t in shown:
        begin, length = 1e6 * t.start, 1e6 * (t.end - t.start)
        tid = lanes[str(t.lane)]
        events.append({"ph": "X", "name": t.name, "pid": number, "tid": tid, "ts": begin, "dur": length})
    return events
