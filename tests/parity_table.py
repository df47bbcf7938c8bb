"""Parity with one process: what is run, what is measured, what counts as equal. Prints the table as a script.

A case trains the toy on a mesh and, with the same numbers, in one process on ordinary torch. Measured where a fault
cannot hide (DESIGN invariant 1): reduced gradients before the clip and momentum before Newton-Schulz, then the weights.

    python -m tests.parity_table
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torchtitan_dmuon as dmuon
from torchtitan_dmuon.muon import layout_of

from . import toy
from .ranks import run_ranks

STEPS = 5
MAX_NORM = 1.0
RIDERS = r"\.norm\d\.weight$|\.bias$"
MESHES = ((1, 2, 2), (2, 1, 1), (2, 2, 2), (1, 4, 2), (4, 1, 2))  # replicas, shards, ranks per node


class NotEqual(AssertionError):
    """A figure is above its limit."""


@dataclass(frozen=True)
class Case:
    """One run: mesh, batch, precision, optimizer of the matrices, options of `own_matrices`, and a planted fault."""

    replicas: int
    shards: int
    ranks_per_node: int
    micros: int = 1
    compute: str = "float32"
    optimizer: str = "muon"
    checkpointing: str = ""  # "", "inside" (the hooks run again in the recompute), "wrapper" (around unit and hooks)
    options: tuple[tuple[str, Any], ...] = ()
    fault: str = ""
    steps: int = STEPS

    @property
    def world(self) -> int:
        return self.replicas * self.shards

    @property
    def param_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.compute == "bfloat16" else None

    def but(self, **options: Any) -> Case:
        return replace(self, options=(*self.options, *options.items()))


@dataclass
class Outcome:
    """By parameter name: reduced gradients and momentum of step 0 (before clip and NS), weights before and after."""

    norms: list[float]
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    momenta: dict[str, torch.Tensor]
    initial: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


class TorchMuonPerMatrix(torch.optim.Muon):
    """torch's own Muon on each matrix by itself: fused weights are cut before and joined after."""

    def __init__(self, params: Sequence[torch.nn.Parameter], **kwargs: Any) -> None:
        self.fused = list(params)
        super().__init__([m.detach().clone() for p in self.fused for m in layout_of(p).split(p)], **kwargs)

    @torch.no_grad()
    def step(self, closure=None):
        matrices = iter(self.param_groups[0]["params"])
        cut = [[next(matrices) for _ in layout_of(p).split(p)] for p in self.fused]
        for p, blocks in zip(self.fused, cut):
            for block, grad in zip(blocks, layout_of(p).split(p.grad)):
                block.grad = grad.contiguous()
        super().step(closure)
        for p, blocks in zip(self.fused, cut):
            p.copy_(layout_of(p).join(blocks))
            self.state[p]["momentum_buffer"] = layout_of(p).join([self.state[b]["momentum_buffer"] for b in blocks])


def factory(case: Case, reference: bool) -> Callable[..., torch.optim.Optimizer]:
    if case.optimizer == "sgd":
        return functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    if case.optimizer == "muon":
        # One matrix per Newton-Schulz batch: what shares a batch depends on the plan, and with it the last bit.
        return functools.partial(dmuon.Muon, lr=0.02, weight_decay=0.1, ns_dtype="float32", batch_bytes=0)
    assert case.optimizer == "muon_bf16", case.optimizer
    if reference:
        return functools.partial(TorchMuonPerMatrix, lr=0.02, weight_decay=0.1)
    return functools.partial(dmuon.Muon, lr=0.02, weight_decay=0.1, ns_dtype="bfloat16")


def run_reference(case: Case) -> Outcome:
    """The case in one process; depends on world, micro-batches, dtype and optimizer alone. Of the parameters that the
    case owns."""
    whole = _reference(case.world, case.micros, case.compute, case.optimizer, case.steps)
    riders = dict(case.options).get("riders")
    pattern = toy.OWNED if riders is None else f"{toy.OWNED}|{riders}"

    def owned(of: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: t for n, t in of.items() if re.search(pattern, n)}

    parts = (owned(t) for t in (whole.gradients, whole.momenta, whole.initial, whole.weights))
    return Outcome(whole.norms, whole.losses, *parts)


@functools.cache
def _reference(world: int, micros: int, compute: str, optimizer: str, steps: int) -> Outcome:
    case = Case(1, world, world, micros, compute, optimizer, steps=steps)
    ref = toy.Reference(world, factory(case, reference=True), micros, MAX_NORM, case.param_dtype)
    params = dict(ref.model.named_parameters())
    initial = {n: p.detach().clone() for n, p in params.items()}
    norms, losses, gradients, momenta = [], [], {}, {}
    for step in range(steps):
        losses.append(ref.backward(step))
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in params.items()}
        norms.append(ref.update())
        if step == 0:
            momenta = {n: _momentum(ref.matrix.state.get(p) or ref.rest.state[p]) for n, p in params.items()}
    return Outcome(norms, losses, gradients, momenta, initial, {n: p.detach().clone() for n, p in params.items()})


def _momentum(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return (state["momentum_buffer"] if "momentum_buffer" in state else state["exp_avg"]).clone()


# ---- on the ranks ----


def _train(case: Case, rank: int) -> Outcome:
    model = toy.make_toy(checkpointing=case.checkpointing == "inside")
    if case.checkpointing == "wrapper":
        for i, layer in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(layer)
    options = dict(case.options)
    if case.fault == "fused q, k, v as one matrix":
        options["layouts"] = {}
    if case.fault == "divided by the world size once more":
        options["gradient_divide_factor"] = float(case.world**2)
    mesh = toy.mesh_of(case.replicas, case.shards)
    owned = toy.shard(model, mesh, case.param_dtype, ranks_per_node=case.ranks_per_node, **options)
    matrix = owned.build_optimizer(factory(case, reference=False), riders=toy.adamw)
    if case.fault == "one matrix skipped":
        _skip(matrix, owned, "layers.1.w1.weight[000000]")
    if case.fault == "one rider skipped":
        _skip(matrix, owned, "layers.2.norm1.weight[000000]", inner=1)
    if case.fault == "one unit not published":
        _withhold(owned, unit=1)
    rest = toy.adamw([p for p in model.parameters() if p not in owned.parameters])
    masters = owned.masters()
    initial = {k: v.clone() for k, v in masters.items()}
    norms, losses, gradients, momenta = [], [], {}, {}
    for step in range(case.steps):
        for micro in range(case.micros):
            owned.set_is_last_backward(micro == case.micros - 1)
            loss = toy.loss_of(model, step, micro, rank)
            loss.backward()
            losses.append(loss.item())
            if case.fault == "one micro-batch dropped" and micro == 0:
                owned.engine.drop_gradients()
        if step == 0:
            owned.engine.finish_reduces()
            gradients = {k: p.grad.clone() for u in owned.engine.units for k, p in u.master_of.items()}
        norms.append(owned.clip_grad_norm_(model, MAX_NORM).item())
        matrix.step()
        rest.step()
        rest.zero_grad()
        if step == 0:
            pieces = [(k, matrix.state.get(p)) for u in owned.engine.units for k, p in u.master_of.items()]
            momenta = {k: _momentum(state) for k, state in pieces if state}
    outcome = Outcome(norms, losses, gradients, momenta, initial, {k: v.clone() for k, v in masters.items()})
    owned.close()
    return outcome


def _withhold(owned: dmuon.OwnedMatrices, unit: int) -> None:
    """After the initial publish, one unit's new weights never reach its holders."""
    owned.publish()
    publish = owned.engine.publish
    owned.engine.publish = lambda u: None if u.index == unit else publish(u)  # type: ignore[method-assign]


def _skip(matrix: dmuon.OwnedOptimizer, owned: dmuon.OwnedMatrices, key: str, inner: int = 0) -> None:
    skipped = [u.master_of[key] for u in owned.engine.units if key in u.master_of]
    step = matrix.inners[inner].step

    def without() -> None:
        for p in skipped:
            p.grad = None
        step()

    matrix.inners[inner].step = without  # type: ignore[method-assign]


def _job(rank: int, _world: int, cases: Sequence[Case]) -> list[Outcome]:
    return [_train(case, rank) for case in cases]


def run_cases(cases: Sequence[Case], limit: float = 120.0) -> list[Outcome]:
    """All cases, of one mesh, in one job. Pieces are merged over ranks under their parameter names."""
    first = cases[0]
    assert all((c.world, c.ranks_per_node) == (first.world, first.ranks_per_node) for c in cases)
    by_rank = run_ranks(_job, first.world, cases, ranks_per_node=first.ranks_per_node, limit=limit)
    return [_merge([results[i] for results in by_rank]) for i in range(len(cases))]


def _merge(outcomes: Sequence[Outcome]) -> Outcome:
    def join(field: str) -> dict[str, torch.Tensor]:
        joined: dict[str, torch.Tensor] = {}
        for outcome in outcomes:
            for key, tensor in getattr(outcome, field).items():
                name = key.partition("[")[0]
                if name in joined and not torch.equal(joined[name], tensor):
                    raise NotEqual(f"{field} of {name} differ between its owners")
                joined[name] = tensor
        return joined

    if any(o.norms != outcomes[0].norms for o in outcomes):
        raise NotEqual(f"the norm differs between ranks: {[o.norms for o in outcomes]}")
    losses = [sum(each) / len(outcomes) for each in zip(*(o.losses for o in outcomes))]
    merged = copy.copy(outcomes[0])
    merged.losses = losses
    for field in ("gradients", "momenta", "initial", "weights"):
        setattr(merged, field, join(field))
    return merged


# ---- figures ----


def figures(outcome: Outcome, ref: Outcome) -> dict[str, float]:
    """The largest over matrices of each relative difference; missing parameters raise."""

    def worst(field: str) -> float:
        ours, theirs = getattr(outcome, field), getattr(ref, field)
        if ours.keys() != theirs.keys():
            raise NotEqual(f"{field}: parameters differ: {sorted(ours.keys() ^ theirs.keys())}")
        return max(((ours[n] - theirs[n]).norm() / theirs[n].norm()).item() for n in theirs)

    update = max(
        ((outcome.weights[n] - ref.weights[n]).norm() / (ref.weights[n] - ref.initial[n]).norm()).item()
        for n in ref.weights
    )
    return {
        "norm_0": ref.norms[0],
        "gradient": worst("gradients"),
        "momentum": worst("momenta"),
        "norm_0_difference": abs(outcome.norms[0] - ref.norms[0]) / ref.norms[0],
        "norm": max(abs(a - b) / b for a, b in zip(outcome.norms, ref.norms)),
        "weight": worst("weights"),
        "update": update,
    }


def limits(case: Case) -> dict[str, float]:
    """What each figure may be.

    Step 0 shows the reduce alone. Later steps compound: with bf16 weights in the forward, one master that falls on the
    other side of a rounding shifts that weight by 2^-8, so after 5 steps bf16 compute gets the looser bound.
    """
    found = {
        "gradient": 1e-6,
        "momentum": 1e-6,
        "norm_0_difference": 1e-6,
        "norm": 1e-5,
        "weight": 1e-5,
        "update": 1e-3,
    }
    if case.optimizer == "muon_bf16":
        found |= {"norm": 3e-2, "weight": 3e-2, "update": 3e-2}
    if case.compute == "bfloat16":
        found |= {"norm": 1e-2, "weight": 1e-3, "update": 3e-2}
    return found


def check(case: Case, outcome: Outcome) -> dict[str, float]:
    """Raise NotEqual unless the outcome equals one process; returns the figures."""
    found = figures(outcome, run_reference(case))
    if found["norm_0"] <= MAX_NORM:
        raise NotEqual(f"the clip does not bite: the first norm is {found['norm_0']:.3f}")
    for name, limit in limits(case).items():
        if not found[name] <= limit:
            raise NotEqual(f"{case}: {name} differs by {found[name]:.2e}, allowed {limit:.0e}")
    return found


def check_equal(outcome: Outcome, other: Outcome, what: str) -> None:
    """Raise NotEqual unless every tensor, norm and loss of two runs is the same to the last bit."""
    for field in ("gradients", "momenta", "weights"):
        a, b = getattr(outcome, field), getattr(other, field)
        if a.keys() != b.keys():
            raise NotEqual(f"{what}: {field} of other parameters")
        for name in a:
            if not torch.equal(a[name], b[name]):
                raise NotEqual(f"{what}: {field} of {name} differ by {(a[name] - b[name]).abs().max():.2e}")
    if (outcome.norms, outcome.losses) != (other.norms, other.losses):
        raise NotEqual(f"{what}: norms {outcome.norms} against {other.norms}")


def cases_of(mesh: tuple[int, int, int]) -> list[Case]:
    """The parity cases of one mesh; the first three touch every dimension once."""
    plain = Case(*mesh)
    return [
        replace(plain, checkpointing="inside").but(prefetch=2, riders=RIDERS),
        replace(plain, micros=3, compute="bfloat16", optimizer="sgd").but(reshard_after_forward=False, riders=RIDERS),
        replace(plain, micros=3, optimizer="muon_bf16", checkpointing="wrapper"),
        replace(plain, micros=3, checkpointing="wrapper").but(reshard_after_forward=False),
        replace(plain, compute="bfloat16"),
        replace(plain, micros=3, optimizer="sgd"),
        replace(plain, optimizer="sgd"),
        replace(plain, optimizer="muon_bf16"),
        replace(plain, micros=3, compute="bfloat16"),
        plain,
    ]


def table(meshes: Sequence[tuple[int, int, int]] = MESHES) -> list[tuple[Case, dict[str, float]]]:
    """Figures of every parity case of the meshes; raises where one is above its limit."""
    rows = []
    for mesh in meshes:
        cases = cases_of(mesh)
        rows += [(case, check(case, outcome)) for case, outcome in zip(cases, run_cases(cases))]
    return rows


def main() -> None:
    titles = (
        "mesh  nodes  acc  compute   optimizer  reshard  riders  checkpoint  gradient  momentum  norm  weight  update"
    )
    print(titles)
    for case, found in table():
        reshard = "always" if dict(case.options).get("reshard_after_forward", True) else "never"
        riders = "yes" if "riders" in dict(case.options) else "no"
        shown = "  ".join(f"{found[k]:.1e}" for k in ("gradient", "momentum", "norm", "weight", "update"))
        print(
            f"{case.replicas}x{case.shards}   {case.world // case.ranks_per_node:<5}  {case.micros:<3}  "
            f"{case.compute:<9} "
            f"{case.optimizer:<10} {reshard:<8} {riders:<7} {case.checkpointing or 'none':<10}  {shown}"
        )


if __name__ == "__main__":
    main()
