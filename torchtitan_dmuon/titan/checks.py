"""Whether a config can run: checked before any process group exists, while one clear error can still be given.

Decides: what DMuon refuses or switches off, that the mesh fits the world, that optimizer arguments are accepted and
that every pattern finds parameters. Does not parse (`toml_config.py`) nor adapt to the machine (`platform.py`). Keeps:
an error is a ConfigError with the dotted key it is about.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchtitan_dmuon.costs import CostModel
from torchtitan_dmuon.matrices import canonical_name
from torchtitan_dmuon.muon import execution_of, settings_of
from torchtitan_dmuon.newton_schulz import compute_dtype
from torchtitan_dmuon.titan import dist_muon, ranges
from torchtitan_dmuon.titan.config import (
    Assignment,
    ConfigError,
    DMuonConfig,
    assign_parameters,
    optimizer_names,
    owned_group,
    uses_dmuon,
)
from torchtitan_dmuon.titan.names import (
    LAYOUT_OPTIONS,
    OWNED_PREFIX,
    arguments,
    has_layouts,
    is_muon,
    is_owned,
    optimizer_class,
    optimizer_classes,
    probe,
    rule_kwargs,
    separated,
    takes_matrices,
)
from torchtitan_dmuon.titan.tables import mentioned, nearest, noun, shown

# Parallelism that DMuon does not support yet: config key -> what to say.
_REFUSED_AXES = {
    "tensor_parallel_degree": "tensor parallelism",
    "pipeline_parallel_degree": "pipeline parallelism",
    "context_parallel_degree": "context parallelism",
    "expert_parallel_degree": "expert parallelism",
}


def check_run(config: Any, world_size: int | None) -> Assignment | None:
    """Raise :class:`ConfigError` if the Trainer.Config cannot run; return which parameters each group takes.

    ``world_size`` None skips what depends on it. The model is built on the meta device only.
    """
    if world_size is None:
        check_values(config)
    else:
        check_mesh(config, world_size)
    check_dmuon(config)
    check_optimizers(config)
    dist_muon.check(config, world_size)
    if config.model_spec is None:
        return None
    from torchtitan_dmuon.titan.models import has_heads

    model = meta_model(config)
    shapes = {canonical_name(n): tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    groups = [(group.pattern, group.optimizer_name) for group in config.optimizer.param_groups]
    assignment = assign_parameters(shapes, groups)
    for index, (names, (_, optimizer_name)) in enumerate(zip(assignment.groups, groups, strict=True)):
        if takes_matrices(optimizer_name) and not (optimizer_name == "DistMuon" and dist_muon.brings_arguments(config)):
            path = f"optimizer.param_groups.{index}"
            _check_matrices(model, names, optimizer_name, f"{path}.pattern")
            if config.optimizer.param_groups[index].optimizer_kwargs.get("per_head") and not has_heads(model, names):
                raise ConfigError(
                    f"per_head = true: none of the {len(names)} parameters of this group ({names[0]}, ...) is a query, "
                    "key or value projection whose heads are known; leave it out, or widen the pattern",
                    f"{path}.optimizer_kwargs.per_head",
                )
    if getattr(config, "dmuon", None) is not None and config.dmuon.qk_clip:
        from torchtitan_dmuon.titan.qk_clip import attention_layers

        owned = {n for names, (_, name) in zip(assignment.groups, groups) if is_owned(name) for n in names}
        attention_layers(model, owned)
        if config.compile.enable and "model" in config.compile.components:
            raise ConfigError("qk_clip: not tested with a compiled model; set compile.enable = false", "dmuon.qk_clip")
    return assignment


def settle(config: Any) -> list[str]:
    """Switch off what DMuon cannot have, in place. Returns one line for each setting changed."""
    if not uses_dmuon(config) or config.training.disable_cuda_graphs:
        return []
    config.training.disable_cuda_graphs = True
    reason = "DMuon gathers and reduces from module hooks, which a replayed graph skips"
    return [f"training.disable_cuda_graphs -> true ({reason})"]


def without_effect(config: Any) -> str:
    """A line to log when the [dmuon] table says something that no group follows; "" when there is nothing to say."""
    followed = {"on_optimizer_change": config.dmuon.on_optimizer_change}  # by all optimizers
    if uses_dmuon(config) or config.dmuon == DMuonConfig(**followed):
        return ""
    return f'[dmuon] has no effect: no group has optimizer_name = "DMuon" or "{OWNED_PREFIX}..."'


def check_values(config: Any) -> None:
    """Each value by itself, then those that go together."""
    ranges.check(config)
    training, profiler = config.training, config.profiler
    if not config.optimizer.param_groups:
        raise ConfigError("param_groups = []: expected at least one group", "optimizer.param_groups")
    chunks = getattr(config.loss, "num_chunks", 1)
    if (training.seq_len // config.parallelism.context_parallel_degree) % chunks:
        message = f"seq_len = {training.seq_len}: must be a multiple of loss.num_chunks = {chunks} (on each rank)"
        raise ConfigError(message, "training.seq_len")
    total = config.lr_scheduler.total_steps
    if total is not None and total < training.steps:
        message = (
            f"total_steps = {total}: must be at least training.steps = {training.steps}, beyond which no rate is known"
        )
        raise ConfigError(message, "lr_scheduler.total_steps")
    checkpointing = config.activation_checkpoint
    if getattr(checkpointing, "debug", False) and hasattr(checkpointing, "force_recompute_mm_shapes_by_fqns"):
        message = 'debug = true: not with selective checkpointing; set type = "full"'
        raise ConfigError(message, "activation_checkpoint.debug")
    cycle = profiler.profiler_warmup + profiler.profiler_active
    if profiler.enable_profiling and profiler.profile_freq < cycle:
        raise ConfigError(
            f"profile_freq = {profiler.profile_freq}: must be at least profiler_warmup + profiler_active = {cycle}",
            "profiler.profile_freq",
        )
    if config.compile.enable:
        backends = torch.compiler.list_backends(exclude_tags=())
        if config.compile.backend not in backends:
            raise ConfigError(
                f"backend = {config.compile.backend!r}: no backend of torch.compile."
                f"{nearest(config.compile.backend, backends)}",
                "compile.backend",
            )


def check_mesh(config: Any, world_size: int) -> None:
    """The values, and that the product of the degrees is the world size, and the global batch a multiple of one
    micro-batch of it."""
    check_values(config)
    mesh = config.parallelism
    others = mesh.context_parallel_degree * mesh.tensor_parallel_degree * mesh.pipeline_parallel_degree
    replicate, shard = mesh.data_parallel_replicate_degree, mesh.data_parallel_shard_degree
    if shard == -1:
        shard = max(1, world_size // (replicate * others))
    if replicate * shard * others != world_size:
        rest = f" x {others} (context, tensor, pipeline)" if others > 1 else ""
        copies, over = divmod(world_size, shard * others)
        hint = "" if over else f"; with these shards: --parallelism.data_parallel_replicate_degree {copies}"
        raise ConfigError(
            f"the mesh of data_parallel_replicate_degree {replicate} x data_parallel_shard_degree {shard}{rest} has "
            f"{replicate * shard * others} ranks, but the world has {world_size}{hint}",
            "parallelism.data_parallel_replicate_degree"
            if mesh.data_parallel_shard_degree == -1
            else "parallelism.data_parallel_shard_degree",
        )
    total, step = config.training.global_batch_size, config.training.local_batch_size * replicate * shard
    if total > 0 and total % step:
        raise ConfigError(
            f"global_batch_size = {total}: must be a multiple of local_batch_size x data-parallel ranks = {step}",
            "training.global_batch_size",
        )
    if config.checkpoint.create_seed_checkpoint and world_size != 1:
        message = f"create_seed_checkpoint = true: one process makes it, but there are {world_size}"
        raise ConfigError(message, "checkpoint.create_seed_checkpoint")
    if config.validator.enable and config.validator.steps == -1 and replicate * shard > 1:
        raise ConfigError(
            f"steps = -1: the {replicate * shard} data-parallel ranks have unequal shares of the set, and would wait "
            "for each other for ever; give a number of batches",
            "validator.steps",
        )


def check_dmuon(config: Any) -> None:
    """What cannot be combined with owned matrices."""
    if not uses_dmuon(config):
        return
    first = owned_group(config).optimizer_name
    for index, name in enumerate(optimizer_names(config)):
        if is_owned(name) and name != first:
            raise ConfigError(
                f"one optimizer updates all owned matrices: {first!r} in an earlier group, {name!r} in this one; use "
                "one of them in both",
                f"optimizer.param_groups.{index}.optimizer_name",
            )
    check_axes(config)
    if config.dmuon.cost_file:
        try:
            CostModel.from_file(config.dmuon.cost_file)
        except (OSError, ValueError) as error:
            said = getattr(error, "strerror", None) or error
            raise ConfigError(f"cost_file = {shown(config.dmuon.cost_file)}: {said}", "dmuon.cost_file") from None
    if config.parallelism.spmd_backend == "full_dtensor":
        raise ConfigError(
            'spmd_backend = "full_dtensor": DMuon gathers plain weights, which that backend cannot mix with its '
            'DTensor inputs; use "spmd_types" or "partial_dtensor"',
            "parallelism.spmd_backend",
        )
    if config.training.enable_cpu_offload:
        raise ConfigError("DMuon does not support FSDP's CPU offload", "training.enable_cpu_offload")
    if config.training.dtype != "float32":
        raise ConfigError(
            f"dtype = {config.training.dtype!r}: DMuon keeps fp32 masters; for bf16 compute set mixed_precision_param",
            "training.dtype",
        )
    if config.debug.spmd_typechecking:
        raise ConfigError("DMuon's parameters carry no SPMD types; set it to false", "debug.spmd_typechecking")


def check_axes(config: Any) -> None:
    """Parallelism that owned matrices cannot have yet."""
    for name, what in _REFUSED_AXES.items() if uses_dmuon(config) else ():
        if getattr(config.parallelism, name) > 1:
            raise ConfigError(
                f"{name} = {getattr(config.parallelism, name)}: DMuon does not support {what} yet; set it to 1, or use "
                "AdamW or GatherMuon",
                f"parallelism.{name}",
            )


def check_optimizers(config: Any) -> None:
    """Each group's optimizer exists and takes its arguments; groups of one optimizer agree on what it keeps once."""
    groups: dict[str, dict[int, dict[str, Any]]] = {}
    for index, group in enumerate(config.optimizer.param_groups):
        check_optimizer_kwargs(group.optimizer_name, group.optimizer_kwargs, f"optimizer.param_groups.{index}")
        groups.setdefault(group.optimizer_name, {})[index] = group.optimizer_kwargs
    for name in filter(takes_matrices, groups):
        if name == "DistMuon":  # one group, which `dist_muon.check` sees to
            continue
        try:
            separated(optimizer_class(name), [rule_kwargs(group) for group in groups[name].values()])
        except ValueError as error:
            path = f"optimizer.param_groups.{max(groups[name])}.optimizer_kwargs"
            raise ConfigError(str(error), path) from None


def check_optimizer_kwargs(name: str, kwargs: dict[str, Any], path: str) -> None:
    """Names and types against the optimizer's signature, values by constructing it over a small parameter."""
    from torchtitan_dmuon.titan.platform import on_cpu

    if name == "DistMuon":  # not made here: `dist_muon.py` makes its arguments without a default from the model
        from torchtitan.distributed.flex_shard.dist_muon import DistMuon

        legal = {key: p for key, p in arguments(DistMuon)[0].items() if p.default is not p.empty}
        legal |= {key: p for key, p in arguments(torch.optim.AdamW)[0].items() if key in ("fused", "foreach")}
        _check_arguments(name, kwargs, legal, False, f"{path}.optimizer_kwargs")
        return
    try:
        cls = optimizer_class(name)
    except KeyError:
        known = nearest(name, [*optimizer_classes(), "DistMuon"])
        message = f'unknown optimizer {name!r}.{known} Others that take whole matrices: "{OWNED_PREFIX}package.Class".'
        raise ConfigError(message, f"{path}.optimizer_name") from None
    except ValueError as error:
        raise ConfigError(str(error), f"{path}.optimizer_name") from None
    name = name.removeprefix(OWNED_PREFIX)
    path = f"{path}.optimizer_kwargs"
    legal, takes_others = arguments(cls)
    ours = is_muon(name)
    _check_arguments(name, kwargs, legal, takes_others, path)
    try:
        rule = rule_kwargs(kwargs) if ours else kwargs
        made = probe(cls, **rule)
        if ours:
            device_type = "cpu" if on_cpu() else "cuda"
            compute_dtype(settings_of(made.param_groups[0]), device_type)
            execution_of(made.param_groups[0]).check(device_type)
        elif on_cpu():
            _step(made)
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        parts = {key.removeprefix("ns_"): key for key in kwargs}  # as the Newton-Schulz settings call them
        culprit = mentioned(str(error), kwargs) or parts.get(mentioned(str(error), parts), "")
        raise ConfigError(f"{name}: {error}", f"{path}.{culprit}".rstrip(".")) from None
    ignored = next((key for key in rule if key not in legal and key not in made.defaults), None)
    if ignored is not None:
        raise ConfigError(f"{name} has no argument {ignored!r}.{nearest(ignored, legal)}", f"{path}.{ignored}")


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Some arguments are refused by the first step alone."""
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.zeros_like(param)
    optimizer.step(lambda: torch.zeros(()))


def _check_arguments(
    name: str, kwargs: Mapping[str, Any], legal: Mapping[str, inspect.Parameter], takes_others: bool, path: str
) -> None:
    """Names and types, as far as ``legal`` and its defaults tell."""
    for key, value in kwargs.items():
        if has_layouts(name) and key in LAYOUT_OPTIONS:
            if not isinstance(value, bool):
                raise ConfigError(f"{key} = {value!r}: expected true or false, found {noun(value)}", f"{path}.{key}")
            continue
        if key not in legal:
            if takes_others:
                continue  # the caller sees whether the optimizer keeps it
            raise ConfigError(f"{name} has no argument {key!r}.{nearest(key, legal)}", f"{path}.{key}")
        expected = _misfit(legal[key], value)
        if expected:
            raise ConfigError(f"{key} = {value!r}: expected {expected}, found {noun(value)}", f"{path}.{key}")


def _misfit(argument: inspect.Parameter, value: Any) -> str:
    """What an argument's default asks for when ``value`` is not that; "" when it fits or the default does not tell.

    An integer default asks for an integer only where the annotation says so: torch writes ``weight_decay: float = 0``.
    """
    default = argument.default
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if argument.annotation in (int, "int"):
        return "" if type(value) is int else "an integer"
    if isinstance(default, (int, float)):
        return "" if type(value) in (int, float) else "a number"
    if isinstance(default, tuple):
        fits = isinstance(value, (tuple, list)) and len(value) == len(default)
        fits = fits and all(type(v) in (int, float) or v is d for v, d in zip(value, default))
        return "" if fits else f"an array of {len(default)} numbers"
    if isinstance(default, str):
        return "" if isinstance(value, (str, tuple, list)) else "a string"
    return ""


def meta_model(config: Any) -> torch.nn.Module:
    """The model of this config on the meta device, the config's own model left untouched."""
    model_config = copy.deepcopy(config.model_spec.model)
    try:
        model_config.update_from_config(config=config)
        with torch.device("meta"):
            return model_config.build()
    except Exception as error:  # also what a model needs and this machine lacks
        said = " ".join(str(error).split())
        raise ConfigError(f"the model cannot be built with these settings: {said}", "job.config") from None


def _check_matrices(model: torch.nn.Module, names: Sequence[str], optimizer_name: str, path: str) -> None:
    from torchtitan_dmuon.titan.models import owned_specs

    try:
        specs = owned_specs(model, names)
    except ConfigError as error:
        raise ConfigError(str(error), path) from None
    deep = next((spec for spec in specs if len(spec.shape) > 2), None)
    if deep is not None and optimizer_name in ("GatherMuon", "DistMuon"):
        what = "a convolution" if deep.flatten else "a stack"
        raise ConfigError(f"{deep.name} {list(deep.shape)} is {what}; {optimizer_name} takes 2-D parameters only", path)
