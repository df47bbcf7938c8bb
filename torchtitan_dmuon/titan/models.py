"""Which parameters of TorchTitan's models are matrices or ride with them, and how fused ones fall apart.

Decides by the module that holds a parameter, never by guessing from its shape. Keeps: what is not known to be a matrix
is refused, naming it. Read in torchtitan 0.3.0.

    gated query   qwen3_5's wq: per head its query rows, then the rows of its output gate
    fused QKV     rows view as (n_kv, heads_per_kv + 2, head_dim): per group its query heads, then its key, its value
    experts       [E, M, N], one matrix per expert; gpt_oss interleaves gate and linear rows one by one
    convolutions  [out, in, k, ...] as [out, in * k * ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from torchtitan_dmuon.matrices import WHOLE, MatrixLayout, OwnedSpec, canonical_name, is_convolution
from torchtitan_dmuon.runtime.selection import parameter_slots, select_riders
from torchtitan_dmuon.titan.config import ConfigError, assign_parameters
from torchtitan_dmuon.titan.names import is_owned


def owned_specs(model: nn.Module, names: Iterable[str], per_head: Iterable[str] = ()) -> list[OwnedSpec]:
    """The specs of these canonical parameter names, in the model's order. ConfigError names the first non-matrix.

    Projections among ``per_head`` fall apart into their attention heads; other parameters are not changed by it.
    """
    wanted, per_head = set(names), set(per_head)
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    specs = []
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            name = canonical_name(f"{path}.{attribute}" if path else attribute)
            if parameter is None or name not in wanted:
                continue
            wanted.discard(name)  # a tied weight counts once
            if module is getattr(model, "lm_head", None):
                raise _refusal(name, tuple(parameter.shape), "the output head")
            shape = tuple(parameter.shape)
            layout = head_layout(parents.get(module), path.rpartition(".")[2], shape) if name in per_head else None
            layout = layout or _layout(parents.get(module), module, attribute, name, shape)
            specs.append(OwnedSpec(name, shape, layout, flatten=is_convolution(module)))
    if wanted:
        raise ConfigError(f"{min(wanted)}: the model has no such parameter", "optimizer.param_groups")
    return specs


def dmuon_specs(config: Any, model: nn.Module) -> list[OwnedSpec]:
    """The specs of what a Trainer.Config's groups give to owners, and of the riders: the rule of training and of plans.
    ``model`` is not parallelized yet."""
    shapes = {canonical_name(n): tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    groups = config.optimizer.param_groups
    taken = assign_parameters(shapes, [(g.pattern, g.optimizer_name) for g in groups]).groups
    names: dict[str, list[str]] = {}
    for group, mine in zip(groups, taken, strict=True):
        names.setdefault(group.optimizer_name, []).extend(mine)
    by_head = [n for group, mine in zip(groups, taken) if group.optimizer_kwargs.get("per_head") for n in mine]
    specs = owned_specs(model, [n for optimizer, mine in names.items() if is_owned(optimizer) for n in mine], by_head)
    if not config.dmuon.riders:
        return specs
    slots = parameter_slots(model)
    # Small parameters that AdamW updates and that have an init function of their own, to be drawn on their owner.
    small = {n for n in names.get("AdamW", []) if len(shapes[n]) < 2 and has_init(*slots[n][0])}
    units = list(sharded_modules(model).values())
    return specs + select_riders(model, slots, specs, units, lambda name, _parameter: name in small)


def head_layout(parent: nn.Module | None, attribute: str, shape: tuple[int, ...]) -> MatrixLayout | None:
    """One matrix per head for a projection [heads * head_dim, dim] under this name in this module; None where heads are
    not known."""
    from torchtitan.models.common.attention import BaseQKVLinear

    if not isinstance(parent, BaseQKVLinear) and (attribute not in ("wq", "wk", "wv") or not _has_gated_query(parent)):
        return None
    assert parent is not None
    return MatrixLayout(rows=(parent.head_dim,) * (shape[0] // parent.head_dim))


def has_heads(model: nn.Module, names: Iterable[str]) -> bool:
    """Whether "per_head" would change any of these parameters."""
    names = list(names)
    return owned_specs(model, names) != owned_specs(model, names, names)


def sharded_modules(model: nn.Module) -> dict[str, nn.Module]:
    """What TorchTitan's decoders give to `fully_shard`, by name, in forward order: the embedding and each block."""
    found = {}
    for name, child in model.named_children():
        if name == "layers":
            found.update({f"{name}.{key}": block for key, block in child.named_children()})
        elif name not in ("norm", "lm_head"):  # these two form one group, after the blocks
            found[name] = child
    return found


def has_init(module: nn.Module, attribute: str) -> bool:
    """Whether the module has an init function for this parameter of its own."""
    from torchtitan.models.common.param_init import skip_param_init

    table = getattr(module, "_param_init", None) or {}
    return table.get(attribute) not in (None, skip_param_init)


def _has_gated_query(parent: Any) -> bool:
    """Whether the module is qwen3_5's attention, whose own imports are not everywhere."""
    model = sys.modules.get("torchtitan.models.qwen3_5.model")
    return model is not None and isinstance(parent, model.Qwen35Attention)


def _layout(parent: Any, module: nn.Module, attribute: str, name: str, shape: tuple[int, ...]) -> MatrixLayout:
    from torchtitan.models.common.attention import FusedQKVLinear
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    if isinstance(module, GroupedExperts) and len(shape) == 3:
        interleaved = isinstance(module, GptOssGroupedExperts) and attribute == "mlp1_weight_EGD"
        return MatrixLayout(groups=shape[1] // 2, rows=(1, 1)) if interleaved else WHOLE
    if isinstance(module, nn.Linear) and attribute == "weight":
        if isinstance(parent, FusedQKVLinear):
            rows = (parent.heads_per_kv * parent.head_dim, parent.head_dim, parent.head_dim)
            return MatrixLayout(groups=shape[0] // sum(rows), rows=rows)
        if _has_gated_query(parent) and module is parent.wq:
            return MatrixLayout(groups=parent.n_heads, rows=(parent.head_dim, parent.head_dim))
        return WHOLE
    if is_convolution(module) and attribute == "weight":
        return WHOLE
    if isinstance(module, nn.Embedding):
        raise _refusal(name, shape, "an embedding")
    raise _refusal(name, shape, f"a parameter of {type(module).__qualname__}, which is not known to be a matrix")


def _refusal(name: str, shape: tuple[int, ...], what: str) -> ConfigError:
    return ConfigError(
        f"{name} {list(shape)} is {what}: no matrix for DMuon or GatherMuon. Narrow the pattern, or let an AdamW group "
        "before it take the parameter",
        "optimizer.param_groups",
    )
