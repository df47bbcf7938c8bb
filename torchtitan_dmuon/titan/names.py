"""What an `optimizer_name` of `optimizer.param_groups` stands for.

Decides: which names give matrices to owners, the class behind a name, and which of a group's arguments go to the
constructor because the class keeps them once for all groups. Does not check a run (`checks.py`). Keeps: importing this
module imports no TorchTitan.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# What `optimizer_kwargs` may say about the matrices themselves, beside the rule's arguments: "per_head" makes each
# attention head's rows of a query, key or value projection a matrix of its own.
LAYOUT_OPTIONS = ("per_head",)
# "Owned:torch.optim.AdamW": the class at this import path, over whole matrices on their owners.
OWNED_PREFIX = "Owned:"


def is_owned(name: str) -> bool:
    """Whether this optimizer's matrices have owners."""
    return name == "DMuon" or name.startswith(OWNED_PREFIX)


def takes_matrices(name: str) -> bool:
    """Whether it updates whole matrices: 1-D parameters under its pattern fall through to the next group."""
    return is_owned(name) or name in ("GatherMuon", "DistMuon")


def is_muon(name: str) -> bool:
    """Whether its rule is our Muon's, which knows the blocks of fused weights."""
    return name in ("DMuon", "GatherMuon")


def has_layouts(name: str) -> bool:
    """Whether its groups may say :data:`LAYOUT_OPTIONS`."""
    return is_muon(name) or name == "DistMuon"


def rule_kwargs(optimizer_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A group's `optimizer_kwargs` without what says which matrices there are: the arguments of the update rule."""
    return {key: value for key, value in optimizer_kwargs.items() if key not in LAYOUT_OPTIONS}


def probe(cls: type[torch.optim.Optimizer], **kwargs: Any) -> torch.optim.Optimizer:
    """The optimizer over one small parameter, to see what it takes; Muon's is on no device, which it looks at."""
    import torch

    from torchtitan_dmuon.muon import Muon

    device = "meta" if issubclass(cls, Muon) else "cpu"
    return cls([torch.nn.Parameter(torch.zeros(2, 2, device=device))], **kwargs)


def optimizer_classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Optimizers that are known by a short name and whose arguments are checked."""
    import torch

    from torchtitan_dmuon.muon import Muon
    from torchtitan_dmuon.titan.gather_muon import GatherMuon

    return {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "DMuon": Muon, "GatherMuon": GatherMuon}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class behind a name. KeyError for an unknown short name, ValueError for a path that leads to no optimizer."""
    import torch

    if not name.startswith(OWNED_PREFIX):
        return optimizer_classes()[name]
    path = name.removeprefix(OWNED_PREFIX)
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f'{path!r} cannot be imported: {error}. Write "{OWNED_PREFIX}package.module.Class", of a package that is '
            "installed where this runs"
        ) from None
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        raise ValueError(f"{path!r} is no subclass of torch.optim.Optimizer, but {found!r:.60}")
    needed = [p.name for p in list(inspect.signature(found.step).parameters.values())[1:] if _is_required(p)]
    if needed:
        raise ValueError(f"{path!r} cannot be stepped by a trainer: its step needs {', '.join(needed)}")
    return found


def _is_required(argument: inspect.Parameter) -> bool:
    return argument.default is argument.empty and argument.kind not in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL)


def arguments(cls: type) -> tuple[dict[str, inspect.Parameter], bool]:
    """The constructor's arguments after the parameters, and whether it also takes any others."""
    found = list(inspect.signature(cls).parameters.values())[1:]
    named = {p.name: p for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return named, any(p.kind is p.VAR_KEYWORD for p in found)


def separated(
    cls: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Options of one optimizer's groups -> (what each group keeps, the constructor's arguments): what the class keeps
    once for all groups, and the first group's values where it has no default. ValueError where groups differ in the
    former."""
    named, _ = arguments(cls)
    by_group = probe(cls, **groups[0]).param_groups[0]
    once = {k: v for k, v in groups[0].items() if k in named and k not in by_group}
    for group in groups[1:]:
        if others := [k for k in {**once, **group} if k in named and k not in by_group]:
            wrong = next((k for k in others if k not in once or k not in group or once[k] != group[k]), None)
            if wrong is not None:
                raise ValueError(f"{wrong} is one for all groups of {cls.__name__}: give each of them the same")
    kept = [{k: v for k, v in group.items() if k not in once} for group in groups]
    return kept, once | {k: groups[0][k] for k, p in named.items() if p.default is p.empty and k in groups[0]}
