"""Which parameters of a model are owned, and which of them form a unit.

Decides: how a selection and a list of modules become specs and units. Keeps: a parameter is selected or refused by
name, and belongs to exactly one unit. Communicates nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from ..matrices import WHOLE, MatrixLayout, OwnedSpec, canonical_name, is_convolution, stores_inputs_first

logger = logging.getLogger(__name__)

UnitModules = nn.Module | Sequence[nn.Module]  # a unit is made of one module, or of several
Select = str | re.Pattern[str] | Callable[[str, nn.Parameter], bool]


class Slots(dict[str, list[tuple[nn.Module, str]]]):
    """Canonical name of each parameter, the first it goes by -> every (module, attribute) that holds it; tied weights
    have several. ``names``: the first -> all its names, those of modules that are registered twice included."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, list[str]] = {}

    def of(self, names: Iterable[str]) -> Slots:
        """Those of some parameters."""
        part = Slots()
        for name in names:
            part[name], part.names[name] = self[name], self.names[name]
        return part


def parameter_slots(model: nn.Module) -> Slots:
    slots, first = Slots(), dict[nn.Parameter, str]()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = canonical_name(f"{prefix}.{attribute}" if prefix else attribute)
            known = first.setdefault(parameter, name)
            slots.names.setdefault(known, []).append(name)
            if (module, attribute) not in slots.setdefault(known, []):
                slots[known].append((module, attribute))
    return slots


def select_specs(
    slots: Slots,
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
    specs, left, turned = [], [], []
    used: set[str] = set()
    for name, places in slots.items():
        module, attribute = places[0]
        parameter = module._parameters[attribute]
        assert parameter is not None
        names = slots.names[name]
        if not any(rule(each, parameter) for each in names):
            continue
        if parameter.ndim < 2:
            left.append(name)
            continue
        flatten = attribute == "weight" and is_convolution(module)
        if not flatten and (parameter.ndim > 3 or (parameter.ndim == 3 and not _matches(stacks, names))):
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)} in {type(module).__qualname__}: it is no matrix. Leave it "
                "out of `select`, or name it in `stacks` if its slices on dim 0 are matrices"
            )
        pattern = next((p for p in layouts if _matches(p, names)), None)
        if pattern is not None:
            used.add(pattern)
        layout = layouts[pattern] if pattern else WHOLE
        if _stored_transposed(module, attribute):
            if pattern is None:
                layout = MatrixLayout(transposed=True)
                turned.append(name)
            _check_transposed(name, layout)
        specs.append(OwnedSpec(name, tuple(parameter.shape), layout, flatten=flatten))
    if unused := [p for p in layouts if p not in used]:
        raise ValueError(f"layouts: pattern {unused[0]!r} matches no selected parameter")
    if stacks is not None and not any(len(s.shape) == 3 and _matches(stacks, slots.names[s.name]) for s in specs):
        raise ValueError(f"stacks = {stacks!r} matches no selected parameter with 3 dimensions")
    if not specs:
        some = ", ".join(list(slots)[:4])
        raise ValueError(f"select = {select!r} matches no matrix; parameter names look like: {some}")
    if turned:
        logger.warning(
            "%d selected weights are stored [inputs, outputs]: %s ... Each is taken as one matrix, its transpose. "
            "Where one holds several, such as query, key and value, say so: "
            "layouts={PATTERN: MatrixLayout(rows=(...), transposed=True)}",
            len(turned),
            turned[0],
        )
    if left:
        logger.info("%d selected parameters with fewer than 2 dimensions are no matrices: %s ...", len(left), left[0])
    return specs


def _matches(pattern: str | None, names: Iterable[str]) -> bool:
    return pattern is not None and any(re.search(pattern, name) for name in names)


def select_riders(
    model: nn.Module,
    slots: Slots,
    matrices: Sequence[OwnedSpec],
    units: Sequence[UnitModules],
    riders: Select,
) -> list[OwnedSpec]:
    """Specs of the parameters that ``riders`` selects and that lie in a unit with a matrix; others stay with FSDP2."""
    rule = _rule("riders", riders)
    owned = {spec.name for spec in matrices}
    wanted = {}
    for name, places in slots.items():
        parameter = places[0][0]._parameters[places[0][1]]
        assert parameter is not None
        if name in owned or any(rule(each, parameter) for each in slots.names[name]):
            wanted[name] = places
    grouped, _ = group_units(model, units, wanted)
    found = {n for _, names in grouped if not owned.isdisjoint(names) for n in names} - owned
    places_of = {n: slots[n][0] for n in slots if n in found}
    return [OwnedSpec(n, tuple(m._parameters[a].shape), rider=True) for n, (m, a) in places_of.items()]  # type: ignore[union-attr]


def _checked_specs(slots: Slots, select: Sequence[OwnedSpec]) -> list[OwnedSpec]:
    for spec in select:
        if not isinstance(spec, OwnedSpec):
            raise ValueError(f"select: {spec!r} is no OwnedSpec; for names give a regular expression")
    first = {each: name for name, names in slots.names.items() for each in names}
    select = [dataclasses.replace(spec, name=first.get(spec.name, spec.name)) for spec in select]
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
        if not spec.rider and _stored_transposed(module, attribute):
            _check_transposed(spec.name, spec.layout)
    return list(select)


def _stored_transposed(module: nn.Module, attribute: str) -> bool:
    return attribute == "weight" and stores_inputs_first(module)


def _check_transposed(name: str, layout: MatrixLayout) -> None:
    if not layout.transposed:
        raise ValueError(
            f"{name} is stored [inputs, outputs], so that its matrices are of its columns: its layout must have "
            f"transposed=True, got {layout}"
        )


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
    model: nn.Module, units: Sequence[UnitModules], chosen: Mapping[str, list[tuple[nn.Module, str]]]
) -> tuple[list[tuple[str, list[str]]], dict[int, list[nn.Module]]]:
    """(unit name, parameter names) in forward order, and the modules each unit hooks."""
    names = {module: canonical_name(name) for name, module in model.named_modules()}
    entries = list(dict.fromkeys(_modules_of(unit, names) for unit in units))
    entry_of: dict[nn.Module, tuple[nn.Module, ...]] = {}
    inside: dict[nn.Module, list[nn.Module]] = {}
    for entry in entries:
        for listed in entry:
            if entry_of.setdefault(listed, entry) is not entry:
                raise ValueError(f"units: {names[listed]} is in several of them")
            for module in listed.modules():
                inside.setdefault(module, []).append(listed)
    members: dict[tuple[nn.Module, ...], list[str]] = {entry: [] for entry in entries}
    entered: set[nn.Module] = set()  # those listed that hold a chosen parameter
    root: list[str] = []
    shared: dict[tuple[nn.Module, ...], list[str]] = {}
    for name, places in chosen.items():
        # The innermost unit around each place; the last registered of nested ones is not assumed to be it.
        around = [min(inside.get(m, []), key=lambda u: sum(1 for _ in u.modules()), default=None) for m, _ in places]
        entered.update(module for module in around if module is not None)
        distinct = list(dict.fromkeys(None if module is None else entry_of[module] for module in around))
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
    for entry, params in members.items():
        add(" + ".join(names[m] for m in entry), params, [m for m in entry if m in entered])
    return grouped, modules_of


def _modules_of(unit: UnitModules, names: Mapping[nn.Module, str]) -> tuple[nn.Module, ...]:
    modules = (unit,) if isinstance(unit, nn.Module) else tuple(unit) if isinstance(unit, Iterable) else ()
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise ValueError(f"units: {unit!r} is neither a module nor a list of modules")
    for module in modules:
        if module not in names:
            raise ValueError(f"units: {type(module).__qualname__} is not a submodule of the model")
    return tuple(dict.fromkeys(modules))
