"""`own_matrices`: gives the matrices of a model to owners, and `OwnedMatrices`, what the user then holds.

Decides: how a model, a mesh and options become specs, a plan, units and an engine; checks every input before any
process group is made or any weight changes. Does not decide routes, order or memory.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ..costs import CostModel
from ..matrices import MatrixLayout, OwnedSpec, Piece
from ..ownership import OwnershipPlan
from ..seeding import stream_seed
from ..topology import Topology, UnitLayout
from . import order_check
from .agreed_plan import compare_ranks, make_plan
from .clip import clip_gradients
from .engine import Engine
from .gathered_block import GatheredBlocks
from .hooks import Hooks
from .leaf import adapt_leaf, adapt_root, keep_from_ddp, refuse_copies
from .optimizer import OptimizerFactory, OwnedOptimizer
from .options import check_options, unit_dtypes
from .parameter import FreedParameter, OwnedParameter
from .partial import gathered, rows_of
from .rank_grid import RankGrid
from .selection import Select, Slots, UnitModules, group_units, parameter_slots, select_riders, select_specs
from .transport import Transport, check_transport, connect
from .unit import Unit
from .wires import Control


def own_matrices(
    model: nn.Module,
    mesh: DeviceMesh | RankGrid,
    select: Select | Sequence[OwnedSpec],
    units: Iterable[UnitModules],
    mp_policy: MixedPrecisionPolicy | None = None,
    *,
    layouts: Mapping[str, MatrixLayout] | None = None,
    stacks: str | None = None,
    riders: Select | None = None,
    reshard_after_forward: bool = True,
    gradient_divide_factor: float | None = None,
    ownership: str = "global",
    balance: str = "cost",
    cost: CostModel | None = None,
    routing: str = "two_level",
    holders: str = "shard_group",
    publish: str = "async",
    prefetch: int = 1,
    clip: str = "joint",
    ranks_per_node: int = 0,
    device: torch.device | str | None = None,
    timeout: datetime.timedelta | None = None,
    transport: str = "auto",
) -> OwnedMatrices:
    """Give each selected matrix of ``model`` one owner among the ranks of ``mesh``. A collective over the mesh.

    Args:
        model: on meta, or with equal weights on all ranks. Selected parameters leave it: their fp32 values live on
            their owners from here on, and the modules show them in compute dtype inside their unit's forward only.
        mesh: 1-D [S] or 2-D [R, S] (replicas of shard groups), ranks ascending; the mesh given to `fully_shard`.
        select: regular expression over canonical names, predicate (name, parameter), or the specs themselves. 1-D
            parameters it matches are no matrices; they are logged, and left to FSDP2 unless they are riders.
        units: modules whose owned parameters are gathered and reduced together, in forward order: those given to
            `fully_shard`, a list of modules for one unit included. Parameters in none of them form a unit of the whole
            model; parameters that several units share form units of their own.
        mp_policy: ``param_dtype`` is the dtype of gathered weights (default: the parameters'), ``reduce_dtype`` that of
            gradient sums (default float32): float32, bfloat16 or float16. Inputs are never cast here.
        layouts: name pattern -> layout of fused weights; others are one matrix each.
        stacks: name pattern of 3-D parameters [E, M, N] whose slices are matrices; others are refused.
        riders: regular expression or predicate of small parameters (norm weights, biases) of any shape that travel with
            the matrices of their unit and are updated on one rank, by `build_optimizer`'s ``riders``. Those that it
            matches in units without a matrix are left to FSDP2. Default: none.
        gradient_divide_factor: what gradients are divided by; default the mesh size, as FSDP2 does. TorchTitan: 1.
        clip: what `clip_grad_norm_` does: "joint", "adamw_only" or "per_matrix". With the last two nothing couples the
            matrices, and Newton-Schulz runs during backward, into scratch, once the gradient of a unit is complete.
        ranks_per_node: 0 takes LOCAL_WORLD_SIZE, or the mesh as one node.
        transport: for tests and measurements; see `transport.connect`.

    Raises:
        ValueError: bad options, selection or mesh; nothing has changed then.
        RuntimeError: ranks derived different plans or have different options; the message shows what differs.
    """
    check_options(
        units=units,
        mp_policy=mp_policy,
        layouts=layouts,
        reshard_after_forward=reshard_after_forward,
        gradient_divide_factor=gradient_divide_factor,
        cost=cost,
        publish=publish,
        prefetch=prefetch,
        clip=clip,
        ranks_per_node=ranks_per_node,
        timeout=timeout,
    )
    policy = mp_policy or MixedPrecisionPolicy()
    grid = RankGrid.of(mesh)
    topology = grid.topology(ranks_per_node, routing, holders, ownership)
    check_transport(topology, transport)
    slots = parameter_slots(model)
    units = list(units)
    specs = select_specs(slots, select, layouts or {}, stacks)
    if riders is not None:
        specs += select_riders(model, slots, specs, units, riders)
    chosen = slots.of(spec.name for spec in specs)
    _check_unowned(chosen)
    grouped, modules_of = group_units(model, units, chosen)
    dtypes = unit_dtypes(grouped, chosen, policy)
    plan = make_plan(specs, grouped, topology, balance, cost)
    reduce_dtype = policy.reduce_dtype or torch.float32
    divide_factor = float(topology.world if gradient_divide_factor is None else gradient_divide_factor)
    options = {  # what the plan does not hold
        "param_dtype": sorted(set(map(str, dtypes))),
        "reduce_dtype": reduce_dtype,
        "reshard_after_forward": reshard_after_forward,
        "gradient_divide_factor": divide_factor,
        "routing": routing,
        "holders": holders,
        "publish": publish,
        "prefetch": prefetch,
        "clip": clip,
        "transport": transport,
        "DMUON_DEBUG": order_check.is_enabled(),
    }

    rank = grid.own_index() if topology.world > 1 else 0
    target = torch.device(device) if device is not None else grid.device()
    compare_ranks(plan, options, Control(grid.groups), rank)
    mover, control, groups = connect(topology, grid.ranks, rank, target, transport, timeout)
    return OwnedMatrices(
        model,
        plan,
        topology,
        rank,
        target,
        specs,
        chosen,
        grouped,
        modules_of,
        mover,
        control,
        groups,
        dtypes,
        reduce_dtype,
        reshard_after_forward=reshard_after_forward,
        publish_async=publish == "async",
        prefetch=prefetch,
        clip=clip,
        gradient_divide_factor=divide_factor,
    )


class OwnedMatrices:
    """The owned parameters of one model on this rank. Made by :func:`own_matrices`."""

    def __init__(
        self,
        model: nn.Module,
        plan: OwnershipPlan,
        topology: Topology,
        rank: int,
        device: torch.device,
        specs: list[OwnedSpec],
        slots: Slots,
        grouped: list[tuple[str, list[str]]],
        modules_of: dict[int, list[nn.Module]],
        transport: Transport,
        control: Control,
        groups: list[dist.ProcessGroup],
        dtypes: list[torch.dtype],
        reduce_dtype: torch.dtype,
        *,
        reshard_after_forward: bool,
        publish_async: bool,
        prefetch: int,
        clip: str,
        gradient_divide_factor: float,
    ) -> None:
        self.model, self.plan, self.topology, self.rank, self.groups = model, plan, topology, rank, groups
        by_name = {spec.name: spec for spec in specs}
        initial: dict[str, nn.Parameter] = {}
        units: list[Unit] = []
        for index, ((unit_name, names), dtype) in enumerate(zip(grouped, dtypes, strict=True)):
            params = []
            for name in names:
                module, attribute = slots[name][0]
                old = module._parameters[attribute]
                assert old is not None
                initial[name] = old
                params.append(OwnedParameter(by_name[name], slots[name], dtype, old.requires_grad, device))
            layout = UnitLayout.build(
                topology, [(p.key, p.numel, plan.roots[p.key]) for param in params for p in param.pieces]
            )
            units.append(Unit(index, unit_name, params, layout, rank, device, dtype, reduce_dtype))
        self.engine = Engine(
            topology,
            rank,
            units,
            transport,
            control,
            device,
            prefetch=prefetch,
            reshard_after_forward=reshard_after_forward,
            publish_async=publish_async,
            gradient_divide_factor=gradient_divide_factor,
            clip=clip,
            enclosing=[index for index, modules in modules_of.items() if model in modules],
        )
        self.hooks = Hooks(self.engine, model, modules_of)
        self.engine.is_busy, self.engine.reduces_gradients = self.hooks.is_busy, self.hooks.reduces_gradients
        self._names = slots.names
        self._params = {param.name: (unit, param) for unit in units for param in unit.params}
        self.blocks = GatheredBlocks(self.engine, self._params.values())
        for unit, param in self._params.values():
            param.placeholder.has_gradient = functools.partial(self.engine.has_gradient, unit)
            param.placeholder.drop_gradient = functools.partial(self.engine.drop_gradient_of, unit, param)
        self._whole: Callable[[torch.Tensor], torch.Tensor] | None = None  # what a state dict shows of masters instead
        self._uninitialized = self.engine.uninitialized
        self._uninitialized.update(name for name, old in initial.items() if old.is_meta)
        for name, old in initial.items():
            if not old.is_meta:
                self._write(name, old.detach())
        by_module: dict[nn.Module, dict[str, OwnedParameter]] = {}
        for _, param in self._params.values():
            for module, attribute in param.slots:
                by_module.setdefault(module, {})[attribute] = param
        for module, owned in by_module.items():
            adapt_leaf(module, owned, self)
            refuse_copies(module, next(iter(owned.values())).placeholder)
        for index, modules in modules_of.items():
            for module in modules:
                refuse_copies(module, units[index].params[0].placeholder)
        refuse_copies(model, units[0].params[0].placeholder)
        keep_from_ddp(model, by_module)
        adapt_root(model, self.engine.drop_gradients, self.refuse_load)

    # ---- what a user asks ----

    @property
    def names(self) -> list[str]:
        """Canonical names of the owned parameters, unit by unit."""
        return list(self._params)

    @property
    def riders(self) -> set[str]:
        """Canonical names of the owned parameters that hold no matrix."""
        return {name for name, (_, param) in self._params.items() if param.spec.rider}

    @property
    def parameters(self) -> set[nn.Parameter]:
        """What stands in the modules for owned parameters: pass as ``ignored_params`` to every `fully_shard`."""
        return {p for _, param in self._params.values() for p in (param.placeholder, param.weight)}

    def masters(self) -> dict[str, torch.Tensor]:
        """Piece key -> fp32 master ([M, N], or a rider's shape), of the pieces this rank holds."""
        return {key: p.detach() for unit in self.engine.units for key, p in unit.master_of.items()}

    def build_optimizer(
        self,
        factory: OptimizerFactory,
        *,
        groups: Sequence[tuple[Callable[[str], bool], Mapping[str, Any]]] | None = None,
        riders: OptimizerFactory | None = None,
        optimizer_cls: type[OwnedOptimizer] = OwnedOptimizer,
        **defaults: Any,
    ) -> OwnedOptimizer:
        """``factory(parameter groups, **defaults)`` over this rank's pieces, published after each step.

        ``groups``: (predicate on the canonical name, group options), first match wins; default one group. Groups carry
        ``param_names`` with piece keys reduced to names where a parameter is one piece. ``riders``: what updates the
        riders, called with the groups of the riders alone, as in
        ``riders=functools.partial(torch.optim.AdamW, lr=3e-4)``. Their groups follow those of the matrices.
        """
        if self.engine.has_optimizer:
            raise ValueError(
                "build_optimizer was called before: one optimizer updates and publishes all owned parameters. Give it "
                "several groups (groups=...) instead"
            )
        rules = list(groups) if groups is not None else [(lambda _name: True, {})]
        matrices: list[dict[str, Any]] = [{**options, "params": [], "param_names": []} for _, options in rules]
        others: list[dict[str, Any]] = [{**options, "params": [], "param_names": []} for _, options in rules]
        kinds: list[set[bool]] = [set() for _ in rules]  # of the parameters that a group takes on any rank
        unmatched = []
        for name, (unit, param) in self._params.items():
            index = next((i for i, (rule, _) in enumerate(rules) if any(map(rule, self._names[name]))), None)
            if index is None:
                unmatched.append(name)
                continue
            group = (others if param.spec.rider else matrices)[index]
            kinds[index].add(param.spec.rider)
            for piece in param.pieces:
                if piece.key in unit.master_of:
                    group["params"].append(unit.master_of[piece.key])
                    group["param_names"].append(name if param.whole else piece.key)
        if unmatched:
            raise ValueError(f"{unmatched[0]}: no optimizer group takes it ({len(unmatched)} such parameters)")
        if set() in kinds:
            raise ValueError(
                f"groups[{kinds.index(set())}] takes no owned parameter: its predicate matches none that earlier "
                f"groups leave. Names look like: {', '.join(self.names[:4])}"
            )
        inner = [factory([g for g, kind in zip(matrices, kinds) if kind != {True}], **defaults)]
        if self.riders:
            if riders is None:
                raise ValueError(
                    f"{min(self.riders)} is a rider ({len(self.riders)} such parameters): say what updates it, as in "
                    "build_optimizer(..., riders=functools.partial(torch.optim.AdamW, lr=3e-4))"
                )
            inner.append(riders([g for g, kind in zip(others, kinds) if True in kind]))
        self.engine.has_optimizer = True
        return optimizer_cls(self.engine, inner)

    def clip_grad_norm_(self, model: nn.Module | Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clip gradients as `own_matrices` was told (`clip`), by default owned and FSDP2's by one joint norm; return
        the norm of all of them (float32, before the clip). ``model`` may be parameters; the owned ones always count. A
        collective."""
        return clip_gradients(self.engine, model, max_norm)

    def set_is_last_backward(self, value: bool, step_follows: bool | None = None) -> None:
        """Before a backward: whether the step follows it. Otherwise its sums stay inside each node until the last.
        ``step_follows = False`` with a true ``value``: reduce to the owners at once although more backwards come."""
        self.engine.is_last_backward = value
        self.engine.step_follows = value if step_follows is None else step_follows

    def gathered(self, write: bool = False) -> contextlib.AbstractContextManager[None]:
        """All owned weights in their modules until the block ends, for reading and for any number of forwards, on each
        rank as it likes. Begin and end are collectives; gradients are off inside.

        The weights are copies: with ``write`` the elements changed in place, alike on every rank, go to the masters at
        the end; otherwise a change is a RuntimeError there. What would leave the copies behind (`fill`, a load, a step,
        a publish) is refused inside. If the block raises, nothing is written.
        """
        return self.blocks.opened(write)

    def register_forward_method(self, module: nn.Module, method_name: str) -> None:
        """From now on ``module.method_name(...)`` gathers, frees and prepares the backward as ``module(...)`` does: the
        counterpart of FSDP2's `register_fsdp_forward_method`. ``module`` is a unit or the whole model."""
        if not callable(getattr(module, method_name, None)):
            raise ValueError(f"{type(module).__qualname__} has no method {method_name!r}")
        self.hooks.register_method(module, method_name)

    @torch.no_grad()
    def initialize(self, init: Callable[[str, torch.Tensor], None], seed: int = 0) -> None:
        """Draw initial weights on their owners: ``init(name, tensor)`` fills a float32 tensor ([M, N], or a rider's
        shape) in place.

        Each piece has a random stream of its own, derived from (seed, name, slice), so the weights depend neither on
        the world size nor on the plan. Only one piece at a time is in memory.
        """
        self.engine.refuse_in_block("owned.initialize")
        for _, param in self._params.values():
            self.initialize_one(param.name, functools.partial(init, param.name), seed)

    @torch.no_grad()
    def initialize_one(self, name: str, init: Callable[[torch.Tensor], Any], seed: int) -> None:
        """:meth:`initialize` for one parameter."""
        unit, param = self._find(name)

        def draw(piece: Piece) -> torch.Tensor:
            value = torch.empty(piece.shape, dtype=torch.float32, device=unit.device)
            with torch.random.fork_rng(devices=[unit.device] if unit.device.type == "cuda" else []):
                torch.manual_seed(stream_seed(seed, param.name, piece.start))
                init(value)
            return value

        self.fill(name, draw)

    @torch.no_grad()
    def fill(self, name: str, value_of: Callable[[Piece], torch.Tensor]) -> None:
        """Set a parameter's masters: ``value_of(piece)`` is asked for each piece this rank holds. Call on all ranks."""
        self.engine.refuse_in_block("owned.fill")
        unit, param = self._find(name)
        for piece in param.pieces:
            if piece.key in unit.master_of:
                unit.master_of[piece.key].copy_(value_of(piece).reshape(piece.shape))
        self._uninitialized.discard(param.name)
        self.mark_stale()

    def _find(self, name: str) -> tuple[Unit, OwnedParameter]:
        """By any name of a parameter."""
        first = next((first for first, names in self._names.items() if name in names), None)
        if first is None:
            raise KeyError(f"{name} is no owned parameter; their names look like: {', '.join(self.names[:4])}")
        return self._params[first]

    def owned_parameters(self) -> list[OwnedParameter]:
        """The owned parameters, unit by unit."""
        return [param for _, param in self._params.values()]

    def full_state_dict(self, *, cpu_offload: bool = False) -> dict[str, Any]:
        """The model's state dict with every weight whole, owned ones (float32) and FSDP2's alike. With ``cpu_offload``
        on the CPU and on rank 0 alone, and empty on the others, as torch's `StateDictOptions` has it. A collective, of
        one weight at a time."""

        def whole(value: torch.Tensor) -> torch.Tensor:
            value = gathered(value, self.engine.control.all_reduce)
            if not cpu_offload or not dist.is_initialized() or dist.get_rank() == 0:
                return value.cpu() if cpu_offload else value
            return rows_of(value.shape, {}, "a weight of rank 0's state dict", value.dtype, value.device)

        self._whole = whole
        try:
            options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
            return get_model_state_dict(self.model, options=options)
        finally:
            self._whole = None

    def publish(self) -> None:
        """Bring every holder's copy up to date with the masters now. A collective."""
        self.engine.refuse_in_block("owned.publish")
        self.engine.free_all()
        self.engine.publish_all()

    def close(self) -> None:
        self.engine.close()

    # ---- MasterStore, for the modules' state dicts ----

    def master_state(self, param: OwnedParameter) -> torch.Tensor:
        self.blocks.refuse_pending("the state dict of owned weights")
        unit, _ = self._params[param.name]
        # Under replica ownership each replica loads masters of its own, but a sum takes each piece once.
        held = unit.master_of if self._whole is None else unit.rooted
        mine = {p.start: unit.master_of[p.key].detach() for p in param.pieces if p.key in held}
        if param.whole and mine:
            value = mine[0].view(param.spec.shape)
        else:
            value = rows_of(param.spec.shape, mine, param.name, torch.float32, unit.device)
        return value if self._whole is None else self._whole(value)

    @torch.no_grad()
    def load_master(self, param: OwnedParameter, value: torch.Tensor) -> None:
        self._write(param.name, value)
        self._uninitialized.discard(param.name)

    def refuse_load(self) -> None:
        self.engine.refuse_in_block("load_state_dict")

    def mark_stale(self) -> None:
        self.engine.free_all()
        self.engine.stale = True

    @torch.no_grad()
    def _write(self, name: str, value: torch.Tensor) -> None:
        unit, param = self._params[name]
        for piece in param.pieces:
            if piece.key in unit.master_of:
                rows = value if param.whole else value[piece.start : piece.stop]
                unit.master_of[piece.key].copy_(rows.reshape(piece.shape))


def _check_unowned(chosen: Mapping[str, list[tuple[nn.Module, str]]]) -> None:
    for name, places in chosen.items():
        parameter: Any = places[0][0]._parameters[places[0][1]]
        if isinstance(parameter, FreedParameter):
            raise ValueError(f"{name} is owned already: own_matrices was called on this model before")
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name} is sharded already: call own_matrices before fully_shard")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name} has gradient hooks, which would be lost with it: remove them. What a `register_hook` did "
                "works after own_matrices, inside `with owned.gathered():`, on this rank's gradient in param_dtype"
            )
