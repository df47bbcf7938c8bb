"""Random programs: what ranks may do with a model between steps, each rank another thing, against one process.

A program is drawn from a seed: a model of 3 to 6 owned blocks with ties, stacks and norms, parts under FSDP2 or not,
a mesh, the settings of `own_matrices`, and for each step, micro-batch and rank the blocks that are used, in an order.
Every output and every weight after each step must equal those of one process; SGD with momentum hides no scale.

    python -m tests.programs --seeds 5000
    python -m tests.programs --soak 2000
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import os
import random
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import torchtitan_dmuon as dmuon

from .ranks import run_ranks

DIM, SAMPLES = 4, 24
TOLERANCE = 2e-5
MESHES = ((2, 2, 2), (2, 2, 2), (1, 2, 2), (2, 1, 1), (1, 3, 2), (1, 4, 2), (4, 1, 2), (3, 1, 1))
# Blocks before the module in the middle, and behind it.
Course = tuple[tuple[int, ...], tuple[int, ...]]
# A micro-batch: what is done with the losses of one or two forwards, and the path of each rank in each of them.
Micro = tuple[str, tuple[tuple[Course, ...], ...]]


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    mesh: tuple[int, int, int]  # replicas, shards, ranks a node
    blocks: int
    middle: int  # blocks before the module in the middle
    ties: tuple[tuple[int, int], ...]
    stacks: bool
    checkpointing: str
    sharded: str  # what FSDP2 has: nothing, the rest at the root, or its modules each
    middle_is_last: bool  # in the order of registration
    input_grad: bool
    optimizer: str
    max_norm: float | None
    options: tuple[tuple[str, Any], ...]
    defer: bool
    steps: tuple[tuple[Micro, ...], ...]
    lr: float = 0.2

    @property
    def world(self) -> int:
        return self.mesh[0] * self.mesh[1]


def draw(seed: int, steps_: int = 3, meshes: Sequence[tuple[int, int, int]] = MESHES, lr: float = 0.2) -> Program:
    r = random.Random(seed)
    mesh = r.choice(meshes)
    world, blocks = mesh[0] * mesh[1], r.randint(3, 6)
    middle = r.randint(0, blocks)
    ties = tuple(tuple(sorted(r.sample(range(blocks), 2))) for _ in range(r.choice((0, 0, 0, 1, 2))))
    checkpointing = r.choice(("none", "none", "blocks", "reentrant", "pairs"))
    optimizer = r.choice(("sgd", "sgd", "sgd", "muon"))
    options: dict[str, Any] = {
        "prefetch": r.randint(0, 3),
        "reshard_after_forward": r.random() < 0.7,
        "publish": r.choice(("async", "sync")),
        "riders": r.choice((None, r"norm")),
        "clip": r.choice(("joint", "joint", "adamw_only")),
        "holders": r.choice(("shard_group", "node")),
    }
    regular = options["holders"] == "node" and mesh[1] == 4 or mesh[1:] in ((2, 2), (1, 1))
    if regular:
        options["transport"] = r.choice(("point_to_point", "collective", "padded"))
    order = r.choice(("forward", "forward", "agreed", "same", "own"))
    sharded = r.choice(("nothing", "root", "root", "modules"))
    full_first = r.random() < 0.5
    # Until a step has shown the order, FSDP2's modules count as used where they are registered.
    middle_is_last = full_first and r.random() < 0.5
    steps = []
    for step in range(steps_):
        full = step == 0 and full_first
        micros = []
        for _ in range(r.choice((1, 1, 2, 3))):
            losses = r.choice(("one", "one", "one", "two", "kept", "two forwards"))
            if checkpointing == "reentrant" and losses in ("two", "kept"):
                losses = "one"  # torch runs such a graph once
            forwards = tuple(
                _paths(r, world, blocks, middle, order, full) for _ in range(1 + (losses == "two forwards"))
            )
            micros.append((losses, forwards))
        steps.append(tuple(micros))
    return Program(
        seed, mesh, blocks, middle, ties, optimizer == "sgd" and r.random() < 0.25, checkpointing, sharded,
        middle_is_last, r.random() < 0.3, optimizer, r.choice((None, 0.05)), tuple(options.items()),
        r.random() < 0.5, tuple(steps), lr,
    )  # fmt: skip


def _paths(r: random.Random, world: int, blocks: int, middle: int, order: str, full: bool) -> tuple[Course, ...]:
    """Of each rank: a subset in one order for all ("forward", "agreed"), one path for all with repetitions ("same"),
    or a subset in an order of its own."""

    def shuffled(items: Sequence[int]) -> tuple[int, ...]:
        return tuple(r.sample(items, len(items)))

    def subset(items: Sequence[int]) -> tuple[int, ...]:
        return tuple(i for i in items if full or r.random() < 0.6)

    parts = tuple(range(middle)), tuple(range(middle, blocks))
    if order == "agreed" or order == "same":
        parts = shuffled(parts[0]), shuffled(parts[1])
    if order == "same":
        parts = tuple(part + part[: r.choice((0, 0, 1))] for part in map(subset, parts))  # type: ignore[assignment]
        return (parts,) * world
    if order == "own":
        return tuple((shuffled(subset(parts[0])), shuffled(subset(parts[1]))) for _ in range(world))
    return tuple((subset(parts[0]), subset(parts[1])) for _ in range(world))


# ---- the model ----


class Block(nn.Module):
    def __init__(self, stack: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.experts = nn.Parameter(0.3 * torch.randn(3, DIM, DIM)) if stack else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(self.norm(x)))
        if self.experts is not None:
            h = h + torch.tanh(torch.einsum("bd,edf->bf", h, self.experts))
        return x + self.down(h)


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.program = program
        self.embed = nn.Linear(DIM, DIM)
        parts = [nn.ModuleList(Block(program.stacks) for _ in range(n)) for n in (program.middle, 6)]
        del parts[1][program.blocks - program.middle :]
        middle, head = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.before = parts[0]
        if not program.middle_is_last:
            self.middle = middle
        self.behind = parts[1]
        self.middle, self.head = middle, head
        self.blocks_ = [*parts[0], *parts[1]]
        for one, other in program.ties:
            self.blocks_[other].up.weight = self.blocks_[one].up.weight

    def _run(self, part: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
        kind, blocks = self.program.checkpointing, [self.blocks_[i] for i in part]
        if kind == "pairs":
            for i in range(0, len(blocks), 2):
                pair = nn.Sequential(*blocks[i : i + 2])
                x = checkpoint(pair, x, use_reentrant=False)
            return x
        for block in blocks:
            x = block(x) if kind == "none" else checkpoint(block, x, use_reentrant=kind == "reentrant")
        return x

    def forward(self, x: torch.Tensor, path: Course) -> torch.Tensor:
        x = self._run(path[0], self.embed(x))
        x = self._run(path[1], torch.tanh(self.middle(x)))
        return self.head(x)


OWNED = r"(up|down)\.weight$|experts$"


def _inputs(step: int, micro: int, turn: int, rank: int, grad: bool) -> torch.Tensor:
    g = torch.Generator().manual_seed(((step * 8 + micro) * 2 + turn) * 16 + rank)
    return (torch.randn(SAMPLES, DIM, generator=g) + 0.5).requires_grad_(grad)


def _run_micro(
    program: Program, model: nn.Module, at: tuple[int, int], rank: int, scale: float, outputs: list[torch.Tensor]
) -> None:
    losses, forwards = program.steps[at[0]][at[1]]
    outs = []
    for turn, paths in enumerate(forwards):
        outs.append(model(_inputs(*at, turn, rank, program.input_grad), paths[rank]))
        outputs.append(outs[-1].detach().clone())
    loss = sum(out.square().mean() for out in outs) * scale
    if losses == "two":
        loss.backward(retain_graph=True)
        (outs[0].sin().mean() * scale).backward()
    elif losses == "kept":
        loss.backward(retain_graph=True)
        loss.backward()
    else:
        loss.backward()


def _evaluate(program: Program, model: nn.Module, step: int, rank: int) -> torch.Tensor:
    with torch.no_grad():
        return model(_inputs(step, 7, 0, rank, False), program.steps[step][0][1][0][-1 - rank])


def _optimizers(program: Program) -> tuple[Callable[..., torch.optim.Optimizer], Callable[..., torch.optim.Optimizer]]:
    """Of the matrices, and of everything else."""
    sgd = functools.partial(torch.optim.SGD, lr=program.lr, momentum=0.9)
    muon = functools.partial(dmuon.Muon, lr=program.lr / 10, ns_dtype="float32", batch_bytes=0)
    return (muon if program.optimizer == "muon" else sgd), sgd


Expected = tuple[list[list[torch.Tensor]], list[dict[str, torch.Tensor]]]  # outputs by rank; weights after each step


def expected(program: Program) -> Expected:
    """What one process does with the same program."""
    model, outputs, weights = Model(program), [[] for _ in range(program.world)], []  # type: ignore[var-annotated]
    named = dict(model.named_parameters())
    owned = {n: p for n, p in named.items() if re.search(OWNED, n)}
    moved = {n: p for n, p in named.items() if n in owned or _moves(program, n)}
    clipped = {n: p for n, p in moved.items() if dict(program.options)["clip"] == "joint" or n not in owned}
    make_matrix, make_rest = _optimizers(program)
    matrix = make_matrix(list(owned.values()))
    rest = make_rest([p for n, p in moved.items() if n not in owned] or [nn.Parameter(torch.zeros(1))])
    for step, micros in enumerate(program.steps):
        for micro in range(len(micros)):
            for rank in range(program.world):
                _run_micro(program, model, (step, micro), rank, 1 / program.world, outputs[rank])
        if program.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(clipped.values(), program.max_norm)
        matrix.step()
        rest.step()
        model.zero_grad()
        for rank in range(program.world):
            outputs[rank].append(_evaluate(program, model, step, rank))
        weights.append({n: p.detach().clone() for n, p in owned.items()})
    return outputs, weights


def _moves(program: Program, name: str) -> bool:
    """Whether a parameter that is no matrix is reduced over ranks and updated: a rider, or FSDP2's."""
    if "norm" in name:
        return dict(program.options)["riders"] is not None
    return program.sharded != "nothing"


def own(program: Program, model: nn.Module, timeout: float) -> dmuon.OwnedMatrices:
    replicas, shards, per_node = program.mesh
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("dp_replicate", "dp_shard"))
    owned = dmuon.own_matrices(
        model,
        mesh,
        select=OWNED,
        stacks="experts$" if program.stacks else None,
        units=model.blocks_,
        ranks_per_node=per_node,
        timeout=datetime.timedelta(seconds=timeout),
        **dict(program.options),
    )
    if program.sharded != "nothing":
        ignored = owned.parameters | {p for n, p in model.named_parameters() if ".norm." in n}
        if program.sharded == "modules":
            for module in (model.embed, model.middle, model.head):
                fully_shard(module, mesh=mesh, ignored_params=ignored)
        fully_shard(model, mesh=mesh, ignored_params=ignored)
    return owned


def run(
    program: Program,
    rank: int,
    want: Expected,
    timeout: float = 30.0,
    after_step: Callable[[int, dmuon.OwnedMatrices], None] = lambda _step, _owned: None,
) -> float:
    """The largest difference to ``want``, relative to its tensor's largest value. AssertionError if it is large."""
    model = Model(program)
    owned = own(program, model, timeout)
    make_matrix, make_rest = _optimizers(program)
    matrix = owned.build_optimizer(make_matrix, **({"riders": make_rest} if owned.riders else {}))
    moved = [p for n, p in model.named_parameters() if program.sharded != "nothing" and ".norm." not in n]
    rest = make_rest([p for p in moved if p not in owned.parameters] or [nn.Parameter(torch.zeros(1))])
    local = [p for p in model.parameters() if p not in owned.parameters and p not in set(moved)]
    outputs: list[torch.Tensor] = []
    worst, seen = 0.0, 0
    try:
        for step, micros in enumerate(program.steps):
            for micro in range(len(micros)):
                last = micro == len(micros) - 1
                owned.set_is_last_backward(last or not program.defer, step_follows=last)
                _run_micro(program, model, (step, micro), rank, 1.0, outputs)
            for p in local:
                p.grad = None
            if program.max_norm is not None:
                owned.clip_grad_norm_(model, program.max_norm)
            matrix.step()
            rest.step()
            rest.zero_grad()
            outputs.append(_evaluate(program, model, step, rank))
            for mine, other in zip(outputs, want[0][rank][seen:], strict=False):
                worst = max(worst, _difference(mine, other))
            seen += len(outputs)
            outputs.clear()
            for key, master in owned.masters().items():
                name, _, row = key.partition("[")
                other = want[1][step].get(name)
                if other is not None:
                    other = other[int(row.rstrip("]"))] if row and other.ndim == 3 else other
                    worst = max(worst, _difference(master.reshape(other.shape), other))
            if not worst <= TOLERANCE * (50 if program.optimizer == "muon" else 1):
                raise AssertionError(f"differs by {worst:.1e} in step {step}")
            after_step(step, owned)
        wrong = [u.name for u in owned.engine.units if u.gathered and dict(program.options)["reshard_after_forward"]]
        assert not wrong, f"left gathered: {wrong}"
    finally:
        owned.close()
    return worst


def _difference(mine: torch.Tensor, other: torch.Tensor) -> float:
    return ((mine - other).abs().max() / other.abs().max().clamp(min=1e-3)).item()


def job(rank: int, world: int, programs: Sequence[tuple[Program, Expected]], debug: bool) -> list[float]:
    os.environ["DMUON_DEBUG"] = "1" if debug else ""
    found = []
    for program, want in programs:
        try:
            found.append(run(program, rank, want))
        except Exception as error:
            raise AssertionError(f"program {program.seed}: {error}\n{program}") from error
    return found


def check(seeds: Sequence[int], debug: bool = False, limit: float = 240.0) -> float:
    """Run the programs of these seeds, those of one number of ranks in one job; the largest difference."""
    programs = [draw(seed) for seed in seeds]
    worst = 0.0
    for key in sorted({(p.world, p.mesh[2]) for p in programs}):
        mine = [(p, expected(p)) for p in programs if (p.world, p.mesh[2]) == key]
        found = run_ranks(job, key[0], mine, debug, ranks_per_node=key[1], limit=limit)
        worst = max(worst, *(x for each in found for x in each))
    return worst


# ---- commands ----


def _many(first: int, count: int, size: int) -> None:
    begin, worst, failed = time.monotonic(), 0.0, []
    for start in range(first, first + count, size):
        seeds = range(start, min(start + size, first + count))
        try:
            worst = max(worst, check(seeds))
        except AssertionError:  # each by itself, to say which
            for seed in seeds:
                try:
                    worst = max(worst, check([seed], limit=60))
                except AssertionError as error:
                    failed.append(seed)
                    print(f"seed {seed} fails: {error}", flush=True)
        print(
            f"{seeds.stop - first} programs, {len(failed)} failed, largest difference {worst:.1e}, "
            f"{time.monotonic() - begin:.0f} s",
            flush=True,
        )
    sys.exit(bool(failed))


def _live_bytes() -> int:
    import gc

    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def _soak_job(rank: int, world: int, program: Program, want: Expected, every: int) -> list[tuple[int, int, int]]:
    os.environ["DMUON_DEBUG"] = "1"
    figures = []

    def note(step: int, owned: dmuon.OwnedMatrices) -> None:
        if (step + 1) % every == 0:
            owned.engine.await_publishes()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            figures.append((step + 1, resident, _live_bytes()))

    run(program, rank, want, timeout=60, after_step=note)
    return figures


def _soak(steps: int, first: int, each: int = 250) -> None:
    """Programs of many steps on 4 ranks under DMUON_DEBUG=1: no disagreement, and no growth of memory."""
    failed = False
    for number in range(max(1, steps // each)):
        program = draw(first + number, each, [m for m in MESHES if m[0] * m[1] == 4], 1e-3)
        found = run_ranks(
            _soak_job, 4, program, expected(program), each // 5, ranks_per_node=program.mesh[2], limit=1200
        )
        resident = [max(f[i][1] for f in found) for i in range(5)]
        live = [max(f[i][2] for f in found) for i in range(5)]
        failed |= live[-1] > live[0] * 1.02 or resident[-1] > resident[0] * 1.05
        steps_done = (
            f"{each * (number + 1)} steps; program {program.seed}, mesh {program.mesh}, every {each // 5} steps"
        )
        mib, kib = [round(b / 2**20, 1) for b in resident], [round(b / 2**10, 1) for b in live]
        print(f"{steps_done}: resident MiB {mib}, live tensors KiB {kib}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=0, help="how many programs to run")
    parser.add_argument("--soak", type=int, default=0, help="how many steps to run under DMUON_DEBUG=1")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--batch", type=int, default=50, help="programs between two lines")
    given = parser.parse_args()
    if given.soak:
        _soak(given.soak, given.first)
    _many(given.first, given.seeds, given.batch)
