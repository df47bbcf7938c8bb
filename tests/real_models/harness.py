"""A real model against one process: what a case is, how it is trained both ways, what counts as equal.

Four gloo ranks, two replicas of two shards, float32, one norm over everything clipped to 1.0, Muon on the matrices and
AdamW on the rest. Random weights from small configurations; nothing is downloaded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from transformers.pytorch_utils import Conv1D

import torchtitan_dmuon as dmuon
from tests.ranks import run_ranks
from tests.toy import mesh_of
from torchtitan_dmuon.muon import set_layout

REPLICAS, SHARDS, WORLD, STEPS = 2, 2, 4, 3
# Sums are taken in another order than in one process, and Newton-Schulz amplifies that where singular values are small.
LOSS_LIMIT, WEIGHT_LIMIT = 1e-6, 2e-5

MUON = functools.partial(dmuon.Muon, lr=0.02, weight_decay=0.1, ns_dtype="float32", batch_bytes=0)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """A model with equal weights at every call, what is owned of it, and its loss on a rank's batch of a step."""

    build: Callable[[], nn.Module]
    select: str
    units: Callable[[Any], Sequence[Any]]
    loss_of: Callable[[Any, int, int], torch.Tensor]
    layouts: Mapping[str, dmuon.MatrixLayout] = field(default_factory=dict)
    stacks: str | None = None
    sharded: Callable[[Any], Sequence[nn.Module]] | None = None  # given to `fully_shard` besides the root: the units
    parts_unused: bool = False  # some ranks and steps pass modules by whose parameters the root's `fully_shard` has
    after: Callable[[Any], Any] | None = None  # on the trained model: what must come out alike
    methods: Sequence[str] = ()  # that ``after`` calls, and that run the model past its `forward`


@dataclass
class Trained:
    """What a run leaves: losses by step (and rank), owned values by piece, the result of ``after``, and how many of
    the pieces a gradient reached."""

    losses: list[Any]
    weights: dict[str, torch.Tensor]
    after: Any
    reached: int = 0


def shard(case: Case, model: nn.Module) -> dmuon.OwnedMatrices:
    """The calls that a user makes."""
    mesh = mesh_of(REPLICAS, SHARDS)
    owned = dmuon.own_matrices(
        model, mesh, select=case.select, units=case.units(model), layouts=case.layouts, stacks=case.stacks
    )
    for module in (case.sharded or case.units)(model):
        fully_shard(module, mesh=mesh, ignored_params=owned.parameters)
    fully_shard(model, mesh=mesh, ignored_params=owned.parameters)
    if case.parts_unused:
        model.set_reduce_scatter_unused_params(True)  # else the ranks reduce different parameters
    for method in case.methods:
        register_fsdp_forward_method(model, method)
        owned.register_forward_method(model, method)
    return owned


def modules(model: nn.Module, *patterns: str) -> list[nn.Module]:
    """Submodules by name, in the order of the patterns: versions of a library nest them differently."""
    return [m for pattern in patterns for name, m in model.named_modules() if re.search(pattern, name)]


def rest_of(model: nn.Module, owned: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    without = set(owned)
    return [p for p in model.parameters() if p.requires_grad and p not in without]


def train(
    case: Case,
    model: nn.Module,
    owned: dmuon.OwnedMatrices,
    optimizers: Sequence[torch.optim.Optimizer],
    rank: int,
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
) -> list[float]:
    """A rank's steps; its losses."""
    losses = []
    for step in range(STEPS):
        loss = case.loss_of(model, step, rank)
        backward(loss)
        owned.clip_grad_norm_(model, 1.0)
        for each in optimizers:
            each.step()
            each.zero_grad()
        losses.append(loss.item())
    return losses


def optimizers_of(model: nn.Module, owned: dmuon.OwnedMatrices) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return owned.build_optimizer(MUON), ADAMW(rest_of(model, owned.parameters))


def train_owned(rank: int, _world: int, case: Case) -> Trained:
    model = case.build()
    owned = shard(case, model)
    losses = train(case, model, owned, optimizers_of(model, owned), rank)
    after = []
    if case.after is not None:
        with owned.gathered():
            after.append(case.after(model))
        after.append(case.after(model))
    weights = owned.masters()
    owned.close()
    return Trained(losses, weights, after)


class Piece:
    """One piece in one process: a 2-D parameter that shares the memory of the model's own ``whole``."""

    def __init__(self, whole: nn.Parameter, layout: dmuon.MatrixLayout, expert: int | None, transposed: bool) -> None:
        self.whole, self.expert, self.transposed = whole, expert, transposed
        self.matrix = nn.Parameter(self.of(whole.data), requires_grad=whole.requires_grad)
        self.before = self.matrix.detach().clone()
        set_layout(self.matrix, dmuon.MatrixLayout(layout.groups, layout.rows))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The matrix [out, in] in a tensor like ``whole``."""
        tensor = tensor.flatten(1) if self.expert is None else tensor[self.expert]
        return tensor.T if self.transposed else tensor

    def stored(self) -> torch.Tensor:
        """Its value as an owner holds it."""
        return self.matrix.detach().T if self.transposed else self.matrix.detach()


def pieces_of(case: Case, model: nn.Module) -> dict[str, Piece]:
    """Of everything that the case selects, by key."""
    found: dict[str, Piece] = {}
    seen: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        for attribute, p in module._parameters.items():
            name = f"{prefix}.{attribute}"
            if p is None or p in seen or p.ndim < 2 or not re.search(case.select, name):
                continue
            seen.add(p)
            layout = next((x for pattern, x in case.layouts.items() if re.search(pattern, name)), dmuon.MatrixLayout())
            is_stack = case.stacks is not None and re.search(case.stacks, name)
            for expert in range(len(p)) if is_stack else [None]:
                key = f"{name}[{expert or 0:06d}]"
                found[key] = Piece(p, layout, expert, transposed=isinstance(module, Conv1D))
    return found


def train_whole(case: Case) -> Trained:
    """The mean over the ranks' batches, ordinary torch."""
    model = case.build()
    pieces = pieces_of(case, model)
    optimizer = MUON([piece.matrix for piece in pieces.values()])
    rest = ADAMW(rest_of(model, [piece.whole for piece in pieces.values()]))
    losses = []
    reached: set[str] = set()
    for step in range(STEPS):
        of_ranks = []
        for rank in range(WORLD):
            loss = case.loss_of(model, step, rank)
            (loss / WORLD).backward()
            of_ranks.append(loss.item())
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        for key, piece in pieces.items():
            if piece.whole.grad is not None:
                reached.add(key)
                piece.matrix.grad = piece.of(piece.whole.grad)
        optimizer.step()
        rest.step()
        optimizer.zero_grad()
        model.zero_grad()
        losses.append(of_ranks)
    assert reached == {key for key, piece in pieces.items() if not torch.equal(piece.before, piece.matrix)}
    weights = {key: piece.stored() for key, piece in pieces.items()}
    return Trained(losses, weights, case.after(model) if case.after is not None else None, len(reached))


def compare(runs: Sequence[Trained], whole: Trained) -> str:
    """AssertionError where a rank differs from one process; else a line of figures."""
    loss = max(
        abs(mine - step[rank]) / abs(step[rank])
        for rank, run in enumerate(runs)
        for mine, step in zip(run.losses, whole.losses, strict=True)
    )
    held = {key: value for run in runs for key, value in run.weights.items()}
    assert held.keys() == whole.weights.keys()
    apart = {key: relative(value, whole.weights[key]) for key, value in held.items()}
    worst = max(apart, key=apart.__getitem__)
    assert loss <= LOSS_LIMIT, f"losses differ by {loss:.1e}"
    assert apart[worst] <= WEIGHT_LIMIT, f"{worst} differs by {apart[worst]:.1e}"
    for run in runs:
        for result in run.after:
            assert_same(result, whole.after)
    assert whole.reached > len(held) / 2
    pieces = f"{whole.reached} of {len(held)} owned pieces trained"
    return f"{pieces}, losses within {loss:.1e}, owned weights within {apart[worst]:.1e}"


def relative(mine: torch.Tensor, reference: torch.Tensor) -> float:
    return ((mine.reshape(reference.shape) - reference).norm() / reference.norm()).item()


def assert_same(mine: Any, reference: Any) -> None:
    if isinstance(reference, torch.Tensor):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)
    else:
        assert mine == reference


def on_ranks(job: Callable[..., Any], *args: Any) -> list[Any]:
    """``job(rank, world, *args)`` on every rank; a shard group is a node."""
    return run_ranks(job, WORLD, *args, ranks_per_node=SHARDS)


def equals_one_process(case: Case) -> str:
    """Train both ways and compare; the figures."""
    return compare(on_ranks(train_owned, case), train_whole(case))
