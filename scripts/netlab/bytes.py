"""Exact payload bytes between ranks, from the kernel's own counters of this process's TCP sockets.

Decides: what counts. That is every byte handed to TCP on the sockets between two ranks of the default group, each once
(retransmissions are taken off), on any network: namespaces, loopback, a real one. No root is needed. The TCPStore's
sockets are left out. Gloo adds 96 bytes to each message and answers with 48; they count, being sent.
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

_ESTABLISHED = 1
# Offsets into struct tcp_info (linux/tcp.h): tcpi_bytes_received, then tcpi_bytes_sent and tcpi_bytes_retrans.
_RECEIVED, _SENT = 128, 200
_SETTLE_SECONDS = 20.0

End = tuple[str, int]
Rows = dict[tuple[End, End], tuple[int, int]]  # (own end, far end) -> payload bytes (sent, received) so far


def socket_rows(ignored_ports: Iterable[int] = ()) -> Rows:
    """Counters of this process's established TCP sockets."""
    ignored = set(ignored_ports)
    rows: Rows = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed since the listing
        with duplicate as s:
            try:
                if s.family not in (socket.AF_INET, socket.AF_INET6) or s.type != socket.SOCK_STREAM:
                    continue
                own, far = _end(s.getsockname()), _end(s.getpeername())
                info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            except OSError:
                continue
            if info[0] != _ESTABLISHED or len(info) < _SENT + 16 or {own[1], far[1]} & ignored:
                continue
            sent, again = struct.unpack_from("<QQ", info, _SENT)
            rows[own, far] = (sent - again, struct.unpack_from("<Q", info, _RECEIVED)[0])
    return rows


def _end(address: tuple[Any, ...]) -> End:
    return address[0].removeprefix("::ffff:"), address[1]


def sent_between(before: list[Rows], after: list[Rows]) -> list[list[int]]:
    """[world][world] payload bytes from rank to rank, of the sockets that ``after`` shows at both ends.

    A connection is known by both its ends: the kernel gives one local port to several connections that differ in the
    far end, so an end alone does not tell the rank.
    """
    rank_of = {(own, far): rank for rank, rows in enumerate(after) for own, far in rows}
    sent = [[0] * len(after) for _ in after]
    for rank, rows in enumerate(after):
        for (own, far), (total, _received) in rows.items():
            peer = rank_of.get((far, own))
            if peer is not None:
                sent[rank][peer] += total - before[rank].get((own, far), (0, 0))[0]
    return sent


class ByteAccount:
    """Bytes that ranks sent each other inside a ``with`` block. A collective of the default group, on entry and exit.

    All operations of the block must be waited for in it. Barriers and figures go through the store, so the account
    itself sends nothing that it would count. After the block, on every rank:

        sent            sent[a][b]: bytes from rank a to rank b
        between_nodes   all bytes between ranks of different nodes
        inside_nodes    all bytes between ranks of one node
        busiest_link    the most that one node sent to, or received from, the others
    """

    _turns = 0

    def __init__(self, ranks_per_node: int | None = None) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.ranks_per_node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        self._store = dist.distributed_c10d._get_default_store()
        self._ignored = {int(os.environ["MASTER_PORT"])}
        self.sent: list[list[int]] = []

    def __enter__(self) -> ByteAccount:
        self._before = self._settled()
        return self

    def __exit__(self, kind: object, *_exception: object) -> None:
        if kind is not None:
            return
        self.sent = sent_between(self._before, self._settled())

    def _settled(self) -> list[Rows]:
        """Counters of all ranks at a moment when nothing is under way between them."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            rows = self._exchange(socket_rows(self._ignored))
            received = {(far, own): got for each in rows for (own, far), (_, got) in each.items()}
            if all(received.get(key, sent) == sent for each in rows for key, (sent, _) in each.items()):
                return rows
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"bytes were still under way {_SETTLE_SECONDS:g} s after the block: wait for every operation in it"
                )
            time.sleep(0.01)

    def _exchange(self, value: Any) -> list[Any]:
        """Everyone's value, through the store: a barrier as well."""
        ByteAccount._turns += 1
        prefix = f"byte_account/{ByteAccount._turns}"
        self._store.set(f"{prefix}/{self.rank}", pickle.dumps(value))  # type: ignore[arg-type]
        everyone = [pickle.loads(self._store.get(f"{prefix}/{r}")) for r in range(self.world)]
        # Nobody goes on, and sends, before all have read their counters; every rank has now, or this would wait.
        return everyone

    def _sum(self, counts: Callable[[int, int], bool]) -> int:
        return sum(n for a, row in enumerate(self.sent) for b, n in enumerate(row) if counts(a, b))

    def _node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    @property
    def between_nodes(self) -> int:
        return self._sum(lambda a, b: self._node(a) != self._node(b))

    @property
    def inside_nodes(self) -> int:
        return self._sum(lambda a, b: self._node(a) == self._node(b))

    @property
    def busiest_link(self) -> int:
        nodes = range(self._node(self.world - 1) + 1)
        sides = itertools.product(nodes, (True, False))
        return max(self._crossing(node, out) for node, out in sides)

    def _crossing(self, node: int, out: bool) -> int:
        """Bytes that left the node, or came into it."""
        return self._sum(lambda a, b: self._node(a) != self._node(b) and self._node(a if out else b) == node)
