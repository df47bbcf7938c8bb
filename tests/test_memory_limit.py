"""A model on meta whose owned parameters do not fit into one process starts on four that own a quarter each.

Each rank moves itself into a memory cgroup of its own; the kernel ends it if it goes over. The control is the same
start without dividing, under the same limit.
"""

import ctypes
import os
import pathlib

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import torchtitan_dmuon as dmuon
from tests.ranks import RankFailed, run_ranks

LAYERS, DIM = 32, 2048  # 32 x 2048 x 2048 in float32: 537 MB of masters
LIMIT = 420 * 2**20
CGROUP = pathlib.Path("/sys/fs/cgroup")


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def make_cgroup(name: str) -> pathlib.Path:
    """A memory cgroup limited to LIMIT bytes: version 1 or 2, whichever is mounted. OSError if none may be made."""
    if (CGROUP / "memory").is_dir():
        path, limit = CGROUP / "memory" / name, "memory.limit_in_bytes"
    else:
        path, limit = CGROUP / name, "memory.max"
    path.mkdir()
    try:
        (path / limit).write_text(str(LIMIT))
    except OSError:
        path.rmdir()
        raise
    return path


@pytest.fixture
def cgroups():
    names = [f"dmuon-test-{os.getpid()}-{i}" for i in range(4)]
    made = []
    try:
        for name in names:
            made.append(make_cgroup(name))
    except OSError as error:
        for path in made:
            path.rmdir()
        pytest.skip(f"this kernel lets us make no memory cgroup: {error}")
    yield made
    for path in made:
        path.rmdir()


def start(rank: int, world: int, paths: list[str]) -> tuple[float, int]:
    # glibc keeps aligned blocks it has freed in holes it does not fill again; give large ones their own mapping.
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp_replicate", "dp_shard"))
    pathlib.Path(paths[rank], "cgroup.procs").write_text(str(os.getpid()))
    with torch.device("meta"):
        model = Stack()
    owned = dmuon.own_matrices(
        model, mesh, select=r"layers", units=model.layers, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    model.to_empty(device="cpu")  # must leave what is owned alone
    owned.initialize(lambda _name, t: nn.init.normal_(t, std=0.01), seed=1)
    with torch.no_grad():
        out = model(torch.ones(1, DIM, dtype=torch.bfloat16))
    return out.float().mean().item(), sum(m.numel() * 4 for m in owned.masters().values())


def test_owned_parameters_larger_than_a_process_start_when_divided_by_four(cgroups):
    total = LAYERS * DIM * DIM * 4
    assert total > LIMIT
    paths = [str(p) for p in cgroups]
    results = run_ranks(start, 4, paths, limit=120)
    assert len({value for value, _ in results}) == 1
    assert sum(held for _, held in results) == pytest.approx(total)

    with pytest.raises(RankFailed, match="died without a result"):
        run_ranks(start, 1, paths, limit=120)
