"""From a Trainer.Config to the plan of a world that need not exist: no weights and no process group.

Decides: the mesh where the file's is for another world, and what a configuration without owned matrices is planned as.
Does not decide anything about owners, routes or bytes: specs, costs, assignment, topology and layouts are those of
training, and `footprint.py` weighs them. Keeps: for a configuration that trains on this world, the plan is the trained
one, digest and all (invariant 6).
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchtitan_dmuon.footprint import Footprint, Group, Options, footprint, lay_out, should_defer
from torchtitan_dmuon.matrices import OwnedSpec, canonical_name
from torchtitan_dmuon.muon import settings_of
from torchtitan_dmuon.newton_schulz import NewtonSchulz, flops
from torchtitan_dmuon.ownership import MeshSpec, OwnershipPlan, assign
from torchtitan_dmuon.runtime.selection import group_units, parameter_slots
from torchtitan_dmuon.titan import checks, registry
from torchtitan_dmuon.titan.config import ConfigError, owned_group, uses_dmuon
from torchtitan_dmuon.titan.models import dmuon_specs, owned_specs, sharded_modules
from torchtitan_dmuon.titan.names import optimizer_class, rule_kwargs
from torchtitan_dmuon.titan.parallelize import cost_model, with_measured_forms
from torchtitan_dmuon.topology import Topology

STATE_PROBE = 64  # rows and columns of the matrix on which another optimizer's state is weighed
# What a configuration without a DMuon group is planned with.
RANKS_PER_NODE = 8
# Rows of scores stay with AdamW: routers, and the rates of each head of a linear attention (in_proj_a, in_proj_b).
DEFAULT_PATTERN = (
    r"^layers\.\d+\.(attention|attn|feed_forward|moe\.routed_experts|moe\.shared_experts)\.(?!in_proj_[ab]\.)"
)


@dataclasses.dataclass
class Planned:
    """A configuration on a world that need not exist: the plan, and everything it was derived from."""

    config: Any
    plan: OwnershipPlan
    topology: Topology
    groups: list[Group]
    options: Options
    footprint: Footprint
    assumed: list[str]
    model_flops_per_token: int = 0
    specs: list[OwnedSpec] = dataclasses.field(default_factory=list)

    def tokens_per_step(self) -> int:
        training = self.config.training
        return training.local_batch_size * training.seq_len * self.options.micro_batches * self.topology.world

    def ns_flops(self) -> list[int]:
        """Newton-Schulz FLOPs of each owner; none where the rule is not ours."""
        each = [0] * self.plan.n_owners
        if not self.options.is_muon:
            return each
        for piece, owner in zip(self.plan.pieces, self.plan.owners, strict=True):
            each[owner] += sum(
                flops(m, n, self.options.settings, self.options.device_type) for m, n in piece.matrices()
            )
        return each


# ---- from a configuration to a plan ----


def make_plan(
    config: Any,
    world: int,
    ranks_per_node: int = 0,
    device_type: str = "cuda",
    flavor: str = "",
    pattern: str = "",
    otherwise: int = RANKS_PER_NODE,
) -> Planned:
    """Plan ``config`` (changed in place) for ``world`` data-parallel ranks. Raises ConfigError as training does.

    Where the file's mesh is for another world, replicas are added or removed. ``flavor`` takes another size of the same
    model family. A configuration without a DMuon group is planned as if ``pattern`` were one's. ``otherwise``: the
    ranks per node where neither ``ranks_per_node`` nor the file says.
    """
    assumed: list[str] = []
    given = config.dmuon.ranks_per_node if hasattr(config, "dmuon") else 0
    per_node = min(ranks_per_node or given or otherwise, world)
    if flavor:
        registry.set_flavor(config, flavor, "--flavor")
    if uses_dmuon(config):
        if pattern:
            raise ValueError("--pattern is for configurations without a DMuon group; this one has its own")
    else:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"--pattern {pattern!r} is not a regular expression: {error}") from None
        said = pattern or DEFAULT_PATTERN
        config, left = _with_matrices(config, pattern)
        assumed.append(f"the configuration has no DMuon group: planned as if it took '{said}'{left}")
        for axis in ("tensor", "pipeline", "context", "expert"):
            key = f"{axis}_parallel_degree"
            if getattr(config.parallelism, key) != 1:
                assumed.append(f"parallelism.{key} {getattr(config.parallelism, key)} -> 1: not supported with DMuon")
                setattr(config.parallelism, key, 1)
    assumed += fit_mesh(config, world, per_node)
    checks.check_mesh(config, world)
    checks.check_dmuon(config)
    checks.check_optimizers(config)
    model = checks.meta_model(config)
    dmuon = config.dmuon
    specs = dmuon_specs(config, model)
    topology = Topology(
        world,
        config.parallelism.data_parallel_shard_degree,
        per_node,
        dmuon.routing,
        dmuon.holders,
        dmuon.ownership,
    )
    options = make_options(config, world, device_type)
    if not options.is_muon:
        assumed.append(
            f"{owned_group(config).optimizer_name}: its cost counts elements; its state is that of a "
            f"{STATE_PROBE} x {STATE_PROBE} matrix, {options.momentum_bytes} bytes an element"
        )
    slots = parameter_slots(model)
    chosen = {spec.name: slots[spec.name] for spec in specs}
    modules = sharded_modules(model)
    grouped, _ = group_units(model, list(modules.values()), chosen)
    by_name = {spec.name: spec for spec in specs}
    unit_of = {p.key: i for i, (_, names) in enumerate(grouped) for n in names for p in by_name[n].pieces()}
    plan = assign(
        [p for spec in specs for p in spec.pieces()],
        MeshSpec(world, topology.shard_size, per_node),
        balance=dmuon.balance,
        ownership=dmuon.ownership,
        cost=cost_model(config, device_type),
        unit_of=unit_of,
    )
    groups = lay_out(_groups(model, modules, grouped, by_name), topology, plan)
    if dmuon.defer_reduce == "auto":
        defer = should_defer(topology, groups, options)
        if options.micro_batches > 1:
            assumed.append(f"dmuon.defer_reduce auto -> {str(defer).lower()}")
    else:
        defer = bool(dmuon.defer_reduce)
    options = dataclasses.replace(options, defer_reduce=defer)
    weighed = footprint(topology, groups, options)
    flops_per_token = config.model_spec.model.get_nparams_and_flops(model, config.training.seq_len)[1]
    return Planned(config, plan, topology, groups, options, weighed, assumed, flops_per_token, specs)


def fit_mesh(config: Any, world: int, ranks_per_node: int) -> list[str]:
    """Degrees whose product is ``world``, in place: the file's shards with other replicas. Returns what changed.

    Raises ConfigError where the shards do not divide the world.
    """
    mesh = config.parallelism
    others = mesh.tensor_parallel_degree * mesh.pipeline_parallel_degree * mesh.context_parallel_degree
    replicate, shard = mesh.data_parallel_replicate_degree, mesh.data_parallel_shard_degree
    if shard == -1 and replicate > 0 and world % (replicate * others) == 0:
        mesh.data_parallel_shard_degree = world // (replicate * others)
        return []
    if replicate * shard * others == world:
        return []
    fitted = min(shard if shard > 0 else ranks_per_node, world)
    if world % fitted:
        raise ConfigError(
            f"{world} ranks are no multiple of {fitted} shards: give --parallelism.data_parallel_shard_degree and "
            "--parallelism.data_parallel_replicate_degree",
            "parallelism.data_parallel_shard_degree",
        )
    mesh.data_parallel_shard_degree, mesh.data_parallel_replicate_degree = fitted, world // fitted
    changed = [f"mesh {replicate} x {shard} -> {world // fitted} x {fitted} (replicas x shards) for {world} ranks"]
    step = config.training.local_batch_size * world
    if config.training.global_batch_size > 0 and config.training.global_batch_size % step:
        changed.append(f"training.global_batch_size {config.training.global_batch_size} -> {step}")
        config.training.global_batch_size = step
    return changed


def make_options(config: Any, world: int, device_type: str) -> Options:
    """What decides bytes, read from a Trainer.Config."""
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy

    training, dmuon = config.training, config.dmuon
    is_muon = owned_group(config).optimizer_name == "DMuon"
    group = owned_optimizer(config, [torch.zeros(1, 1, device="meta" if is_muon else "cpu")]).param_groups[0]
    step = training.local_batch_size * world
    return Options(
        compute_bytes=TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize,
        reduce_bytes=TORCH_DTYPE_MAP[dmuon.grad_reduce_dtype].itemsize,
        early_update=is_muon and dmuon.clip != "joint",
        momentum_bytes=(2 if group["momentum_dtype"] == "bfloat16" else 4) if is_muon else _state_bytes(config),
        reshard=get_fsdp_reshard_after_forward_policy(
            config.parallelism.fsdp_reshard_after_forward, pp_enabled=config.parallelism.pipeline_parallel_degree > 1
        ),
        prefetch=dmuon.prefetch,
        micro_batches=max(1, training.global_batch_size // step) if training.global_batch_size > 0 else 1,
        settings=settings_of(group) if is_muon else NewtonSchulz(),
        is_muon=is_muon,
        device_type=device_type,
    )


def owned_optimizer(config: Any, params: list[torch.Tensor], **changes: Any) -> torch.optim.Optimizer:
    """The optimizer of the first group whose matrices have owners, over ``params``, with other arguments if given."""
    group = owned_group(config)
    rule = {**rule_kwargs(group.optimizer_kwargs), **changes}
    if group.optimizer_name == "DMuon":
        rule = with_measured_forms(rule, config.dmuon.cost_file)
    return optimizer_class(group.optimizer_name)(params, **rule)


def _state_bytes(config: Any) -> int:
    """Bytes per element of the owned optimizer's state, rounded up: asked of it by one step on a square matrix."""
    param = torch.nn.Parameter(torch.zeros(STATE_PROBE, STATE_PROBE))
    param.grad = torch.eye(STATE_PROBE)
    optimizer = owned_optimizer(config, [param])
    optimizer.step()
    tensors = tree_leaves(dict(optimizer.state[param]))
    total = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor) and t.ndim > 0)
    return -(-total // param.numel())


def _groups(
    model: nn.Module,
    modules: dict[str, nn.Module],
    grouped: list[tuple[str, list[str]]],
    by_name: dict[str, OwnedSpec],
) -> list[Group]:
    pieces = {unit: tuple(p for n in names for p in by_name[n].pieces()) for unit, names in grouped}
    rest: Counter[str] = Counter()
    for name, places in parameter_slots(model).items():
        if name not in by_name:
            module, attribute = places[0]
            group = next((g for g in modules if name.startswith(f"{g}.")), "head")
            rest[group] += module._parameters[attribute].numel()  # type: ignore[union-attr]
    order = [*modules, *(u for u in pieces if u not in modules), "head"]
    return [Group(name, rest[name], pieces.get(name, ())) for name in order if name in pieces or rest[name]]


def _with_matrices(config: Any, pattern: str) -> tuple[Any, str]:
    """``config`` with a DMuon group for ``pattern``, or for the matrices under DEFAULT_PATTERN; and what that left to
    the other groups, said in words."""
    from torchtitan.trainer import Trainer

    from torchtitan_dmuon.titan.config import to_dmuon_config, with_dmuon_optimizer
    from torchtitan_dmuon.titan.trainer import DMuonTrainer

    if not hasattr(config, "dmuon"):
        if type(config) is not Trainer.Config:
            raise ConfigError(
                f"this registry config brings its own trainer ({type(config).__qualname__}); cannot plan it"
            )
        config = with_dmuon_optimizer(to_dmuon_config(config, DMuonTrainer))
    left = ""
    if not pattern:
        pattern, others = _matrices_under(checks.meta_model(config), DEFAULT_PATTERN)
        left = f", without what is no matrix: {', '.join(others)}" if others else ""
    groups = config.optimizer.param_groups
    group = type(groups[0])(pattern=pattern, optimizer_name="DMuon", optimizer_kwargs={})
    config.optimizer.param_groups = [group, *groups]
    return config, left


def _matrices_under(model: nn.Module, pattern: str) -> tuple[str, list[str]]:
    """(a pattern for the matrices among the parameters under ``pattern``, the others of two dimensions and more).
    Names go by kind, numbers aside."""
    kinds: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        name = canonical_name(name)
        kind = re.sub(r"(?<=\.)\d+(?=\.)", "N", name)
        if kind in kinds or not re.search(pattern, name) or parameter.ndim < 2:
            continue
        try:
            kinds[kind] = bool(owned_specs(model, [name]))
        except ConfigError:
            kinds[kind] = False
    if not any(kinds.values()):
        raise ConfigError(f"no matrix under the default pattern '{pattern}'; give --pattern")
    ours = "|".join(re.escape(kind).replace(r"\.N\.", r"\.\d+\.") for kind, is_matrix in kinds.items() if is_matrix)
    return f"^({ours})$", [kind for kind, is_matrix in kinds.items() if not is_matrix]


def recompute_share(config: Any) -> float:
    """The share of the forward that backward repeats: all of it with full activation checkpointing; the little that
    selective checkpointing repeats is left out."""
    from torchtitan.distributed.activation_checkpoint import FullAC

    return 1.0 if isinstance(config.activation_checkpoint, FullAC.Config) else 0.0
