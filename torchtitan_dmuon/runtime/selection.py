"""Which parameters of a model are owned, and which of them form a unit.

Decides: how a selection and a list of modules become specs and units. Keeps: a parameter is selected or refused by
name, and belongs to exactly one unit. Communicates nothing.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from ..matrices import WHOLE, MatrixLayout, OwnedSpec, canonical_name, is_convolution

logger = logging.getLogger(__name__)

Select = str | re.Pattern[str] | Callable[[str, nn.Parameter], bool]


def parameter_slots(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Canonical name of each parameter -> every (module, attribute) that holds it; tied weights have several."""
    names: dict[nn.Parameter, str] = {}
    slots: dict[str, list[tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = canonical_name(f"{prefix}.{attribute}" if prefix else attribute)
            slots.setdefault(names.setdefault(parameter, name), []).append((module, attribute))
    return slots


def select_specs(
    slots: Mapping[str, list[tuple[nn.Module, str]]],
    select: Select | Sequence[OwnedSpec],
    layouts: Mapping[str, MatrixLayout],
    stacks: str | None,
) -> list[OwnedSpec]:
    if isinstance(select, Sequence) and not isinstance(select, str):
        return _checked_specs(slots, select)
    rule = _rule("select", select)
    for key in layouts:
        _compiled("layouts", key)
    if stacks is not None:
        _compiled("stacks", stacks)
    specs, left = [], []
    used: set[str] = set()
    for name, places in slots.items():
        module, attribute = places[0]
        parameter = module._parameters[attribute]
        assert parameter is not None
        if not rule(name, parameter):
            continue
        if parameter.ndim < 2:
            left.append(name)
            continue
        flatten = attribute == "weight" and is_convolution(module)
        if not flatten and (parameter.ndim > 3 or (parameter.ndim == 3 and not (stacks and re.search(stacks, name)))):
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)} in {type(module).__qualname__}: it is no matrix. Leave it "
                "out of `select`, or name it in `stacks` if its slices on dim 0 are matrices"
            )
        pattern = next((p for p in layouts if re.search(p, name)), None)
        if pattern is not None:
            used.add(pattern)
        specs.append(OwnedSpec(name, tuple(parameter.shape), layouts[pattern] if pattern else WHOLE, flatten=flatten))
    if unused := [p for p in layouts if p not in used]:
        raise ValueError(f"layouts: pattern {unused[0]!r} matches no selected parameter")
    if stacks is not None and not any(len(s.shape) == 3 and re.search(stacks, s.name) for s in specs):
        raise ValueError(f"stacks = {stacks!r} matches no selected parameter with 3 dimensions")
    if not specs:
        some = ", ".join(list(slots)[:4])
        raise ValueError(f"select = {select!r} matches no matrix; parameter names look like: {some}")
    if left:
        logger.info("%d selected parameters with fewer than 2 dimensions are no matrices: %s ...", len(left), left[0])
    return specs


def select_riders(
    model: nn.Module,
    slots: Mapping[str, list[tuple[nn.Module, str]]],
    matrices: Sequence[OwnedSpec],
    units: list[nn.Module],
    riders: Select,
) -> list[OwnedSpec]:
    """Specs of the parameters that ``riders`` selects and that lie in a unit with a matrix; others stay with FSDP2."""
    rule = _rule("riders", riders)
    owned = {spec.name for spec in matrices}
    wanted = {}
    for name, places in slots.items():
        parameter = places[0][0]._parameters[places[0][1]]
        assert parameter is not None
        if name in owned or rule(name, parameter):
            wanted[name] = places
    grouped, _ = group_units(model, units, wanted)
    found = {n for _, names in grouped if not owned.isdisjoint(names) for n in names} - owned
    places_of = {n: slots[n][0] for n in slots if n in found}
    return [OwnedSpec(n, tuple(m._parameters[a].shape), rider=True) for n, (m, a) in places_of.items()]  # type: ignore[union-attr]


def _checked_specs(slots: Mapping[str, list[tuple[nn.Module, str]]], select: Sequence[OwnedSpec]) -> list[OwnedSpec]:
    for spec in select:
        if not isinstance(spec, OwnedSpec):
            raise ValueError(f"select: {spec!r} is no OwnedSpec; for names give a regular expression")
    unknown = [s.name for s in select if s.name not in slots]
    if unknown:
        raise ValueError(f"{unknown[0]}: the model has no such parameter ({len(unknown)} unknown names)")
    repeated = [name for name, count in Counter(s.name for s in select).items() if count > 1]
    if repeated:
        raise ValueError(f"{repeated[0]}: select has several specs of it ({len(repeated)} such parameters)")
    for spec in select:
        module, attribute = slots[spec.name][0]
        shape = tuple(module._parameters[attribute].shape)  # type: ignore[union-attr]
        if tuple(spec.shape) != shape:
            raise ValueError(f"{spec.name}: its spec has shape {tuple(spec.shape)}, the parameter {shape}")
    return list(select)


def _rule(option: str, select: Select) -> Callable[[str, nn.Parameter], bool]:
    if callable(select):
        return select
    regex = _compiled(option, select)
    return lambda name, _parameter: bool(regex.search(name))


def _compiled(option: str, pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (TypeError, re.error) as error:
        raise ValueError(f"{option}: {pattern!r} is no regular expression ({error})") from None


def group_units(
    model: nn.Module, units: list[nn.Module], chosen: Mapping[str, list[tuple[nn.Module, str]]]
) -> tuple[list[tuple[str, list[str]]], dict[int, list[nn.Module]]]:
    """(unit name, parameter names) in forward order, and the modules each unit hooks."""
    names = {module: canonical_name(name) for name, module in model.named_modules()}
    strangers = [u for u in units if u not in names]
    if strangers:
        raise ValueError(f"units: {type(strangers[0]).__qualname__} is not a submodule of the model")
    inside: dict[nn.Module, list[nn.Module]] = {}
    for unit in units:
        for module in unit.modules():
            inside.setdefault(module, []).append(unit)
    members: dict[nn.Module, list[str]] = {unit: [] for unit in units}
    root: list[str] = []
    shared: dict[tuple[nn.Module, ...], list[str]] = {}
    for name, places in chosen.items():
        # The innermost unit around each place; the last registered of nested ones is not assumed to be it.
        around = [min(inside.get(m, []), key=lambda u: sum(1 for _ in u.modules()), default=None) for m, _ in places]
        distinct = list(dict.fromkeys(around))
        if len(distinct) > 1:
            shared.setdefault(tuple(dict.fromkeys(m for m, _ in places)), []).append(name)
        elif distinct[0] is None:
            root.append(name)
        else:
            members[distinct[0]].append(name)
    grouped: list[tuple[str, list[str]]] = []
    modules_of: dict[int, list[nn.Module]] = {}

    def add(name: str, params: list[str], modules: list[nn.Module]) -> None:
        if params:
            modules_of[len(grouped)] = modules
            grouped.append((name, params))

    add("(root)", root, [model])
    for modules, params in shared.items():
        add(f"(shared) {params[0]}", params, list(modules))
    for unit, params in members.items():
        add(names[unit], params, [unit])
    return grouped, modules_of
