"""The model, data and settings that every variant of the throughput bench trains.

Decides: shapes, initial weights and batches, all functions of the settings alone, so that variants start equal and see
equal data. Does not decide how anything is distributed.

Weights are bfloat16 while gathered, in every variant, and so are their gradients: that is what travels. The products
are taken in bfloat16 where the processor multiplies it fast, else in float32: bfloat16 would be fifty times slower.

Shape suffixes: B batch, L sequence, D model width, N heads, H head width.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import torchtitan_dmuon as dmuon

MATRICES = r"layers\.\d+\.(wqkv|wq|wk|wv|wo|w13|w1|w3|w2)\.weight$"


def product_dtype() -> torch.dtype:
    """What activations and products are in on this machine's CPU."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


@dataclass(frozen=True)
class Settings:
    """Defaults: Newton-Schulz once per matrix costs about 6 % of the forward-backward FLOPs, more than it does in large
    clusters (under 1 % for 8B on 256 GPUs); embedding and head hold the same share of the parameters as in 8B."""

    dim: int = 128
    layers: int = 6
    heads: int = 2
    hidden: int = 384
    vocab: int = 1024
    batch: int = 16  # sequences per rank and micro-batch
    length: int = 128
    accumulation: int = 1
    fused: bool = False  # q, k, v in one weight; gate and up in one weight
    max_norm: float = 1.0
    matrix_lr: float = 2e-3
    lr: float = 1e-3
    weight_decay: float = 0.01

    def tokens_per_rank(self) -> int:
        return self.batch * self.length * self.accumulation

    def layouts(self) -> dict[str, dmuon.MatrixLayout]:
        if not self.fused:
            return {}
        return {
            r"\.wqkv\.weight$": dmuon.MatrixLayout(groups=1, rows=(self.dim,) * 3),
            r"\.w13\.weight$": dmuon.MatrixLayout(groups=1, rows=(self.hidden,) * 2),
        }

    def layout_of(self, name: str) -> dmuon.MatrixLayout:
        """Of the matrix parameter ``name``."""
        found = (layout for pattern, layout in self.layouts().items() if re.search(pattern, name))
        return next(found, dmuon.MatrixLayout())


class Linear(nn.Linear):
    """No bias; multiplies in the dtype of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        return F.linear(x_BLD, self.weight.to(x_BLD.dtype))


class Norm(nn.RMSNorm):
    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        return F.rms_norm(x_BLD, self.weight.shape, self.weight.to(x_BLD.dtype), 1e-6)


class Block(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.heads, self.fused = s.heads, s.fused
        self.norm1, self.norm2 = Norm(s.dim), Norm(s.dim)
        if s.fused:
            self.wqkv, self.w13 = Linear(s.dim, 3 * s.dim), Linear(s.dim, 2 * s.hidden)
        else:
            self.wq, self.wk, self.wv = (Linear(s.dim, s.dim) for _ in range(3))
            self.w1, self.w3 = Linear(s.dim, s.hidden), Linear(s.dim, s.hidden)
        self.wo, self.w2 = Linear(s.dim, s.dim), Linear(s.hidden, s.dim)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        normed_BLD = self.norm1(x_BLD)
        projected = self.wqkv(normed_BLD).chunk(3, -1) if self.fused else [w(normed_BLD) for w in self._qkv()]
        q_BNLH, k_BNLH, v_BNLH = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in projected)
        mixed_BNLH = F.scaled_dot_product_attention(q_BNLH, k_BNLH, v_BNLH, is_causal=True)
        x_BLD = x_BLD + self.wo(mixed_BNLH.transpose(1, 2).flatten(2))
        normed_BLD = self.norm2(x_BLD)
        gate, up = self.w13(normed_BLD).chunk(2, -1) if self.fused else (self.w1(normed_BLD), self.w3(normed_BLD))
        return x_BLD + self.w2(F.silu(gate) * up)

    def _qkv(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.wq, self.wk, self.wv


class Head(nn.Module):
    """Last norm, output projection and summed cross entropy: one module, so that FSDP2 gathers them together."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.norm = Norm(s.dim)
        self.out = Linear(s.dim, s.vocab)

    def forward(self, x_BLD: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
        logits = self.out(self.norm(x_BLD)).flatten(0, 1).float()
        return F.cross_entropy(logits, targets_BL.flatten(), reduction="sum")


class Model(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.embed = nn.Embedding(s.vocab, s.dim)
        self.layers = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.head = Head(s)

    def forward(self, tokens_BL: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
        x_BLD = self.embed(tokens_BL).to(product_dtype())
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        return self.head(x_BLD, targets_BL)


def make_model(s: Settings) -> Model:
    """fp32, the same on every rank and in every variant."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Model(s)
        for p in model.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
    return model


def matrices(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that Muon updates, with their names, in order."""
    names = dmuon.matrices.select_names({n: p.shape for n, p in model.named_parameters()}, MATRICES)
    by_name = dict(model.named_parameters())
    return ((name, by_name[name]) for name in names)


@functools.lru_cache(maxsize=8)
def batch(s: Settings, rank: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets [B, L] of one micro-batch: random, with every second token a function of the one before."""
    g = torch.Generator().manual_seed(1_000 * index + rank)
    tokens = torch.randint(0, s.vocab, (s.batch, s.length + 1), generator=g)
    tokens[:, 1::2] = (tokens[:, 0:-1:2] * 7 + 3) % s.vocab
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
