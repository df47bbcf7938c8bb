"""Invariant 4: bytes between nodes equal DESIGN section 6 to 1 %, as the kernel counts them on the ranks' sockets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # noqa: F401  (the hooks use it: imported once here, not in each rank)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import torchtitan_dmuon as dmuon
from scripts.netlab.bytes import ByteAccount
from scripts.netlab.lab import run_on_loopback
from torchtitan_dmuon.topology import traffic

RANKS_PER_NODE = 2
NODES, WORLD = 2, 4
LAYERS, DIM, HIDDEN = 3, 128, 192
COMPUTE_BYTES, REDUCE_BYTES = 2, 4
# What the plan predicts, and what a route may be off it: gloo's 144 bytes for each message of 50 KB.
TOLERANCE = 0.01


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(HIDDEN, DIM, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down):
            x = x + down(torch.tanh(up(x)))
        return x


ELEMENTS = LAYERS * 4 * DIM * HIDDEN


def measure(rank: int, world: int, replicas: int, options: dict[str, Any]) -> dict[str, Any]:
    """Bytes between and inside nodes of one gather, one backward that no step follows, one that a step follows, one
    publish, and one whole step of 4 micro-batches; and what the routes predict for the same."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("dp_replicate", "dp_shard"))
    owned = dmuon.own_matrices(
        model,
        mesh,
        select="weight",
        units=model,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        ranks_per_node=RANKS_PER_NODE,
        **options,
    )
    optimizer = owned.build_optimizer(dmuon.Muon, lr=0.01)
    x = torch.randn(4, DIM, dtype=torch.bfloat16)

    def micro_batch(last: bool) -> None:
        owned.set_is_last_backward(last)
        model(x).square().mean().backward()

    def settle() -> None:
        owned.engine.finish_reduces()
        owned.engine.await_publishes()

    micro_batch(True)
    optimizer.step()  # records the order of units; everything after is steady
    settle()
    accounts = {}
    with ByteAccount(RANKS_PER_NODE) as accounts["gather"], torch.no_grad():
        model(x)
    with ByteAccount(RANKS_PER_NODE) as accounts["backward"]:
        micro_batch(False)
        for unit in owned.engine.units:
            for ticket in unit.reducing:
                ticket.wait()
    optimizer.zero_grad()
    with ByteAccount(RANKS_PER_NODE) as accounts["last_backward"]:
        micro_batch(True)
        settle()
    optimizer.zero_grad()
    with ByteAccount(RANKS_PER_NODE) as accounts["publish"]:
        owned.publish()
        settle()
    with ByteAccount(RANKS_PER_NODE) as accounts["step"]:
        for micro in range(4):
            micro_batch(micro == 3)
        optimizer.step()
        settle()
    sent = {
        phase: tuple(
            sum(getattr(traffic(u.layout, phase, r), level) for u in owned.engine.units for r in range(world))
            for level in ("inter_node", "intra_node")
        )
        for phase in ("gather", "reduce_1", "reduce_2", "publish")
    }
    return {
        "measured": {k: (a.between_nodes, a.inside_nodes) for k, a in accounts.items()},
        "busiest": accounts["step"].busiest_link,
        "predicted": sent,
    }


def section_6(replicas: int, holders: str) -> dict[str, tuple[float, float]]:
    """DESIGN's table: (between, inside) nodes, bytes that a rank sends on average, for one operation."""
    p, g, m = ELEMENTS, RANKS_PER_NODE, NODES
    between = p / g * (m - 1) / m
    inside = p * (g - 1) / g
    table = {
        "gather": (0.0, COMPUTE_BYTES * inside),
        "reduce_1": (0.0, REDUCE_BYTES * inside),
        "reduce_2": (REDUCE_BYTES * between, 0.0),
        "publish": (COMPUTE_BYTES * between, 0.0),
    }
    if replicas == 1 and holders == "shard_group":
        table["gather"] = (COMPUTE_BYTES * between, COMPUTE_BYTES * inside)
        table["publish"] = (0.0, 0.0)
    return table


CASES = [
    pytest.param(2, {}, id="hsdp_2x2"),
    pytest.param(2, {"publish": "sync", "prefetch": 0}, id="hsdp_2x2_sync"),
    pytest.param(1, {}, id="fsdp_1x4"),
    pytest.param(1, {"holders": "node"}, id="fsdp_1x4_node_holders"),
    pytest.param(2, {"routing": "flat"}, id="hsdp_2x2_flat"),
]
# What each account of `measure` contains: phase -> times.
CONTENTS = {
    "gather": {"gather": 1},
    "backward": {"gather": 2, "reduce_1": 1},
    "last_backward": {"gather": 2, "reduce_1": 1, "reduce_2": 1},
    "publish": {"publish": 1},
    "step": {"gather": 8, "reduce_1": 4, "reduce_2": 1, "publish": 1},
}


def close(measured: float, expected: float) -> bool:
    # The norm's all-reduce, and nothing where nothing should cross.
    return abs(measured - expected) <= TOLERANCE * expected + 4000


@pytest.mark.parametrize("replicas, options", CASES)
def test_bytes_of_a_step(replicas: int, options: dict[str, Any]) -> None:
    results = run_on_loopback(measure, WORLD, replicas, options, ranks_per_node=RANKS_PER_NODE)
    assert all(r == results[0] for r in results)
    measured, elements = results[0]["measured"], results[0]["predicted"]
    width = {"gather": COMPUTE_BYTES, "publish": COMPUTE_BYTES, "reduce_1": REDUCE_BYTES, "reduce_2": REDUCE_BYTES}
    predicted = {phase: tuple(n * width[phase] for n in pair) for phase, pair in elements.items()}
    for account, times in CONTENTS.items():
        for level in (0, 1):
            expected = sum(n * predicted[phase][level] for phase, n in times.items())
            assert close(measured[account][level], expected), (account, level, measured[account], expected)
    if options.get("routing") == "flat":
        return  # the table is about two levels
    table = section_6(replicas, options.get("holders", "shard_group"))
    for phase, per_rank in table.items():
        for level in (0, 1):
            assert close(predicted[phase][level], per_rank[level] * WORLD), (phase, level, predicted[phase], per_rank)
    # Owners are spread over nodes and rails: no link carries more than its share.
    between = sum(n * table[phase][0] for phase, n in CONTENTS["step"].items()) * WORLD
    assert results[0]["busiest"] <= between / NODES * 1.02 + 4000


def test_flat_crosses_more() -> None:
    """The comparison above can fail: a route that crosses once per rank of a node is told apart."""
    results = run_on_loopback(measure, WORLD, 2, {"routing": "flat"}, ranks_per_node=RANKS_PER_NODE)
    reduced = results[0]["measured"]["last_backward"][0]
    assert not close(reduced, section_6(2, "shard_group")["reduce_2"][0] * WORLD)
    assert close(reduced, RANKS_PER_NODE * section_6(2, "shard_group")["reduce_2"][0] * WORLD)
