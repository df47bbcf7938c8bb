"""Lanes of the CPU: how their threads end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

UNCLOSED = """
import atexit, os, sys, time
import torch, torch.distributed as dist
from torchtitan_dmuon.runtime.lanes import CpuLane

class EndsSlowly:  # so that the answer comes while the interpreter ends
    def __del__(self):
        time.sleep(1.5)

rank = int(os.fork() == 0)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], GLOO_SOCKET_IFNAME="lo")
dist.init_process_group("gloo", rank=rank, world_size=2)
value, ends_slowly = torch.zeros(1), EndsSlowly()
if rank:
    time.sleep(0.7)
    dist.send(value + 1, 0)
    os._exit(0)
atexit.register(lambda: print(value.item()))
CpuLane("unclosed").submit(lambda: dist.recv(value, 1))
"""


def test_a_program_that_ends_without_close_ends_well() -> None:
    """What a lane has begun arrives; its thread does not come back into an interpreter that is gone, which aborts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", UNCLOSED, port]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr
