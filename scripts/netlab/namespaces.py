"""Network namespaces without names, as the nodes of a cluster on one machine.

Decides: how namespaces, their links and the links' rates are made, with or without root. Does not decide what runs in
them (`lab.py`). Keeps: nothing outlives the process. A namespace is held by file descriptors alone, so the kernel
removes it with its links when the last process that has them ends, however it ends; and two labs never meet, because
neither has a name.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SUBNET = "10.77.0"
INTERFACE = "eth0"
# 256 KiB of burst lets the shaper run at full rate between its timer ticks; the queue holds what gloo has in flight.
_SHAPER = ("burst", "256kb", "limit", "8mb")

_libc = ctypes.CDLL(None, use_errno=True)


class LabForbidden(RuntimeError):
    """The kernel, or its policy, does not allow namespaces or shaped links here."""


def _call(name: str, *args: int) -> None:
    if getattr(_libc, name)(*args):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _fds_from_child(make: Callable[[], list[str]]) -> list[int]:
    """Fork, run ``make`` in the child and receive what it opened: namespaces are entered by processes, and a fresh
    child has the single thread that the kernel asks for."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            paths = make()
            socket.send_fds(theirs, [b"ok"], [os.open(p, os.O_RDONLY) for p in paths])
        except OSError as error:
            theirs.send(f"{error.errno or errno.EIO} {error.strerror or error}".encode())
        finally:
            os._exit(0)
    theirs.close()
    message, fds, _, _ = socket.recv_fds(ours, 4096, 8)
    ours.close()
    os.waitpid(pid, 0)
    if message != b"ok":
        code, _, text = message.decode().partition(" ")
        raise OSError(int(code or errno.EIO), text or "the child died")
    return fds


@dataclass
class Namespaces:
    """``nodes`` network namespaces joined by a switch in one more, and the user namespace that owns them without root.

    Node i has the address 10.77.0.(10 + i) on ``eth0``; its own loopback carries what its ranks send each other.
    """

    nodes: list[int]
    switch: int
    user: int | None
    inside_user: bool = False  # this process has entered `user`

    @staticmethod
    def create(count: int) -> Namespaces:
        """Raises :class:`LabForbidden` with the reason where the kernel or a missing tool does not allow it."""
        missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
        if missing:
            raise LabForbidden(f"needs {', '.join(missing)} (packages iproute2 and util-linux) on the path")
        try:
            made = Namespaces._make(count, with_user=False)
        except OSError as as_is:
            try:
                made = Namespaces._make(count, with_user=True)
            except OSError as rootless:
                raise LabForbidden(
                    f"network namespaces are refused: as uid {os.getuid()}: {as_is.strerror}; inside a user namespace "
                    f"of our own: {rootless.strerror}. Run as root, or allow unprivileged user namespaces "
                    "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)"
                ) from rootless
        try:
            made._connect()
        except LabForbidden:
            made.close()
            raise
        return made

    @staticmethod
    def _make(count: int, with_user: bool) -> Namespaces:
        user = None
        if with_user:
            uid, gid = os.getuid(), os.getgid()

            def own_user() -> list[str]:
                _call("unshare", CLONE_NEWUSER)
                for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                    with open(f"/proc/self/{name}", "w") as f:
                        f.write(text)
                return ["/proc/self/ns/user"]

            (user,) = _fds_from_child(own_user)

        def own_network() -> list[str]:
            if user is not None:
                _call("setns", user, CLONE_NEWUSER)
            _call("unshare", CLONE_NEWNET)
            return ["/proc/self/ns/net"]

        fds = [_fds_from_child(own_network)[0] for _ in range(count + 1)]
        return Namespaces(fds[:-1], fds[-1], user)

    def _connect(self) -> None:
        self._run(self.switch, "ip", "link", "set", "lo", "up")
        self._run(self.switch, "ip", "link", "add", "br0", "type", "bridge")
        self._run(self.switch, "ip", "link", "set", "br0", "up")
        for i, node in enumerate(self.nodes):
            address, port = f"{SUBNET}.{10 + i}", f"port{i}"
            self._run(node, "ip", "link", "set", "lo", "up")
            far = f"/proc/self/fd/{self.switch}"
            self._run(node, "ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", far)
            self._run(node, "ip", "addr", "add", f"{address}/24", "dev", INTERFACE)
            self._run(node, "ip", "link", "set", INTERFACE, "up")
            # bbr, the default on many machines, probes for bandwidth and keeps the shaper's queue nervous.
            route = ("ip", "route", "replace", f"{SUBNET}.0/24", "dev", INTERFACE, "src", address)
            if self._status(node, *route, "congctl", "cubic"):
                self._run(node, *route)
            self._run(self.switch, "ip", "link", "set", port, "master", "br0")
            self._run(self.switch, "ip", "link", "set", port, "up")

    def _command(self, namespace: int, *command: str) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", f"--net=/proc/self/fd/{namespace}"]
        if self.user is not None and not self.inside_user:
            enter += [f"--user=/proc/self/fd/{self.user}", "--preserve-credentials"]
        fds = [*self.nodes, self.switch, *([self.user] if self.user is not None else [])]
        return subprocess.run([*enter, *command], pass_fds=fds, capture_output=True, text=True, timeout=20)

    def _status(self, namespace: int, *command: str) -> int:
        return self._command(namespace, *command).returncode

    def _run(self, namespace: int, *command: str) -> str:
        done = self._command(namespace, *command)
        if done.returncode:
            raise LabForbidden(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def address(self, node: int) -> str:
        return f"{SUBNET}.{10 + node}"

    def enter(self, node: int) -> None:
        """Move this process into a node. Only a process with one thread can, so: right after a fork."""
        if self.user is not None and not self.inside_user:
            _call("setns", self.user, CLONE_NEWUSER)
            self.inside_user = True
        _call("setns", self.nodes[node], CLONE_NEWNET)

    def shape(self, rate: str | float, nodes: list[int] | None = None) -> None:
        """Limit what each node sends to the others to ``rate``: tc's notation ("200mbit"), bits per second, or "none".

        The shaper counts whole frames: about 95.6 % of the rate is payload. Can be called during a run, from any rank.
        """
        if isinstance(rate, int | float):
            rate = f"{max(1, round(rate))}bit"
        for node in self.nodes if nodes is None else [self.nodes[n] for n in nodes]:
            if rate == "none":
                self._status(node, "tc", "qdisc", "del", "dev", INTERFACE, "root")  # absent is fine
            else:
                self._run(node, "tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", "rate", rate, *_SHAPER)

    def close(self) -> None:
        for fd in (*self.nodes, self.switch, *([self.user] if self.user is not None else [])):
            os.close(fd)
        self.nodes = []
