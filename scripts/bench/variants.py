"""The variants of the throughput bench: one model and one step each, alike but for what the bench compares.

Decides: how each variant shards, clips and updates. Every one clips by the joint norm of all gradients; parameters that
are no matrix are updated by the same AdamW, and are reduced by the best plain FSDP2 there is (`fsdp.py`), except in the
two AdamW variants whose reduction is the point.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import torchtitan_dmuon as dmuon
import torchtitan_dmuon.muon
from torchtitan_dmuon.muon import set_layout

from .fsdp import POLICY, Fsdp
from .model import MATRICES, Model, Settings, batch, make_model, matrices

ADAMW = ("adamw", "adamw_tuned", "adamw_async")
MUON = ("gather_muon", "dist_muon", "dmuon", "dmuon_flat", "dmuon_sync", "dmuon_node_holders", "dmuon_riders")
NAMES = ADAMW + MUON
PHASES = ("gather", "reduce", "publish")

# Momentum, coefficients and dtype are the defaults everywhere: torch.optim.Muon's.
_MUON: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.95}


class Variant:
    """One model in training. `train_step` is what is timed; `drain` completes what a step left under way."""

    fsdp: Fsdp
    optimizers: list[torch.optim.Optimizer]

    def __init__(self, name: str, settings: Settings, mesh: DeviceMesh) -> None:
        self.name, self.settings, self.mesh = name, settings, mesh
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model: Model = make_model(settings)
        self.loss, self.norm = float("nan"), float("nan")

    def train_step(self, index: int) -> None:
        self.forward_backward(index)
        self.update()

    def forward_backward(self, index: int) -> None:
        s = self.settings
        total = torch.zeros(())
        for micro in range(s.accumulation):
            self.begin_backward(micro == s.accumulation - 1)
            tokens, targets = batch(s, self.rank, index * s.accumulation + micro)
            loss = self.model(tokens, targets) / (self.world * s.tokens_per_rank())
            loss.backward()
            self.fsdp.end_backward(self.model.parameters())
            total += loss.detach()
        self.loss = float(total)

    def begin_backward(self, last: bool) -> None:
        self.fsdp.begin_backward(last)

    def update(self) -> None:
        self.fsdp.wait()
        self.norm = float(self.clip())
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def clip(self) -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_norm, foreach=True)
        return norm.full_tensor()  # type: ignore[attr-defined]

    def drain(self) -> None:
        pass

    def exposed(self) -> dict[str, float] | None:
        """Seconds since the last call that the step waited for the network, by phase; None where it is not told apart
        from the operations themselves."""
        waited, self.fsdp.waited = self.fsdp.waited, 0.0
        return {"gather": 0.0, "reduce": waited, "publish": 0.0} if self.fsdp.overlapped else None

    def masters(self) -> dict[str, torch.Tensor]:
        """Every matrix parameter in fp32, whole, on every rank. A collective."""
        return {name: p.detach().full_tensor().clone() for name, p in matrices(self.model)}  # type: ignore[attr-defined]

    def close(self) -> None:
        pass

    def _adamw(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        s = self.settings
        return torch.optim.AdamW(params, lr=s.lr, betas=(0.9, 0.95), weight_decay=s.weight_decay, fused=True)

    def _others(self) -> list[nn.Parameter]:
        mine = {p for _, p in matrices(self.model)}
        return [p for p in self.model.parameters() if p not in mine]

    def _parts(self) -> list[nn.Module]:
        return [self.model.embed, *self.model.layers, self.model.head]


class AdamW(Variant):
    def __init__(self, name: str, settings: Settings, mesh: DeviceMesh, way: str) -> None:
        super().__init__(name, settings, mesh)
        self.fsdp = Fsdp(mesh, way)
        self.fsdp.shard(self.model, self._parts())
        self.optimizers = [self._adamw(list(self.model.parameters()))]


class ShardedMuon(Variant):
    """Muon over FSDP2's shards: ``make`` builds it from the named parameters."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        mesh: DeviceMesh,
        make: Callable[[Settings, list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    ) -> None:
        super().__init__(name, settings, mesh)
        self.fsdp = Fsdp(mesh, "async")
        self.fsdp.shard(self.model, self._parts())
        self.optimizers = [make(settings, list(matrices(self.model))), self._adamw(self._others())]


class Owned(Variant):
    def __init__(self, name: str, settings: Settings, mesh: DeviceMesh, **options: Any) -> None:
        super().__init__(name, settings, mesh)
        self.owned = dmuon.own_matrices(
            self.model,
            mesh,
            select=MATRICES,
            units=self.model.layers,
            mp_policy=POLICY,
            layouts=settings.layouts(),
            gradient_divide_factor=1.0,
            **options,
        )
        self.fsdp = Fsdp(mesh, "async")
        # The blocks' norms ride, or stay in the model's own group: nothing small and blocking inside a block.
        self.fsdp.shard(self.model, [self.model.embed, self.model.head], self.owned.parameters)
        matrix = self.owned.build_optimizer(
            dmuon.Muon, riders=self._adamw, lr=settings.matrix_lr, weight_decay=settings.weight_decay, **_MUON
        )
        ignored = self.owned.parameters
        self.optimizers = [matrix, self._adamw([p for p in self.model.parameters() if p not in ignored])]

    def begin_backward(self, last: bool) -> None:
        super().begin_backward(last)
        self.owned.set_is_last_backward(last)

    def clip(self) -> torch.Tensor:
        return self.owned.clip_grad_norm_(self.model, self.settings.max_norm)

    def drain(self) -> None:
        for unit in self.owned.engine.units:
            if unit.published is not None:
                unit.published.wait()

    def exposed(self) -> dict[str, float]:
        rest = super().exposed() or {}
        own = self.owned.engine.exposure.take()
        return {phase: own.get(phase, 0.0) + rest.get(phase, 0.0) for phase in PHASES}

    def masters(self) -> dict[str, torch.Tensor]:
        mine = self.owned.masters()
        whole = {}
        for piece in self.owned.plan.pieces:
            if piece.rider:
                continue
            value = mine[piece.key].clone() if piece.key in mine else torch.empty(piece.shape)
            dist.broadcast(value, self.owned.plan.owner_of(piece.key))
            whole[piece.name] = value
        return whole

    def close(self) -> None:
        self.owned.close()


def _gather_muon(s: Settings, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    from torchtitan_dmuon.titan.gather_muon import GatherMuon

    for name, p in named:
        set_layout(p, s.layout_of(name))
    return GatherMuon([p for _, p in named], lr=s.matrix_lr, weight_decay=s.weight_decay, **_MUON)


def _dist_muon(s: Settings, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    from .dist_muon import make_dist_muon

    if s.fused:
        raise ValueError("dist_muon takes no fused weights here: run without --fused")
    return make_dist_muon(named, lr=s.matrix_lr, weight_decay=s.weight_decay, **_MUON)


def make_variant(name: str, settings: Settings, mesh: DeviceMesh) -> Variant:
    """A collective over ``mesh`` [R, S]."""
    if name in ADAMW:
        return AdamW(name, settings, mesh, name.removeprefix("adamw").removeprefix("_") or "stock")
    if name == "gather_muon":
        return ShardedMuon(name, settings, mesh, _gather_muon)
    if name == "dist_muon":
        return ShardedMuon(name, settings, mesh, _dist_muon)
    options: dict[str, dict[str, Any]] = {
        "dmuon": {},
        "dmuon_flat": {"routing": "flat"},
        "dmuon_sync": {"publish": "sync"},
        "dmuon_node_holders": {"holders": "node"},
        "dmuon_riders": {"riders": r"\.norm\d\.weight$"},
    }
    return Owned(name, settings, mesh, **options[name])


@contextlib.contextmanager
def newton_schulz_timed() -> Iterator[Counter[str]]:
    """Seconds this rank spends in Newton-Schulz inside the block, under "seconds". Replaces the name that `muon.py`
    calls, for the bench alone: an optimizer has no reason to read a clock."""
    spent: Counter[str] = Counter()
    module = torchtitan_dmuon.muon
    original = module.orthogonalize

    def timed(*args: object, **kwargs: object) -> torch.Tensor:
        begin = time.perf_counter()
        result = original(*args, **kwargs)  # type: ignore[arg-type]
        spent["seconds"] += time.perf_counter() - begin  # type: ignore[assignment]
        return result

    module.orthogonalize = timed  # type: ignore[assignment]
    try:
        yield spent
    finally:
        module.orthogonalize = original
