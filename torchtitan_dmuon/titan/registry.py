"""TorchTitan's registries: which configs and model sizes a module has, and one of them by name.

Decides: how a name that leads nowhere is answered, and which config an older file's model is nearest to. Does not read
files (`toml_config.py`). Keeps: names of a file are names, so that nothing but a module of the registries is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

from torchtitan_dmuon.titan.config import ConfigError
from torchtitan_dmuon.titan.tables import nearest, shown


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings of configs that are only steps on the way: what is built in the end warns again."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


def config_of(module: str, name: str) -> Any:
    """A fresh config of a module's registry."""
    from torchtitan_dmuon.titan import platform

    for key, value, pattern in (("module", module, r"\w+(\.\w+)*"), ("config", name, r"\w+")):
        if len(value) > 200 or not re.fullmatch(pattern, value, re.ASCII):
            raise ConfigError(f"{key} = {shown(value)}: expected a name", f"job.{key}")
    platform.prepare()
    from torchtitan.config import ConfigManager

    try:
        return ConfigManager()._load_config(["--module", module, "--config", name])[0]
    except ImportError as error:
        if name in names_of(module):
            raise ConfigError(f"{module}'s {name} failed: {error}", "job.config") from None
        known = _modules()
        cause = nearest(module, known) if module not in known and "." not in module else f" {_import_cause(module)}"
        message = (
            f"module {module!r} has no config registry that can be imported.{cause if cause.strip() else f' ({error})'}"
        )
        raise ConfigError(message, "job.module") from None
    except Exception as error:  # whatever a registry's function does
        names = names_of(module)
        if name in names:  # the function exists and raised
            raise ConfigError(f"{module}'s {name} failed: {' '.join(str(error).split())}", "job.config") from None
        raise ConfigError(f"module {module!r} has no config {name!r}.{nearest(name, names)}", "job.config") from None


def names_of(module: str) -> list[str]:
    """The configs of a module whose registry has been imported."""
    found = [m for n, m in sys.modules.items() if n in (module, f"{module}.config_registry", *_paths(module))]
    functions = [v for m in found for v in vars(m).values() if getattr(v, "__module__", "") == m.__name__]
    plain = [f for f in functions if isinstance(f, types.FunctionType) and not inspect.signature(f).parameters]
    return [f.__name__ for f in plain if f.__name__[0] != "_"]


def set_flavor(config: Any, flavor: str, path: str = "job.flavor") -> None:
    """Another size of the config's model family, in place."""
    flavors = flavors_of(config)
    if flavor not in flavors:
        raise ConfigError(f"flavor = {shown(flavor)}: no size of this model.{nearest(flavor, flavors)}", path)
    before = config.model_spec.model
    config.model_spec = _package(config).model_registry(flavor)
    loss = config.loss
    while loss is not None:  # the registries write the model's vocabulary into the loss
        if getattr(loss, "global_vocab_size", None) == before.vocab_size:
            loss.global_vocab_size = config.model_spec.model.vocab_size
        loss = getattr(loss, "loss_fn", None)


def flavors_of(config: Any) -> list[str]:
    """The sizes of a config's model family; none where its package has no registry of them."""
    package = _package(config)
    if not hasattr(package, "model_registry"):
        return []
    return list(next((v for k, v in vars(package).items() if k.endswith("_configs") and isinstance(v, dict)), {}))


def nearest_config(model: str, flavor: str) -> tuple[str, str, str, str]:
    """(module, config, flavor or "", why) for what a file of TorchTitan 0.1 or 0.2 calls a model and its flavor: the
    config of that flavor where there is one, else the model's smallest with the flavor beside it. ``why``: what keeps
    the config of that name from being used here. ConfigError where 0.3 has neither."""
    module = {"llama3_ft": "llama3"}.get(model, model)
    try:
        config_of(module, "of_no_such_name")  # imports the registry
    except ConfigError as error:
        if error.path == "job.module":
            raise ConfigError(f"name = {shown(model)}: {error}", "model.name") from None
    names = names_of(module)
    plain = re.sub(r"\W", "_", flavor).lower()
    named, failed = f"{module}_{plain}", ""
    for name in sorted(names, key=lambda n: (n != named, len(n))):
        try:
            with quiet():
                found = config_of(module, name).model_spec.flavor
        except ConfigError as error:  # it needs something that is not installed here
            failed = failed or (str(error) if name == named else "")
            continue
        if found == flavor:
            return module, name, "", ""
    small = next((n for n in names if n.endswith("debugmodel")), names[0] if names else "")
    flavors = flavors_of(config_of(module, small)) if small else []
    if flavor not in flavors:
        raise ConfigError(f"flavor = {shown(flavor)}: no size of this model.{nearest(flavor, flavors)}", "model.flavor")
    return module, small, flavor, failed


def _package(config: Any) -> types.ModuleType:
    return sys.modules[type(config.model_spec.model).__module__.rpartition(".")[0]]


def _modules() -> set[str]:
    from torchtitan.experiments import _supported_experiments
    from torchtitan.models import _supported_models

    return _supported_models | _supported_experiments


def _paths(module: str) -> list[str]:
    """Where TorchTitan looks for the registry of a module with a short name."""
    return [f"torchtitan.{place}.{module}.config_registry" for place in ("models", "experiments")]


def _import_cause(module: str) -> str:
    """TorchTitan hides why an import failed; say it."""
    for path in (*_paths(module), module):
        try:
            importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name and not path.startswith(error.name):
                return f"It needs the module {error.name!r}."
        except Exception as error:
            return f"{type(error).__name__}: {error}."
    return ""
