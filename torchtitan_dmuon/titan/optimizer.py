"""TorchTitan's optimizer container with "DMuon", "GatherMuon" and "Owned:..." beside its own names.

Decides: which parameters go to which optimizer (canonical names; 1-D ones fall through), in which order optimizers
step, that none does when a gradient is not finite, and when that ends the run. Does not decide update rules. Keeps
invariant 10.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.utils import (
    get_flat_optim_state_dict,
    init_optim_state,
    load_flat_optim_state_dict,
)
from torchtitan.tools.logging import logger

from torchtitan_dmuon.checkpoint import load_optimizer_state, optimizer_state
from torchtitan_dmuon.matrices import canonical_name
from torchtitan_dmuon.muon import Muon, set_layout, settings_of
from torchtitan_dmuon.newton_schulz import choose_form, flops, gram_saves
from torchtitan_dmuon.runtime.lanes import Exposure
from torchtitan_dmuon.runtime.optimizer import OwnedOptimizer
from torchtitan_dmuon.runtime.owned import OwnedMatrices
from torchtitan_dmuon.titan import dist_muon
from torchtitan_dmuon.titan.config import NonFiniteGradients, assign_parameters
from torchtitan_dmuon.titan.gather_muon import GatherMuon
from torchtitan_dmuon.titan.models import owned_specs
from torchtitan_dmuon.titan.names import is_owned, optimizer_class, rule_kwargs, separated, takes_matrices
from torchtitan_dmuon.titan.parallelize import dmuon_config_of, owned_of, with_measured_forms
from torchtitan_dmuon.titan.platform import on_cpu
from torchtitan_dmuon.titan.qk_clip import QkClip

# Options of a group that its line in the log shows, in this order.
_LOGGED = (
    "lr",
    "weight_decay",
    "betas",
    "eps",
    "momentum",
    "nesterov",
    "momentum_form",
    "momentum_dtype",
    "adjust_lr_fn",
)
_LOGGED += ("ns_steps", "ns_coefficients", "ns_form", "ns_dtype", "cautious_weight_decay", "row_beta", "per_head")


class DMuonOptimizersContainer(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self._groups = config.param_groups
        self._model = model_parts[0]
        self._clock = Exposure(torch.device("cpu" if on_cpu() else "cuda"))
        self._qk_clip: QkClip | None = None
        self._readable: Callable[[dict[str, Any]], dict[str, Any]] = dict
        super().__init__(config, model_parts=model_parts)
        self.optimizers.sort(key=lambda o: not isinstance(o, OwnedOptimizer))  # its publishes hide behind the others

    @property
    def owned(self) -> OwnedMatrices | None:
        return owned_of(self._model)

    @property
    def owned_optimizer(self) -> OwnedOptimizer | None:
        return next((o for o in self.optimizers if isinstance(o, OwnedOptimizer)), None)

    @property
    def sends_are_counted(self) -> bool:
        """Whether all that a step's optimizers send is counted somewhere: DistMuon's own messages are not."""
        return not any(map(dist_muon.is_dist_muon, self.optimizers))

    @staticmethod
    def _build_param_groups(
        model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        """The stock rule (first match wins) over canonical names, with what a matrix optimizer cannot take left to
        later groups. Riders form groups of the owned optimizer, after its own, with the options of the group that takes
        them."""
        owned = owned_of(model)
        riders = owned.riders if owned is not None else set()
        params = {canonical_name(n): p for n, p in model.named_parameters() if p.requires_grad}
        assignment = assign_parameters(
            {n: tuple(p.shape) for n, p in params.items()}, [(g.pattern, g.optimizer_name) for g in param_group_configs]
        )
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        patterns: dict[str, list[str]] = defaultdict(list)
        last: list[tuple[dict[str, Any], str]] = []
        for config, taken in zip(param_group_configs, assignment.groups, strict=True):
            for names in ([n for n in taken if n not in riders], [n for n in taken if n in riders]):
                if not names:
                    continue
                group = {"params": [params[n] for n in names], "param_names": names}
                # How torch runs its own optimizers ("fused", "foreach") is nothing that others know.
                group |= {} if takes_matrices(config.optimizer_name) else impl_kwargs
                group |= config.optimizer_kwargs
                if riders.issuperset(names):
                    last.append((group, f"{config.pattern}, riders"))
                else:
                    groups[config.optimizer_name].append(group)
                    patterns[config.optimizer_name].append(config.pattern)
        for group, pattern in last:
            name = next(filter(is_owned, groups))
            groups[name].append(group)
            patterns[name].append(pattern)
        if assignment.fell_through:
            names = [n for n, _ in assignment.fell_through]
            logger.info(
                f"{len(names)} vectors (fewer than 2 dimensions, or one row or column) fell through to a later group: "
                f"{names[0]}, ..."
            )
        return groups, patterns

    def _resolve_optimizer_factory(self, name: str) -> Callable[..., Any]:  # type: ignore[override]
        if is_owned(name):
            return functools.partial(self._build_owned, name)
        if name == "GatherMuon":
            return self._build_gathering
        if name == dist_muon.NAME:
            return functools.partial(dist_muon.build, self._model)
        return OptimizersContainer._resolve_optimizer_factory(name)

    def _build_owned(self, name: str, groups: list[dict[str, Any]], **kwargs: Any) -> Any:
        cls = optimizer_class(name)
        self._owned_counts = [len(g["param_names"]) for g in groups]
        if self.owned is None:  # a seed checkpoint: one process, nothing parallelized, and no step
            return self._build_gathering(groups, **kwargs) if cls is Muon else _built(cls, groups, kwargs)
        table = dmuon_config_of(self._model)
        if cls is Muon and table is not None and table.deterministic:  # what else is in a batch can change bits
            kwargs["batch_bytes"] = 0
        riders = [g for g in groups if self.owned.riders.issuperset(g["param_names"])]
        matrices = [g for g in groups if not self.owned.riders.issuperset(g["param_names"])]
        options, once = separated(cls, [_options_of(g) for g in matrices])
        if cls is Muon and table is not None:
            options = [with_measured_forms(option, table.cost_file) for option in options]
        options += [_options_of(g) for g in riders]
        rules = [(set(g["param_names"]).__contains__, o) for g, o in zip(matrices + riders, options, strict=True)]
        # Learning rates are logged by the name of the class: "lr/DMuon", "lr/OwnedSOAP".
        shown = type("DMuon" if cls is Muon else f"Owned{cls.__name__}", (OwnedOptimizer,), {})
        made = self.owned.build_optimizer(
            cls, groups=rules, riders=torch.optim.AdamW, optimizer_cls=shown, **{**once, **kwargs}
        )
        if table is not None and table.qk_clip:
            self._qk_clip = QkClip(self._model, self.owned, table.qk_clip)
            made.after_update = self._qk_clip.apply
        return made

    def _build_gathering(self, groups: list[dict[str, Any]], **kwargs: Any) -> Any:
        for group in groups:
            names = group["param_names"]
            layouts = {
                s.name: s.layout for s in owned_specs(self._model, names, names if group.get("per_head") else ())
            }
            for name, param in zip(group["param_names"], group["params"], strict=True):
                set_layout(param, layouts[name])
        return _built(GatherMuon, groups, kwargs)

    def _log_optimizer(self, optimizer: Any, part_idx: int, patterns: list[str]) -> None:
        if isinstance(optimizer, (OwnedOptimizer, GatherMuon)):  # the stock line counts what this rank owns
            owned = isinstance(optimizer, OwnedOptimizer)
            of_riders = {id(g) for inner in optimizer.inners[1:] for g in inner.param_groups} if owned else ()
            counts = self._owned_counts if owned else [len(g["params"]) for g in optimizer.param_groups]
            per_head = {g.pattern for g in self._groups if g.optimizer_kwargs.get("per_head")}
            for group, count, pattern in zip(optimizer.param_groups, counts, patterns, strict=True):
                name = "AdamW" if id(group) in of_riders else type(optimizer).__name__
                told = {**group, "per_head": True} if pattern in per_head else group
                shown = {key: told[key] for key in _LOGGED if key in told}
                logger.info(f"Optimizer {name}: {count} params [{pattern}] {shown}")
        else:
            super()._log_optimizer(optimizer, part_idx, patterns)
        for line in describe_optimizer(optimizer, self.owned):
            logger.info(line)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        # Not super().step(): its hooks (the bias of experts) would run before a step is known to be sound.
        assert closure is None, "OptimizersContainer does not support closures"
        owned = self.owned
        if owned is not None:
            owned.engine.finish_reduces()
            if not owned.engine.gradients_are_finite():
                return self._skip_step()
            if self._qk_clip is not None:
                self._qk_clip.collect()
        return self._sound_step()

    step.hooked = True  # type: ignore[attr-defined]

    @torch.optim.Optimizer.profile_hook_step
    def _sound_step(self) -> None:
        with self._clock.timed("update"):
            for optimizer in self.optimizers:
                optimizer.step()

    def _skip_step(self) -> None:
        """Count it, forget what its forwards left for a step, and give up where too many follow each other."""
        optimizer, table = self.owned_optimizer, dmuon_config_of(self._model)
        assert optimizer is not None and table is not None
        if self._qk_clip is not None:
            self._qk_clip.forget()
        for module in self._model.modules():  # what TorchTitan's MoE counts for the bias of experts
            if isinstance(counts := getattr(module, "tokens_per_expert_E", None), torch.Tensor):
                counts.zero_()
        optimizer.skip_step()
        count, limit = optimizer.skipped_in_a_row, table.max_skipped_steps
        if table.on_nonfinite == "raise":
            found = 'a gradient is not finite on some rank, and dmuon.on_nonfinite is "raise"'
        elif 0 < limit <= count:
            found = f"gradients were not finite in {count} steps in a row, the limit of dmuon.max_skipped_steps"
        else:
            return
        raise NonFiniteGradients(
            f"{found}. No weight has changed since, and no checkpoint was saved: look at loss and learning rates of "
            "the steps before, and resume from a checkpoint of before them (checkpoint.load_step)"
        )

    def take_update_seconds(self) -> float:
        """Seconds inside the optimizers' steps since the last call: the device's where it is CUDA."""
        return self._clock.take().get("update", 0.0)

    def state_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for optimizer in self.optimizers:
            if isinstance(optimizer, OwnedOptimizer):
                result.update(optimizer_state(optimizer))
            else:
                init_optim_state(optimizer)
                result.update(get_flat_optim_state_dict(optimizer))
        return self._readable(result)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, OwnedOptimizer):
                load_optimizer_state(optimizer, state_dict, strict=False)
            else:
                init_optim_state(optimizer)
                today = get_flat_optim_state_dict(optimizer)
                options = {k: v for k, v in today.items() if k.startswith("param_groups.")}
                load_flat_optim_state_dict(optimizer, {**options, **state_dict})

    @contextlib.contextmanager
    def reading(self, readable: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
        """While a checkpoint is read, whose missing keys are known: `state_dict` is what to read of it."""
        self._readable = readable
        try:
            yield
        finally:
            self._readable = dict


def _built(cls: type[torch.optim.Optimizer], groups: list[dict[str, Any]], kwargs: dict[str, Any]) -> Any:
    options, once = separated(cls, [_options_of(g) for g in groups])
    given = [{"params": g["params"], "param_names": g["param_names"], **o} for g, o in zip(groups, options)]
    return cls(given, **{**once, **kwargs})


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in rule_kwargs(group).items() if k not in ("params", "param_names")}


def describe_optimizer(optimizer: torch.optim.Optimizer, owned: OwnedMatrices | None) -> list[str]:
    """What an optimizer has in the whole cluster: parameters, matrices, elements, NS FLOPs of a step."""
    name, ride = type(optimizer).__name__, ""
    if isinstance(optimizer, OwnedOptimizer):
        assert owned is not None
        pieces = [p for p in owned.plan.pieces if not p.rider]
        matrices = [m for p in pieces for m in p.matrices()]
        count, elements = len(owned.names) - len(owned.riders), sum(p.numel for p in pieces)
        if owned.riders:
            ride = f"; {len(owned.riders)} small parameters ride with them, updated by AdamW on their owners"
        if not isinstance(optimizer.inners[0], Muon):
            fused = sum(len(p.matrices()) > 1 for p in pieces)
            whole = f"; {fused} fused weights are updated as one matrix each" if fused else ""
            return [f"{name}: {count} parameters in {len(pieces)} pieces, {elements:,} elements{whole}{ride}"]
        settings = settings_of(optimizer.param_groups[0])
    elif isinstance(optimizer, GatherMuon):
        params = [p for g in optimizer.param_groups for p in g["params"]]
        from torchtitan_dmuon.muon import layout_of

        matrices = [m for p in params for m in layout_of(p).shapes(p.shape)]
        count, elements = len(params), sum(p.numel() for p in params)
        settings = settings_of(optimizer.param_groups[0])
    else:
        params = [p for g in optimizer.param_groups for p in g["params"]]
        return [f"{name}: {len(params)} parameters, {sum(p.numel() for p in params):,} elements"]
    device_type = "cpu" if on_cpu() else "cuda"
    work = sum(flops(m, n, settings, device_type) for m, n in matrices)
    forms = [choose_form(m, n, settings, device_type) for m, n in matrices]
    lines = [
        f"{name}: {count} parameters, {len(matrices)} matrices, {elements:,} elements, {work / 1e9:,.1f} GFLOP of "
        f"Newton-Schulz per step ({forms.count('gram')} in the Gram form){ride}"
    ]
    left = sum(form == "standard" and gram_saves(m, n, settings) for form, (m, n) in zip(forms, matrices, strict=True))
    if settings.form == "auto" and left:
        lines.append(
            f"{name}: {left} of them take fewer FLOPs in the Gram form, which auto leaves alone in 16 bits, as less "
            'accurate: dmuon.cost_file takes it where it is measured to be faster, ns_form = "gram" everywhere'
        )
    return lines
