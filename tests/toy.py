"""A small transformer, its data, and the one-process run that owned training must equal."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # noqa: F401  here, not in every forked rank
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import torchtitan_dmuon as dmuon
from torchtitan_dmuon import muon
from torchtitan_dmuon.muon import set_layout
from torchtitan_dmuon.runtime.partial import PartialTensor

VOCAB, DIM, HIDDEN, LENGTH = 32, 16, 24, 8
OWNED = r"layers\.\d+\.(qkv|wo|w1|w2)\.weight$"
LAYOUTS = {r"\.qkv\.weight$": dmuon.MatrixLayout(groups=2, rows=(8, 4, 4))}


def counted_matrices() -> Counter[str]:
    """From now on the "matrices" that Newton-Schulz runs on in this process, which is to be a rank of its own."""
    found: Counter[str] = Counter()
    orthogonalize = muon.orthogonalize

    def counted(stack_BMN: torch.Tensor, *args: Any) -> torch.Tensor:
        found["matrices"] += stack_BMN.shape[0]
        return orthogonalize(stack_BMN, *args)

    muon.orthogonalize = counted
    return found


class Block(nn.Module):
    """Attention-free stand-in with a fused weight [32, 16] (three interleaved matrices), a bias and two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, 32, bias=False)
        self.wo = nn.Linear(16, DIM, bias=True)
        self.w1 = nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:-1], 2, 16).split((8, 4, 4), dim=-1)
        mixed = (q * torch.tanh(torch.cat((k, v), -1))).flatten(-2)
        x = x + self.wo(mixed)
        return x + self.w2(F.silu(self.w1(self.norm2(x))))


class Toy(nn.Module):
    def __init__(self, layers: int = 3, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.head(self.norm(x))


def make_toy(layers: int = 3, checkpointing: bool = False) -> Toy:
    torch.manual_seed(0)
    model = Toy(layers, checkpointing)
    for p in model.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=0.3)
    return model


def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    tokens = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=g)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    tokens, targets = batch(step, micro, rank)
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def held(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What this rank has some of, of a state dict: it names everything."""
    return {k: v for k, v in state.items() if not isinstance(v, PartialTensor) or v.parts}


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("dp_replicate", "dp_shard"))


def shard(model: Toy, mesh: DeviceMesh, param_dtype: torch.dtype | None = None, **options: Any) -> dmuon.OwnedMatrices:
    """The three calls of the public surface."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    options = {"select": OWNED, "layouts": LAYOUTS, **options}
    reshard = options.get("reshard_after_forward", True)
    owned = dmuon.own_matrices(model, mesh, units=model.layers, mp_policy=policy, **options)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=owned.parameters, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=owned.parameters)
    return owned


Optimizers = tuple[torch.optim.Optimizer, torch.optim.Optimizer]


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Reference:
    """One process, ordinary torch: the whole batch of ``world`` ranks, gradients averaged over ranks.

    With ``param_dtype`` each rank's forward and backward run on a cast copy, and gradients are summed in float32.
    """

    def __init__(
        self,
        world: int,
        matrix_optimizer: Callable[..., torch.optim.Optimizer],
        micros: int = 1,
        max_norm: float = 1.0,
        param_dtype: torch.dtype | None = None,
        model: Toy | None = None,
    ) -> None:
        self.world, self.micros, self.max_norm = world, micros, max_norm
        self.model = model or make_toy()
        self.compute = self.model if param_dtype is None else copy.deepcopy(self.model).to(param_dtype)
        self.owned = {n: p for n, p in self.model.named_parameters() if re.search(OWNED, n)}
        for name, p in self.owned.items():
            set_layout(p, next((x for pattern, x in LAYOUTS.items() if re.search(pattern, name)), dmuon.MatrixLayout()))
        self.matrix = matrix_optimizer(list(self.owned.values()))
        self.rest = adamw([p for n, p in self.model.named_parameters() if n not in self.owned])

    def backward(self, step: int) -> list[float]:
        """Accumulate the gradients of one step; the loss of each micro-batch, averaged over ranks."""
        if self.compute is not self.model:
            with torch.no_grad():
                for mine, master in zip(self.compute.parameters(), self.model.parameters()):
                    mine.copy_(master)
        losses = [0.0] * self.micros
        for micro in range(self.micros):
            for rank in range(self.world):
                loss = loss_of(self.compute, step, micro, rank)
                (loss / self.world).backward()
                losses[micro] += loss.item() / self.world
                if self.compute is not self.model:
                    self._collect()
        return losses

    def _collect(self) -> None:
        for mine, master in zip(self.compute.parameters(), self.model.parameters()):
            grad = mine.grad.float()
            master.grad = grad if master.grad is None else master.grad + grad
            mine.grad = None

    def update(self) -> float:
        """Clip and update; the norm before the clip."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.grads = {n: p.grad.clone() for n, p in self.owned.items()}
        self.matrix.step()
        self.rest.step()
        self.matrix.zero_grad()
        self.rest.zero_grad()
        for p in self.owned.values():
            p.grad = None
        return norm.item()

    def step(self, step: int) -> float:
        self.backward(step)
        return self.update()
