"""What only CUDA and NCCL would show, on stand-ins for events, grouped operations and a bound default group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchtitan_dmuon.ns_execution import Execution
from torchtitan_dmuon.runtime import lanes
from torchtitan_dmuon.runtime.lanes import Exposure
from torchtitan_dmuon.runtime.wires import GroupWire, make_group

from .ranks import run_ranks
from .test_misuse import alone
from .test_runtime import backward, make_muon


class Device:
    """A device whose clock runs when it is told, and the events that are recorded on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.done = 0.0  # milliseconds: enqueued so far, and run so far
        self.made = 0
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                device.made += 1

            def record(self) -> None:
                self.at = device.now

            def query(self) -> bool:
                return self.at <= device.done

            def synchronize(self) -> None:
                device.done = max(device.done, self.at)

            def elapsed_time(self, end: Any) -> float:
                assert self.query() and end.query()
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)

    def run(self, milliseconds: float) -> SimpleNamespace:
        """A ticket whose wait is a gap of this length on the device."""

        def wait() -> None:
            self.now += milliseconds

        return SimpleNamespace(wait=wait)


def test_waits_that_nobody_asks_for_need_no_more_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of the README: thousands of waits, of which the device is at most 50 behind."""
    device = Device(monkeypatch)
    exposure = Exposure(torch.device("cuda"))
    for index in range(5000):
        exposure.wait("gather" if index % 2 else "reduce", device.run(1.0))
        if index % 50 == 49:
            device.done = device.now
    assert device.made <= 2 * 51
    assert exposure.take() == pytest.approx({"gather": 2.5, "reduce": 2.5})
    assert device.done == device.now and exposure.take() == {}
    exposure.wait("gather", device.run(3.0))
    assert exposure.take() == pytest.approx({"gather": 0.003})
    assert device.made <= 2 * 51


def test_update_seconds_are_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """7 ms of device time in each unit's update, and none of the wait for the norm, whatever the host does."""
    device = Device(monkeypatch)
    monkeypatch.setattr(lanes.time, "perf_counter", lambda: pytest.fail("host time"))
    model, owned = alone()
    owned.engine.exposure._cuda = False
    monkeypatch.setattr(Exposure, "wait", lambda self, phase, ticket: ticket.wait())
    optimizer = owned.build_optimizer(make_muon)
    optimizer._clock = Exposure(torch.device("cuda"))
    optimizer.after_update = lambda unit: device.run(7.0).wait()
    finite = owned.engine.gradients_are_finite

    def slow() -> bool:
        device.run(1000.0).wait()
        return finite()

    owned.engine.gradients_are_finite = slow
    for step in range(2):
        backward(model, step, 0)
        optimizer.step()
    assert optimizer.take_update_seconds() == pytest.approx(2 * 0.007 * len(owned.engine.units))
    assert optimizer.take_update_seconds() == 0.0
    owned.close()


def test_the_wait_for_the_norm_is_no_part_of_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan_dmuon.titan import platform

    platform.prepare()
    from torchtitan_dmuon.titan.optimizer import DMuonOptimizersContainer

    now = [0.0]

    def takes(seconds: float, value: Any = None) -> Any:
        now[0] += seconds
        return value

    monkeypatch.setattr(lanes.time, "perf_counter", lambda: now[0])
    engine = SimpleNamespace(finish_reduces=lambda: takes(10), gradients_are_finite=lambda: takes(100, True))
    container = object.__new__(DMuonOptimizersContainer)
    container.__dict__ |= {
        "_model": torch.nn.Module(),
        "_qk_clip": None,
        "_clock": Exposure(torch.device("cpu")),
        "_optimizer_step_pre_hooks": {},
        "_optimizer_step_post_hooks": {},
        "optimizers": [SimpleNamespace(step=lambda: takes(3)), SimpleNamespace(step=lambda: takes(4))],
    }
    monkeypatch.setattr(DMuonOptimizersContainer, "owned", SimpleNamespace(engine=engine))
    container.step()
    assert container.take_update_seconds() == 7.0


@pytest.mark.parametrize("operation", ["broadcast", "reduce"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_grouped_operations_are_waited_for_on_the_stream(
    monkeypatch: pytest.MonkeyPatch, operation: str, count: int
) -> None:
    """As asynchronous ones: only their Work has events on the stream that runs them, for the watchdog to see."""
    seen: list[Any] = []

    class Manager:
        def __init__(self, group: Any, device: torch.device, async_ops: bool = False) -> None:
            seen.append(f"group, asynchronous {async_ops}")

        def __enter__(self) -> Manager:
            return self

        def __exit__(self, *details: Any) -> None:
            seen.append("end")

        def wait(self) -> None:
            seen.append("wait")

    group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(supports_coalescing=True))
    monkeypatch.setattr(dist.distributed_c10d, "_coalescing_manager", Manager)
    monkeypatch.setattr(dist, operation, lambda tensor, async_op=False, **_: seen.append(async_op))
    wire = GroupWire(group, torch.device("cuda"))  # type: ignore[arg-type]
    getattr(wire, operation)([(root, torch.ones(1)) for root in range(count)])
    grouped = ["group, asynchronous True", *[True] * count, "end", "wait"]
    assert seen == ([False] if count == 1 else grouped)


def _bound(rank: int, world: int) -> list[Any]:
    """Groups of a part of the world, made by their members alone while the default group is bound to a device."""
    default, device = dist.group.WORLD, torch.device("cpu", 0)
    seen: list[Any] = []
    new_group = dist.new_group

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(default.bound_device_id)
        default.bound_device_id, before = None, default.bound_device_id
        made = new_group(*args, **kwargs)
        default.bound_device_id = before
        return made

    default.bound_device_id = device
    dist.new_group = noted
    try:
        if rank < 2:
            make_group([0, 1], torch.device("cpu"), None)
            seen.append(default.bound_device_id == device)
        dist.new_group = lambda *_, **__: 1 / 0
        with pytest.raises(ZeroDivisionError):
            make_group([rank], torch.device("cpu"), None)
        seen.append(default.bound_device_id == device)
    finally:
        dist.new_group, default.bound_device_id = new_group, None
    return seen


def test_a_group_of_some_ranks_does_not_split_the_communicator_of_all() -> None:
    assert run_ranks(_bound, 3, limit=30) == [[None, True, True], [None, True, True], [True]]


def test_compiling_needs_a_torch_that_can_keep_shapes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    Execution(compile=True).check("cpu")
    monkeypatch.setattr(torch, "compile", lambda model, *, fullgraph=False: model)
    with pytest.raises(ValueError, match="ns_compile = true needs torch 2.14 or later, found"):
        Execution(compile=True).check("cpu")
