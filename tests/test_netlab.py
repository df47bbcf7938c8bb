"""The lab: bytes are exact, rates hold, and nothing is left behind whatever happens to a rank."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scripts.netlab.bytes import ByteAccount, Rows, sent_between
from scripts.netlab.lab import Lab, LabForbidden, RankFailed, run_on_loopback

MESSAGE_BYTES = 144  # gloo's header and answer


@contextlib.contextmanager
def lab(nodes: int) -> Iterator[Lab]:
    """A lab, or the one reason for which these tests may not run."""
    try:
        made = Lab(nodes)
    except LabForbidden as error:
        pytest.skip(f"THE NETWORK LAB IS NOT TESTED: {error}")
    with made:
        yield made


def exchange_bytes(rank: int, world: int) -> tuple[list[list[int]], int, int, int]:
    """Rank a sends b * 1000 + a floats to every b above it."""
    pairs = [(a, b) for a in range(world) for b in range(a + 1, world)]
    tensors = {p: torch.zeros(p[1] * 1000 + p[0]) for p in pairs}
    with ByteAccount() as account:
        works = [dist.isend(t, b) for (a, b), t in tensors.items() if a == rank]
        works += [dist.irecv(t, a) for (a, b), t in tensors.items() if b == rank]
        for work in works:
            work.wait()
    return account.sent, account.between_nodes, account.inside_nodes, account.busiest_link


def check_exchange(results: list) -> None:
    for sent, between, inside, busiest in results:
        for a in range(4):
            for b in range(a + 1, 4):
                payload = 4 * (b * 1000 + a)
                assert sent[a][b] + sent[b][a] == payload + MESSAGE_BYTES
                assert sent[b][a] == MESSAGE_BYTES - 96
        assert between == 4 * (2000 + 3000 + 2001 + 3001) + 4 * MESSAGE_BYTES
        assert inside == 4 * (1000 + 3002) + 2 * MESSAGE_BYTES
        assert busiest == 4 * (2000 + 3000 + 2001 + 3001) + 4 * 96


def test_bytes_are_exact_on_loopback() -> None:
    check_exchange(run_on_loopback(exchange_bytes, 4, ranks_per_node=2))


def test_bytes_of_connections_that_share_a_port() -> None:
    """Ranks 1 and 3 connect from one ephemeral port to listeners of ranks 0 and 2: the kernel allows it."""
    host = "127.0.0.1"
    shared, first, second = (host, 40_000), (host, 5_000), (host, 5_001)
    rows: list[Rows] = [
        {(first, shared): (10, 70)},
        {(shared, first): (70, 10)},
        {(second, shared): (20, 500)},
        {(shared, second): (500, 20)},
    ]
    sent = sent_between([{}, {(shared, first): (30, 0)}, {}, {}], rows)
    assert sent == [[0, 10, 0, 0], [40, 0, 0, 0], [0, 0, 0, 20], [0, 0, 500, 0]]


def test_bytes_are_exact_between_namespaces() -> None:
    with lab(2) as made:
        check_exchange(made.run(exchange_bytes, 2))


def failing_block(rank: int, world: int) -> str:
    """Raises inside the block on every rank: the account must not wait for the exit."""
    with pytest.raises(KeyError), ByteAccount():
        raise KeyError
    return "went on"


def test_an_error_inside_the_block_passes_through() -> None:
    assert run_on_loopback(failing_block, 2, limit=20) == ["went on"] * 2


def timed_broadcast(rank: int, world: int, made: Lab, rates: list[str], megabytes: float) -> list[float]:
    tensor = torch.zeros(round(megabytes * 1e6 / 4))
    seconds = []
    for rate in rates:
        if rank == 0:
            made.shape(rate)
        dist.barrier()
        begin = time.perf_counter()
        dist.broadcast(tensor, 0)
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    return seconds


def test_a_rate_holds_and_changes_during_a_run() -> None:
    with lab(2) as made:
        seconds = made.run(timed_broadcast, 1, made, ["none", "80mbit", "none", "160mbit", "none"], 4.0)[0]
    # 4 MB take 0.42 s at 80 Mbit/s, less the burst. A busy machine can only make them slower.
    assert seconds[1] > 0.35 and seconds[3] > 0.17, seconds
    assert min(seconds[0], seconds[2], seconds[4]) < 0.17, seconds
    assert seconds[3] < seconds[1], seconds


def die(rank: int, world: int, pids: str) -> None:
    Path(pids, str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hang(rank: int, world: int, pids: str) -> None:
    Path(pids, str(rank)).write_text(str(os.getpid()))
    if rank == 0:
        dist.barrier()  # rank 1 never comes
    time.sleep(60)


def alive(pids: Path) -> list[int]:
    return [int(p.read_text()) for p in pids.iterdir() if Path("/proc", p.read_text()).exists()]


def network_namespaces() -> set[str]:
    links = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                links.add(os.readlink(process / "ns/net"))
    return links


@pytest.mark.parametrize(
    "fault, limit, message", [(die, 30, "died without a result"), (hang, 2, "still ran after 2 s")]
)
def test_ranks_and_namespaces_end_after_a_fault(tmp_path: Path, fault, limit: float, message: str) -> None:
    own = os.readlink("/proc/self/ns/net")
    with lab(2) as made:
        mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in (*made.namespaces.nodes, made.namespaces.switch)}
        with pytest.raises(RankFailed, match=message):
            made.run(fault, 1, str(tmp_path), limit=limit)
        assert len(mine) == 3 and own not in mine
        # The same lab still works.
        assert made.run(failing_block, 1) == ["went on"] * 2
    assert len(list(tmp_path.iterdir())) == 2 and alive(tmp_path) == []
    assert not mine & network_namespaces()
    assert not {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)} & mine


def _is_link(fd: str) -> bool:
    try:
        os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False
    return True


def fork(work: Callable[[], None]) -> int:
    """A process that runs ``work``; exit status 0 unless it raises."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def test_a_killed_parent_leaves_nothing(tmp_path: Path) -> None:
    with lab(2):
        pass

    def parent() -> None:
        with Lab(2) as made:
            made.run(hang, 1, str(tmp_path), limit=100)

    pid = fork(parent)
    try:
        deadline = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        assert len(alive(tmp_path)) == 2
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    deadline = time.monotonic() + 10
    while alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(tmp_path) == []


def hold(rank: int, world: int) -> str:
    dist.barrier()
    return os.readlink("/proc/self/ns/net")


def test_two_labs_at_once_are_apart() -> None:
    with lab(2) as one, lab(2) as other:
        first, second = one.run(hold, 2), other.run(hold, 2)
    assert first[0] == first[1] != first[2] == first[3]
    assert not set(first) & set(second)


def test_without_root(tmp_path: Path) -> None:
    """As root, in a child that gives root up: everything happens inside a user namespace of its own."""
    report = tmp_path / "report"
    report.touch()
    report.chmod(0o666)
    handle = report.open("w")

    def rootless() -> None:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            # Giving root up closes a process's own /proc files to it; one started by a plain user has them open.
            ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE
        try:
            made = Lab(2)
        except LabForbidden as error:
            handle.write(f"{error}")
            handle.flush()
            return
        with made:
            assert made.namespaces.user is not None
            check_exchange(made.run(exchange_bytes, 2))
            seconds = made.run(timed_broadcast, 1, made, ["80mbit", "none"], 4.0)[0]
            assert seconds[0] > 0.35, seconds

    _, status = os.waitpid(fork(rootless), 0)
    handle.close()
    if report.read_text():
        pytest.skip(f"THE NETWORK LAB IS NOT TESTED without root: {report.read_text()}")
    assert status == 0


def test_forbidden_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LabForbidden, match="needs ip, tc, nsenter"):
        Lab(2)
