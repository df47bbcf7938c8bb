"""A module that holds owned weights, as seen by `to_empty`, `state_dict`, `load_state_dict` and `zero_grad`.

Decides: how the ordinary walks over a module's parameters meet weights that are not there. Device moves and
dtype casts pass them by (the runtime owns their memory). A state dict has every name on every rank: the fp32 master on
its owner, and a `PartialTensor` of what is there elsewhere; a load writes masters and marks the holders' copies stale.

The walks are met by per-instance overrides of `Module._apply`, `_save_to_state_dict` and `_load_from_state_dict`, the
methods `torch.nn.Module` calls for each submodule, of pickling, and of the root's `zero_grad`; no class is changed.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .parameter import FreedParameter, OwnedParameter, require_unreplaced, warn_of_cast


class MasterStore(Protocol):
    """Where masters are read and written by parameter."""

    def master_state(self, param: OwnedParameter) -> torch.Tensor:
        """The value for a state dict: of the parameter's shape, with what this rank owns of it."""

    def load_master(self, param: OwnedParameter, value: Any) -> None: ...

    def refuse_load(self) -> None:
        """RuntimeError where a load would leave gathered weights behind."""

    def mark_stale(self) -> None: ...


@contextmanager
def _absent(module: nn.Module, owned: dict[str, OwnedParameter]) -> Iterator[None]:
    """The module's walks see no parameter under these names; their order in the module is kept."""
    require_unreplaced(owned.values())
    shown = {a: module._parameters[a] for a in owned}
    for attribute in owned:
        module._parameters[attribute] = None
    try:
        yield
    finally:
        for attribute, parameter in shown.items():
            module._parameters[attribute] = parameter


def adapt_leaf(module: nn.Module, owned: dict[str, OwnedParameter], store: MasterStore) -> None:
    """Override the three walks on ``module`` for its owned attributes (attribute -> parameter)."""
    attributes = list(owned)
    apply, save, load = module._apply, module._save_to_state_dict, module._load_from_state_dict

    def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for param in owned.values():
            dtype = param.placeholder.dtype
            if (wanted := fn(torch.empty(0, dtype=dtype)).dtype) != dtype:
                warn_of_cast(param.name, dtype, wanted)
                break
        with _absent(module, owned):
            return apply(fn, recurse)

    def _save_to_state_dict(self: nn.Module, destination: Any, prefix: str, keep_vars: bool) -> None:
        with _absent(module, owned):
            save(destination, prefix, keep_vars)
        for attribute, param in owned.items():
            destination[prefix + attribute] = store.master_state(param)

    def _load_from_state_dict(
        self: nn.Module,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        store.refuse_load()
        values = {a: state_dict.pop(prefix + a) for a in attributes if prefix + a in state_dict}
        with _absent(module, owned):
            load(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        for attribute, param in owned.items():
            key = prefix + attribute
            if attribute not in values:
                missing_keys.append(key)
                continue
            state_dict[key] = value = values[attribute]  # the caller's dict is left as it was
            if isinstance(value, FreedParameter):  # torch's `set_model_state_dict` fills in what it lacks
                missing_keys.append(key)
            elif tuple(value.shape) != param.spec.shape:
                error_msgs.append(
                    f"size mismatch for {key}: the checkpoint has {tuple(value.shape)}, the model {param.spec.shape}"
                )
            else:
                try:
                    store.load_master(param, value)
                except RuntimeError as error:  # a dict that another rank made, without the rows owned here
                    error_msgs.append(str(error))
        store.mark_stale()

    module._apply = types.MethodType(_apply, module)  # type: ignore[method-assign]
    module._save_to_state_dict = types.MethodType(_save_to_state_dict, module)  # type: ignore[method-assign]
    module._load_from_state_dict = types.MethodType(_load_from_state_dict, module)  # type: ignore[method-assign]


def keep_from_ddp(model: nn.Module, owned: Mapping[nn.Module, Mapping[str, OwnedParameter]]) -> None:
    """`DistributedDataParallel` of the model, for its other parameters, passes owned ones by. It looks for its names in
    two ways, which differ for the model's own parameters."""
    names = [f"{path}.{attribute}" for path, module in model.named_modules() for attribute in owned.get(module, ())]
    known = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, {*known, *names, *(name.removeprefix(".") for name in names)}
    )


def refuse_copies(module: nn.Module, placeholder: FreedParameter) -> None:
    """To pickle or copy the module is refused as it is for the ``placeholder``, also while its weights are gathered: a
    copy would have our hooks, and its state dict would be of this module's masters."""
    module.__reduce_ex__ = placeholder.refuse_copy  # type: ignore[method-assign]


def adapt_root(model: nn.Module, drop_gradients: Callable[[], None], refuse_load: Callable[[], None]) -> None:
    """`model.zero_grad()` also forgets owned gradients: they are not in the modules, so the walk may miss them. A load
    is refused before it has changed anything."""
    zero = model.zero_grad

    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        drop_gradients()
        zero(set_to_none)

    model.zero_grad = types.MethodType(zero_grad, model)  # type: ignore[method-assign]
    model.register_load_state_dict_pre_hook(lambda *_: refuse_load())
