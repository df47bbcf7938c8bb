"""MuonClip's QK-clip (Kimi K2, arXiv 2507.20534): query and key projections shrink where logits grew past tau.

Decides: which attention layers have it, what their largest logits are, and by how much each head's rows shrink. The
logits are computed again from the queries and keys that enter the attention kernel, since fused kernels do not show
them: half an attention forward more, without gradients. Keeps invariant 10: weights change only inside `step()`, on
their owner, after the update and before the publish.

After a step, a head whose largest logit in the step's forwards was S > tau has its logits scaled by gamma = tau / S:
rows of W_q and W_k by sqrt(gamma). Where several query heads share a key head, the key's rows shrink for the head that
needs it most, and each query head makes up the difference, so that every head's logits still scale by its own gamma.

Shape suffixes: B batch, L queries, K keys, N query heads, G key heads, H head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_dmuon.matrices import canonical_name
from torchtitan_dmuon.runtime.owned import OwnedMatrices
from torchtitan_dmuon.runtime.unit import Unit
from torchtitan_dmuon.titan.config import ConfigError

CHUNK = 256  # queries whose logits exist at a time


def attention_layers(model: nn.Module, owned: Collection[str]) -> dict[str, Any]:
    """Attention modules by canonical name. Raises ConfigError unless QK-clip fits all of them.

    It needs grouped-query attention of TorchTitan 0.3.0 without normalized queries and without biases, computed by SDPA
    or flex attention, and projections among the ``owned`` parameters.
    """
    from torchtitan.models.common.attention import (
        BaseAttention,
        FlexAttention,
        GQAttention,
        ScaledDotProductAttention,
    )

    def refuse(name: str, why: str) -> ConfigError:
        return ConfigError(f"qk_clip: {name} {why}; leave qk_clip out", "dmuon.qk_clip")

    layers: dict[str, Any] = {}
    for path, module in model.named_modules():
        name = canonical_name(path)
        if not isinstance(module, BaseAttention):
            continue
        if not isinstance(module, GQAttention):
            raise refuse(name, f"is {type(module).__qualname__}, whose query and key rows are not known")
        if module.q_norm is not None:
            raise refuse(name, "normalizes queries and keys, so the scale of their weights does not reach the logits")
        if not isinstance(module.inner_attention, (ScaledDotProductAttention, FlexAttention)):
            raise refuse(name, f"computes {type(module.inner_attention).__qualname__}, whose mask is not known")
        for weight in _projections(module):
            full = f"{name}.qkv_linear.{weight}"
            if getattr(module.qkv_linear, weight).bias is not None:
                raise refuse(f"{full}.bias", "adds to the logits what is not DMuon's to scale")
            if f"{full}.weight" not in owned:
                raise refuse(f"{full}.weight", "is not given to DMuon")
        layers[name] = module
    if not layers:
        raise ConfigError("qk_clip: the model has no attention layer; leave qk_clip out", "dmuon.qk_clip")
    return layers


def _projections(attention: Any) -> tuple[str, ...]:
    return ("wqkv",) if hasattr(attention.qkv_linear, "wqkv") else ("wq", "wk")


class QkClip:
    """Watches the attention layers of ``model`` and scales their projections after each step of the owned optimizer."""

    def __init__(self, model: nn.Module, owned: OwnedMatrices, tau: float) -> None:
        self.layers = attention_layers(model, owned.names)
        self.tau, self.owned = tau, owned
        heads = max(layer.n_heads for layer in self.layers.values())
        self.largest = torch.full((len(self.layers), heads), -math.inf, device=owned.engine.device)
        self.factors: dict[str, torch.Tensor] = {}  # parameter name -> factor of each row [M]
        for index, layer in enumerate(self.layers.values()):
            layer.inner_attention.register_forward_pre_hook(self._hook(index), with_kwargs=True)

    def _hook(self, index: int) -> Any:
        @torch.no_grad()
        def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not module.training:
                return
            mask = getattr(kwargs.get("attention_masks"), "mask_mod", None)
            logits_N = largest_logits(args[0], args[1], kwargs.get("scale"), mask, kwargs.get("is_causal", True))
            row = self.largest[index, : len(logits_N)]
            # One that overflowed says nothing about how far to shrink; its gradients are not finite either.
            torch.maximum(row, logits_N.masked_fill(~logits_N.isfinite(), -math.inf), out=row)

        return watch

    def forget(self) -> None:
        """In place of :meth:`collect` when a step is skipped: what its forwards saw shrinks nothing later."""
        self.largest.fill_(-math.inf)

    def collect(self) -> None:
        """Before the update: the largest logits of all ranks since the last call, as factors. A collective."""
        self.owned.engine.control.all_reduce(self.largest, dist.ReduceOp.MAX)
        gamma = (self.tau / self.largest.clamp(min=self.tau)).cpu()
        self.factors = {}
        for (name, layer), gamma_N in zip(self.layers.items(), gamma):
            for weight, factor_M in row_factors(layer, gamma_N).items():
                self.factors[f"{name}.qkv_linear.{weight}.weight"] = factor_M.to(self.largest.device)
        self.forget()

    @torch.no_grad()
    def apply(self, unit: Unit) -> None:
        """After the update of a unit: scale the rows of its projections that this rank owns."""
        for param in unit.params:
            factor_M = self.factors.get(param.name)
            master = unit.master_of.get(param.pieces[0].key)
            if factor_M is not None and master is not None:
                master.mul_(factor_M[:, None])


def largest_logits(
    q_BLNH: torch.Tensor, k_BKGH: torch.Tensor, scale: float | None, mask_mod: Any = None, causal: bool = True
) -> torch.Tensor:
    """The largest scaled q . k of each query head over the pairs that attend, float32 [N]; -inf where none does.

    ``mask_mod`` is a flex attention mask alike for all heads; without one pairs are causal, or all.
    """
    batch, length, heads, dim = q_BLNH.shape
    groups = k_BKGH.shape[2]
    scale = dim**-0.5 if scale is None else scale
    k_BGHK = k_BKGH.permute(0, 2, 3, 1)
    q_BGRLH = q_BLNH.unflatten(2, (groups, heads // groups)).permute(0, 2, 3, 1, 4)
    keys = torch.arange(k_BKGH.shape[1], device=q_BLNH.device)
    rows = torch.arange(batch, device=q_BLNH.device)[:, None, None]
    largest_N = torch.full((heads,), -math.inf, device=q_BLNH.device)
    for start in range(0, length, CHUNK):
        some = q_BGRLH[:, :, :, start : start + CHUNK]
        queries = torch.arange(start, start + some.shape[3], device=q_BLNH.device)[:, None]
        scores = (some.flatten(2, 3) @ k_BGHK).unflatten(2, some.shape[2:4]).float() * scale
        if mask_mod is not None:
            allowed = mask_mod(rows, torch.zeros_like(rows), queries, keys)
            scores = scores.masked_fill(~allowed.expand(batch, -1, -1)[:, None, None], -math.inf)
        elif causal:
            scores = scores.masked_fill(queries < keys, -math.inf)
        largest_N = torch.maximum(largest_N, scores.amax(dim=(0, 3, 4)).flatten())
    return largest_N


def row_factors(attention: Any, gamma_N: torch.Tensor) -> dict[str, torch.Tensor]:
    """Projection -> what each of its rows is multiplied by [M], for gammas in (0, 1] of the query heads."""
    dim, groups = attention.head_dim, attention.n_kv_heads
    gamma_GR = gamma_N[: attention.n_heads].view(groups, -1)
    key_G1 = gamma_GR.amin(dim=1, keepdim=True).sqrt()
    query_GR = gamma_GR / key_G1
    if _projections(attention) == ("wqkv",):
        blocks = torch.cat((query_GR, key_G1, torch.ones_like(key_G1)), dim=1)
        return {"wqkv": blocks.flatten().repeat_interleave(dim)}
    return {"wq": query_GR.flatten().repeat_interleave(dim), "wk": key_G1.flatten().repeat_interleave(dim)}
