"""The files and folders of a run: that what it reads is there, and that what it writes can be written.

Decides: where a run may write (its dump folder, and folders that are named in full), and what counts as a tokenizer, a
data set and a checkpoint to load. Makes and changes nothing. Keeps: an error names the key; nothing is left behind by a
run that is refused.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

from torchtitan_dmuon.titan.config import ConfigError, raise_all
from torchtitan_dmuon.titan.data import DATASET, HELD_OUT
from torchtitan_dmuon.titan.registry import quiet
from torchtitan_dmuon.titan.tables import nearest, shown

# Key of what a run writes below its dump folder -> whether it will.
_WRITTEN: dict[str, Callable[[Any], bool]] = {
    "checkpoint.folder": lambda c: c.checkpoint.enable and not c.checkpoint.load_only,
    "metrics.save_tb_folder": lambda c: c.metrics.enable_tensorboard,
    "profiler.save_traces_folder": lambda c: c.profiler.enable_profiling,
    "profiler.save_memory_snapshot_folder": lambda c: c.profiler.enable_memory_snapshot,
    "comm.save_traces_folder": lambda c: c.comm.trace_buf_size > 0,
}
_READ = ("hf_assets_path", "dataloader.dataset_path", "validator.dataloader.dataset_path", "dmuon.cost_file")
# Keys of [checkpoint] that are set on purpose, and mean nothing where it is not enabled -> unset.
_NEEDS_CHECKPOINTS = {
    "load_step": -1,
    "initial_load_path": None,
    "enable_first_step_checkpoint": False,
    "create_seed_checkpoint": False,
}
_STEP_FILES = (".metadata", "model.safetensors.index.json")  # one of them makes a folder a checkpoint


def check(config: Any, says: Callable[[str], bool]) -> None:
    """Raise ConfigError for paths and names that cannot be used. ``says``: whether the user, not the registry, set a
    dotted key."""
    found: list[ConfigError] = []
    for rule in (_names, _writes, _data_sets, _checkpoint):
        for path, message in rule(config, says) if rule is _data_sets else rule(config):
            found.append(ConfigError(f"{path.rpartition('.')[2]} = {shown(_value(config, path))}: {message}", path))
        raise_all(found)


def _value(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = config[int(part)] if part.isdecimal() else getattr(config, part, None)
    return config


def _names(config: Any) -> Iterator[tuple[str, str]]:
    """What a path may look like."""
    for key in ("dump_folder", *_WRITTEN, *_READ, "debug.save_config_file", "checkpoint.initial_load_path"):
        path = _value(config, key)
        if path is None or path == "" and key in _READ:
            continue
        if key not in ("dump_folder", *_READ, "checkpoint.initial_load_path") and ".." in PurePath(path).parts:
            yield key, "leads out of dump_folder; name a folder in it, or one in full, without '..'"
        elif path.startswith("~"):
            yield key, f"'~' is no home folder here; write {os.path.expanduser(path)}"
        elif not path.strip():
            yield key, "is empty; name a folder"
        elif len(os.fsencode(path)) > 4000 or any(len(os.fsencode(part)) > 255 for part in PurePath(path).parts):
            yield key, "is longer than a file system takes"
    file = config.debug.save_config_file
    if file is not None and (os.path.isabs(file) or file.endswith("/")):
        yield "debug.save_config_file", "expected a file in dump_folder, such as 'config.json'"
    prefix = config.comm.save_traces_file_prefix
    if "/" in prefix or len(os.fsencode(prefix)) > 200:
        yield "comm.save_traces_file_prefix", "expected the beginning of a file's name"


def _writes(config: Any) -> Iterator[tuple[str, str]]:
    """Where a run writes can be written."""
    if reason := _unwritable(config.dump_folder):
        yield "dump_folder", f"dump_folder cannot be used: {reason}"
        return
    for key, will in _WRITTEN.items():
        path = _value(config, key)
        if will(config) and "://" not in path and (reason := _unwritable(os.path.join(config.dump_folder, path))):
            yield key, f"cannot be written: {reason}"
    file = config.debug.save_config_file
    if file is not None:
        path = os.path.join(config.dump_folder, file)
        reason = f"{path} is a folder" if os.path.isdir(path) else _unwritable(os.path.dirname(path))
        if reason:
            yield "debug.save_config_file", f"cannot be written: {reason}"


def _unwritable(folder: str) -> str:
    """Why no file can be made in this folder, which need not exist; "" where one can."""
    try:
        there = os.path.abspath(folder)
        while not os.path.lexists(there):
            there = os.path.dirname(there)
        if not os.path.isdir(there):
            os.stat(there)  # a link that leads nowhere, or round and round
            return f"{there} is a file"
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return f"{there}: {error.strerror}"


def _data_sets(config: Any, says: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Names of data sets are known, and local ones are there."""
    local = False
    for path, loader in _loaders(config):
        known = _known_data_sets(loader)
        name = getattr(loader, "dataset", "").lower()
        if known is None:
            continue
        if name not in known:
            yield f"{path}.dataset", f"no such data set.{nearest(name, known)}"
            continue
        where = loader.dataset_path or known[name].path
        is_local = os.path.exists(where) or where[0] in "./" or where.count("/") != 1  # the Hub's are owner/name
        key = f"{path}.dataset_path" if loader.dataset_path else f"{path}.dataset"
        if is_local and not os.path.exists(where) and name not in (DATASET, HELD_OUT):
            yield key, f"there is no {where}; set {path}.dataset_path to where the data set is"
        if path.startswith("validator") and local and not is_local and not says(f"{path}.dataset"):
            yield (
                f"{path}.dataset",
                f"validation would read {where} from the Hub, while training reads local files; name a data set in "
                f"[{path}], or this one to have it",
            )
        local = local or is_local


def _loaders(config: Any) -> Iterator[tuple[str, Any]]:
    named = [("dataloader", config.dataloader)]
    if config.validator.enable:
        named.append(("validator.dataloader", config.validator.dataloader))
    for path, loader in named:
        sources = getattr(loader, "sources", None)  # a mix of several
        yield from [(path, loader)] if sources is None else [(f"{path}.sources.{i}", s) for i, s in enumerate(sources)]


def _known_data_sets(loader: Any) -> Any:
    """TorchTitan's table of data sets for this kind of loader; None where it has none."""
    module = sys.modules.get(type(loader).__module__)
    return getattr(module, "DATASETS", None) or getattr(module, "MM_DATASETS", None)


def _checkpoint(config: Any) -> Iterator[tuple[str, str]]:
    """What is asked to be loaded is there."""
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        for name, unset in _NEEDS_CHECKPOINTS.items():
            if getattr(checkpoint, name) not in (unset, ""):
                yield f"checkpoint.{name}", "has no effect, because checkpoint.enable is false"
        return
    folder, step, first = checkpoint.folder, checkpoint.load_step, checkpoint.initial_load_path
    if "://" in folder or checkpoint.create_seed_checkpoint:
        return
    where = os.path.join(config.dump_folder, folder)
    steps = _steps(where)
    if step >= 0 and step not in steps:
        there = f"there are those of steps {', '.join(map(str, steps))}" if steps else "there is none"
        yield "checkpoint.load_step", f"no checkpoint of this step in {where}; {there}"
    elif step < 0 and not steps and (first or checkpoint.initial_load_in_hf):
        key, start = ("checkpoint.initial_load_path", first) if first else ("hf_assets_path", config.hf_assets_path)
        expected = "model.safetensors files" if checkpoint.initial_load_in_hf else ".metadata, as .../step-100 is"
        if "://" not in start and not _is_checkpoint(start):
            yield key, f"expected a checkpoint to start from: a folder with {expected}"


def _steps(folder: str) -> list[int]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    matches = [m for name in names if (m := re.fullmatch(r"step-(\d+)", name))]
    return sorted(int(m[1]) for m in matches if _is_checkpoint(os.path.join(folder, m[0])))


def _is_checkpoint(folder: str) -> bool:
    if any(os.path.isfile(os.path.join(folder, name)) for name in _STEP_FILES):
        return True
    return os.path.isdir(folder) and any(name.endswith(".safetensors") for name in os.listdir(folder))


def check_tokenizer(config: Any) -> None:
    """That the tokenizer can be read, and that the model's embedding has a row for each of its tokens."""
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    if not isinstance(config.tokenizer, HuggingFaceTokenizer.Config):
        return
    path, key = config.hf_assets_path, "hf_assets_path"
    said = f"{key} = {shown(path)}: expected a folder with a tokenizer (tokenizer.json)"
    if not os.path.isdir(path):
        raise ConfigError(f"{said}; {'it is a file' if os.path.exists(path) else 'there is no such folder'}", key)
    try:
        with quiet():
            tokenizer = config.tokenizer.build(tokenizer_path=path)
            tokens = max(tokenizer.get_vocab().values(), default=-1) + 1
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ConfigError(f"{said}; it cannot be read: {' '.join(str(error).split())}", key) from None
    rows = getattr(config.model_spec.model, "vocab_size", None) if config.model_spec is not None else None
    if rows is not None and tokens > rows:
        raise ConfigError(
            f"{key} = {shown(path)}: its tokenizer has {tokens:,} tokens, but the model's embedding {rows:,} rows", key
        )
