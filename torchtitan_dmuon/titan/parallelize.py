"""Owned matrices in a TorchTitan model: wraps a ModelSpec's parallelize function.

Decides: how a Trainer.Config's optimizer groups and [dmuon] table become a call of `own_matrices`. Does not decide what
TorchTitan shards; FSDP2 only leaves the owned parameters alone.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from torchtitan_dmuon.costs import CostModel
from torchtitan_dmuon.matrices import canonical_name
from torchtitan_dmuon.muon import Muon, settings_of
from torchtitan_dmuon.newton_schulz import flops
from torchtitan_dmuon.runtime.owned import OwnedMatrices, own_matrices
from torchtitan_dmuon.runtime.rank_grid import RankGrid
from torchtitan_dmuon.titan import seams
from torchtitan_dmuon.titan.config import DMuonConfig, owned_group
from torchtitan_dmuon.titan.initialization import draw_rows
from torchtitan_dmuon.titan.models import dmuon_specs, has_init
from torchtitan_dmuon.titan.names import probe, rule_kwargs

_ATTRIBUTE = "_dmuon_owned"  # where the optimizer container, which is built from the model alone, finds it


def owned_of(model: nn.Module) -> OwnedMatrices | None:
    """The owned matrices of a parallelized model, or None if it has none."""
    return model.__dict__.get(_ATTRIBUTE, (None, None))[0]


def dmuon_config_of(model: nn.Module) -> DMuonConfig | None:
    """The [dmuon] table that a model with owned matrices was parallelized by."""
    return model.__dict__.get(_ATTRIBUTE, (None, None))[1]


def with_owned_matrices(spec: Any, config: Any) -> Any:
    """A ModelSpec whose models have one owner for each matrix that ``config`` gives to owners."""
    parallelize = spec.parallelize_fn

    @functools.wraps(parallelize)
    def wrapped(model: nn.Module, *, parallel_dims: Any, **kwargs: Any) -> nn.Module:
        specs = dmuon_specs(config, model)
        wanted = {s.name for s in specs}

        def owned_parameters() -> list[nn.Parameter]:
            return [p for n, p in model.named_parameters() if canonical_name(n) in wanted]

        with seams.fsdp_ignoring(owned_parameters) as sharded:
            model = parallelize(model, parallel_dims=parallel_dims, **kwargs)
        order = {module: i for i, module in enumerate(model.modules())}
        owned = own_matrices(
            model,
            _grid(parallel_dims),
            select=specs,
            units=sorted((m for m in dict.fromkeys(sharded) if m is not model), key=order.__getitem__),
            **_options(config, kwargs["training"], kwargs["parallelism"]),
        )
        _route_init(owned, torch.initial_seed())
        model.__dict__[_ATTRIBUTE] = (owned, config.dmuon)
        return model

    return dataclasses.replace(spec, parallelize_fn=wrapped)


def _grid(parallel_dims: Any) -> RankGrid:
    from torchtitan.tools import utils

    world = parallel_dims.world_size
    groups = (dist.group.WORLD,) if world > 1 else ()
    return RankGrid(tuple(range(world)), parallel_dims.dp_shard, utils.device_type, groups)


def _options(config: Any, training: Any, parallelism: Any) -> dict[str, Any]:
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy
    from torchtitan.tools import utils

    dmuon: DMuonConfig = config.dmuon
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[dmuon.grad_reduce_dtype],
    )
    return {
        "mp_policy": policy,
        "reshard_after_forward": get_fsdp_reshard_after_forward_policy(
            parallelism.fsdp_reshard_after_forward, pp_enabled=False
        ),
        "gradient_divide_factor": 1.0,  # TorchTitan divides the loss by the global token count instead
        "ownership": dmuon.ownership,
        "balance": dmuon.balance,
        "cost": cost_model(config, utils.device_type),
        "routing": dmuon.routing,
        "holders": dmuon.holders,
        "publish": dmuon.publish,
        "prefetch": dmuon.prefetch,
        "clip": dmuon.clip,
        "ranks_per_node": dmuon.ranks_per_node,
        "device": utils.get_local_device(),
        "timeout": datetime.timedelta(seconds=config.comm.init_timeout_seconds),
    }


def cost_model(config: Any, device_type: str) -> CostModel:
    """FLOPs of the Newton-Schulz that the first DMuon group runs, or measured seconds. Other optimizers are taken to
    cost the same for every element."""
    if config.dmuon.cost_file:
        return CostModel.from_file(config.dmuon.cost_file)
    group = owned_group(config)
    if group.optimizer_name != "DMuon":
        return CostModel(flops=lambda m, n: 0)
    settings = settings_of(probe(Muon, **rule_kwargs(group.optimizer_kwargs)).param_groups[0])
    return CostModel(flops=functools.partial(flops, settings=settings, device_type=device_type))


def with_measured_forms(rule: dict[str, Any], cost_file: str) -> dict[str, Any]:
    """Arguments of Muon, with ``ns_form`` "auto" replaced by what ``cost_file`` measured, if it has forms."""
    forms = CostModel.from_file(cost_file).forms if cost_file else {}
    return {**rule, "ns_form": forms} if forms and rule.get("ns_form", "auto") == "auto" else rule


def _route_init(owned: OwnedMatrices, seed: int) -> None:
    """Owned parameters are drawn on their owners, by their own init functions, wherever `init_states` runs."""
    for param in owned.owned_parameters():
        module, attribute = param.slots[0]
        if not has_init(module, attribute):
            raise RuntimeError(f"{param.name}: {type(module).__qualname__} has no init function for it")
        table: Any = module._param_init
        init = getattr(table[attribute], "original", table[attribute])

        def place(_placeholder: torch.Tensor, param: Any = param, init: Any = init) -> None:
            owned.fill(
                param.name,
                lambda piece: draw_rows(
                    init,
                    param.name,
                    seed,
                    param.spec.shape,
                    piece.start,
                    piece.stop,
                    dtype=torch.float32,
                    device=owned.engine.device,
                ),
            )

        module._param_init = {**table, attribute: place}
