"""The core on CUDA: Newton-Schulz and transports against the CPU, training against one process, overlap, peak memory.

Started by gpu_check.sh on every rank. Each check prints one line; the exit code is 1 if one failed.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torchtitan_dmuon as dmuon
from torchtitan_dmuon.newton_schulz import NewtonSchulz, flops, orthogonalize
from torchtitan_dmuon.outputs import claim, write_json
from torchtitan_dmuon.runtime.unit import Ranges

DIM, HIDDEN, LAYERS, TOKENS = 2048, 5632, 8, 4096
MUON = functools.partial(dmuon.Muon, lr=0.02, adjust_lr_fn="match_rms_adamw")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.mix = nn.Linear(DIM, DIM, bias=False)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.mix(h) + self.down(F.silu(self.up(h)))


def make_model(device: torch.device) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(Block() for _ in range(LAYERS))
    for p in layers.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=0.01)
    return layers.to(device)


class Stack(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(model: nn.Module, step: int, rank: int, device: torch.device) -> torch.Tensor:
    x = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(97 * step + rank)).to(device)
    return (model(x) - x.roll(1, 0)).float().square().mean()


def owned_model(device: torch.device, dtype: torch.dtype | None, **options: object):
    """On one node; with 4 GPUs or more as if on two, so that both levels move something."""
    world = dist.get_world_size()
    nodes = 2 if world >= 4 and world % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (nodes, world // nodes), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = Stack(make_model(device))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options = {"select": r"(mix|up|down)\.weight", "ranks_per_node": world // nodes, **options}
    owned = dmuon.own_matrices(model, mesh, units=model.layers, mp_policy=policy, **options)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=owned.parameters)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=owned.parameters)
    return model, owned


def check_newton_schulz(device: torch.device) -> tuple[bool, str]:
    worst, rows = 0.0, []
    for m, n in ((256, 256), (512, 2048), (2048, 512)):
        x = torch.randn(m, n, generator=torch.Generator().manual_seed(m + n))
        for dtype, limit in (("float32", 1e-3), ("bfloat16", 3e-2)):
            settings = NewtonSchulz(dtype=dtype)
            ours = orthogonalize(x.to(device), settings).float().cpu()
            reference = orthogonalize(x, NewtonSchulz(dtype="float32")).float()
            error = ((ours - reference).norm() / reference.norm()).item()
            worst = max(worst, error / limit)
            rows.append(f"{m}x{n} {dtype} {error:.1e}")
    return worst < 1, ", ".join(rows)


def check_transport(device: torch.device, rank: int, world: int, transport: str) -> tuple[bool, str]:
    """Gathered weights and sums of whole numbers, both exact, against the CPU; milliseconds of each phase over all
    units, with nothing else running, and the rate of its payload."""
    model, owned = owned_model(device, torch.bfloat16, transport=transport)
    engine, mover, units = owned.engine, owned.engine.transport, owned.engine.units
    expected = dict(Stack(make_model(torch.device("cpu"))).named_parameters())
    with owned.gathered():
        wrong = [n for n in owned.names if not torch.equal(model.get_parameter(n).cpu(), expected[n].bfloat16())]
    numbers = {u.index: torch.arange(u.layout.numel, device=device, dtype=torch.float32) % 251 for u in units}
    contributions = {u.index: numbers[u.index] + rank for u in units}
    for unit in units:
        sums: dict[int, Ranges] = {}
        engine._reduce_in_node(unit, contributions[unit.index].clone(), sums)
        totals = mover.reduce_between_nodes(unit, sums)
        for (a, b), total in totals.items():
            exact = (torch.arange(a, b) % 251).float() * world + world * (world - 1) // 2
            if not torch.equal(total.cpu(), exact):
                wrong.append(f"sum of {unit.name} [{a}, {b})")

    partial = {u.index: mover.reduce_in_node(u, contributions[u.index]) for u in units}

    phases = {
        "gather": mover.gather,
        "reduce": lambda unit: mover.reduce_in_node(unit, contributions[unit.index]),
        "reduce_between_nodes": lambda unit: mover.reduce_between_nodes(unit, partial[unit.index]),
        "publish": lambda unit: mover.spread(unit, unit.held, "publish"),
    }
    found = []
    for unit in units:
        unit.allocate()
    for phase, run in phases.items():
        for unit in units:
            run(unit)  # the first use of a connection
        torch.cuda.synchronize()
        mover.sent.clear()
        begin = time.perf_counter()
        for _ in range(5):
            for unit in units:
                run(unit)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        sent = sum(n for (name, _), n in mover.sent.items() if name == phase)
        found.append(f"{phase} {seconds / 5 * 1e3:.2f} ms, {sent / seconds / 1e9:.1f} GB/s sent")
    for unit in units:
        unit.free()
    owned.close()
    return not wrong, f"{len(wrong)} wrong {wrong[:1]}; " + "; ".join(found)


def check_training(device: torch.device, rank: int, world: int, transport: str) -> tuple[bool, str]:
    """fp32 gradients of one backward, owned against one process, on this rank's pieces."""
    model, owned = owned_model(device, None, transport=transport)
    loss_of(model, 0, rank, device).backward()
    owned.engine.finish_reduces()
    reference = Stack(make_model(device))
    for r in range(world):
        (loss_of(reference, 0, r, device) / world).backward()
    worst = 0.0
    named = dict(reference.named_parameters())
    for unit in owned.engine.units:
        for key, master in unit.master_of.items():
            expected = named[key.split("[")[0]].grad
            worst = max(worst, ((master.grad - expected).norm() / expected.norm()).item())
    owned.close()
    return worst < 1e-4, f"largest relative difference of a reduced gradient {worst:.1e} (TF32 off)"


def check_speed(device: torch.device, rank: int, out: Path) -> tuple[bool, str]:
    model, owned = owned_model(device, torch.bfloat16)
    optimizer = owned.build_optimizer(MUON)
    rest = torch.optim.AdamW([p for p in model.parameters() if p not in owned.parameters], lr=1e-3)

    def train_step(step: int) -> float:
        loss = loss_of(model, step, rank, device)
        loss.backward()
        owned.clip_grad_norm_(model, 1.0)
        optimizer.step()
        rest.step()
        rest.zero_grad()
        return loss.item()

    losses = [train_step(s) for s in range(3)]
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    losses += [train_step(s) for s in range(3, 8)]
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / 5
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        train_step(8)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(out / f"step.rank{rank}.json"))
    exposed = {k: round(v / 8, 5) for k, v in owned.engine.exposure.take().items()}
    work = sum(flops(m, n, NewtonSchulz(), "cuda") for p in owned.plan.pieces for m, n in p.matrices())
    figures = {
        "losses": losses,
        "step_seconds": seconds,
        "exposed_seconds": exposed,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(),
        "newton_schulz_flops": work,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }
    write_json(out / f"figures.rank{rank}.json", figures)
    owned.close()
    fell = losses[-1] < losses[0] and all(x == x for x in losses)
    return (
        fell,
        f"{seconds * 1e3:.1f} ms a step, peak {figures['peak_memory_bytes'] / 2**30:.2f} GiB, exposed {exposed}",
    )


def main() -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    out = Path(sys.argv[1])
    try:
        claim(out, "this check")
    except ValueError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.backends.cuda.matmul.allow_tf32 = False
    checks = {
        "Newton-Schulz against the CPU": lambda: check_newton_schulz(device),
        "training in bf16": lambda: check_speed(device, rank, out),
    }
    for transport in ("collective", "padded", "point_to_point") if world > 1 else ("auto",):
        checks[f"owned gradients against one process, {transport}"] = functools.partial(
            check_training, device, rank, world, transport
        )
        checks[f"{transport} transport against the CPU"] = functools.partial(
            check_transport, device, rank, world, transport
        )
    failed = 0
    for name, check in checks.items():
        ok, detail = check()
        failed += not ok
        print(f"[rank {rank}] {'pass' if ok else 'FAIL'}: {name}: {detail}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
