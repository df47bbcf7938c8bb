"""TOML files over TorchTitan's registry configs, and the command line over the files.

Decides: which registry config a file builds on, and what every error says: file, line, table, key, what was expected
and the nearest valid name, all errors of a file at once. Does not decide how a table becomes a section (`tables.py`) or
a flag a key (`flags.py`), nor what the values mean (the config classes' own checks, `checks.py`). Keeps: no process
group exists when an error is raised, and a file is refused before TorchTitan is imported where [job] names no config,
or where [dmuon] is wrong and nothing else is said.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tomli
import tomli_w

from torchtitan_dmuon.outputs import write_keeping
from torchtitan_dmuon.titan import flags, old_names, registry
from torchtitan_dmuon.titan.config import (
    ConfigError,
    ConfigErrors,
    DMuonConfig,
    raise_all,
    to_dmuon_config,
    with_dmuon_optimizer,
)
from torchtitan_dmuon.titan.tables import Merger, Path, nearest, noun, shown, to_table
from torchtitan_dmuon.titan.toml_lines import key_lines

JOB_KEYS = ("module", "config", "flavor")  # the last one may be left out
SAVED_NAME = "config.toml"  # in the dump folder
HEAD = "# The configuration of this run."  # how a saved file begins, and how it is known for ours


@dataclasses.dataclass
class Source:
    """Where a config came from: its registry entry, its file if any, and the keys set on the command line."""

    module: str
    config: str
    file: str = ""
    flavor: str = ""
    lines: Mapping[Path, int] = dataclasses.field(default_factory=dict)
    flags: frozenset[str] = frozenset()

    def says(self, key: str) -> bool:
        """Whether the file or the command line sets this dotted key, rather than the registry config."""
        return key in self.flags or tuple(key.split(".")) in self.lines

    def locate(self, error: ConfigError) -> ConfigError:
        """The same error, its message beginning with where the value was set; of several, each, in the file's order."""
        if isinstance(error, ConfigErrors):
            each = sorted(error.errors, key=lambda e: self._line(tuple(e.path.split("."))))
            old = sum(e.old for e in each)
            head = (
                f"{self.file}: this file is of an older TorchTitan (0.1 or 0.2), {old} of its keys are not in 0.3; "
                f"`python -m torchtitan_dmuon convert-config {self.file}` writes it anew"
            )
            return ConfigErrors(list(map(self.locate, each)), error.unseen, head if old else "")
        path = tuple(error.path.split(".")) if error.path else ()
        given = error.path.replace("-", "_")
        if any(given == flag or flag.startswith(f"{given}.") for flag in self.flags):
            return ConfigError(f"command line: --{error.path}: {error}", error.path)
        if not self.file:
            return ConfigError(f"{self.module} {self.config}: {error.path}: {error}", error.path)
        table = ".".join(path[:-1])
        where = f"in [{table}]: " if table else ""
        return ConfigError(f"{self.file}:{self._line(path)}: {where}{error}", error.path)

    def _line(self, path: Path) -> int:
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


@dataclasses.dataclass
class Run:
    """What the entry points need: a Trainer.Config, and its source for errors and for the saved file."""

    config: Any
    source: Source


def parse(args: Sequence[str]) -> Run:
    """Read ``--config FILE.toml``, or ``--module M --config NAME`` of a registry, and apply the other flags on top.

    Raises :class:`ConfigError`, located.
    """
    module, config, rest = flags.take_job(args)
    if config is None:
        raise ConfigError("--config is missing: give --config FILE.toml, or --module llama3 --config llama3_debugmodel")
    if config.endswith(".toml"):
        if module not in (None, "torchtitan_dmuon"):
            raise ConfigError(
                f"--module {module} does not go with a TOML file; the file's [job] table names the module"
            )
        run = load(config)
    elif module is None:
        raise ConfigError(f"--module is missing: --config {config!r} is no .toml file, so it names a registry config")
    else:
        source = Source(module, config)
        run = Run(registry.config_of(module, config), source)
    run.source.flags = flags.keys(rest)
    with registry.quiet():
        try:
            run.config = flags.apply(run.config, rest)
        except ConfigError as error:
            raise (run.source.locate(error) if error.path else error) from None
    return run


def load(file: str) -> Run:
    """The registry config named in the file's [job] table with the file's other tables on top."""
    return from_text(read(file), file)


def read(file: str) -> str:
    try:
        with open(file, encoding="utf-8-sig") as f:  # some editors begin a file with a byte order mark
            return f.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}:1: not valid TOML: not UTF-8 ({error.reason})") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigError(f"{shown(file)[1:-1]}: cannot be read: {getattr(error, 'strerror', error)}") from None


def tables_of(text: str, file: str) -> dict[str, Any]:
    """What a TOML parser reads in the text of ``file``."""
    try:
        return tomli.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
        line = re.search(r"at line (\d+)", str(error))
        raise ConfigError(f"{file}:{line[1] if line else text.count(chr(10)) + 1}: not valid TOML: {error}") from None


def from_text(text: str, file: str) -> Run:
    """:func:`load` for the text of ``file``. Everything wrong with it is raised at once."""
    data = tables_of(text, file)
    source = Source("", "", file, lines=key_lines(text))
    try:
        return Run(_merged(data, source), source)
    except ConfigError as error:
        raise source.locate(error) from None
    except RecursionError:
        raise ConfigError(f"{file}:1: a value is nested too deeply") from None


def _merged(data: dict[str, Any], source: Source) -> Any:
    merger = Merger()
    of_job, is_old = _take_job(data, source)
    of_dmuon: list[ConfigError] = []
    if "dmuon" in data:  # checked first: it needs no import
        try:
            merger.value(("dmuon",), DMuonConfig, data["dmuon"], DMuonConfig())
        except ConfigError as error:
            of_dmuon = error.errors
    if not is_old and not (source.module and source.config and data.keys() - {"dmuon"}):
        raise_all(of_job + of_dmuon)
    with registry.quiet():
        try:
            base = _ours(_old_base(data) if is_old else _base(source), wanted="dmuon" in data)
            config = merger.table((), type(base), data, base)
        except ConfigError as error:
            raise_all(of_job + error.errors, error.unseen)
    raise_all(of_job)
    return config


def _base(source: Source) -> Any:
    base = registry.config_of(source.module, source.config)
    if source.flavor:
        registry.set_flavor(base, source.flavor)
    return base


def _old_base(data: dict[str, Any]) -> Any:
    """What an older file is checked against, beside its old names: its model's config, or any."""
    model = data["model"] if isinstance(data.get("model"), dict) else {}
    try:
        found = registry.nearest_config(str(model.get("name", "llama3")), str(model.get("flavor", "8B")))
    except ConfigError:
        found = ("llama3", "llama3_8b", "", "")
    return registry.config_of(*found[:2])


def _ours(base: Any, wanted: bool) -> Any:
    """With our Trainer and optimizer container in place of the stock ones; other trainers keep their own."""
    from torchtitan.trainer import Trainer

    from torchtitan_dmuon.titan.data import register_datasets
    from torchtitan_dmuon.titan.initialization import with_named_init
    from torchtitan_dmuon.titan.trainer import DMuonTrainer

    register_datasets()

    if type(base) is Trainer.Config:
        base.model_spec = with_named_init(base.model_spec)
        return with_dmuon_optimizer(to_dmuon_config(base, DMuonTrainer))
    if wanted and not any(f.name == "dmuon" for f in dataclasses.fields(base)):
        owner = type(base)._owner
        raise ConfigError(
            f"this registry config brings its own trainer ({owner.__qualname__}); DMuon cannot use it", "dmuon"
        )
    return base


def _take_job(data: dict[str, Any], source: Source) -> tuple[list[ConfigError], bool]:
    """Take [job] out of ``data`` and put what it names into ``source``. Returns what is wrong with it, and whether the
    file is an older TorchTitan's."""
    example = 'begin the file with [job], module = "llama3" and config = "llama3_debugmodel" below each other'
    job = data.pop("job", {})
    is_old = isinstance(job, dict) and "module" not in job and old_names.is_old({"job": job, **data})
    if not isinstance(job, dict) or not (job or is_old):
        raise ConfigError(f"no [job] table names the registry config to build on; {example}")
    found = []
    for key, value in job.items():
        path = f"job.{key}"
        if key not in JOB_KEYS:
            now = old_names.explain(path)
            hint = " It is a key of the whole file: put it above the first table." if key in _TOP_LEVEL else ""
            hint = hint or (f" {now}" if now else nearest(key, JOB_KEYS))
            found.append(ConfigError(f"unknown key {shown(key)}.{hint}", path, is_old and bool(now)))
        elif not isinstance(value, str):
            found.append(ConfigError(f"{key} = {shown(value)}: expected a string, found {noun(value)}", path))
        else:
            setattr(source, key, value)
    if not is_old and not found:  # else one of them is misspelled
        found += [ConfigError(f"key {k!r} is missing; {example}", f"job.{k}") for k in JOB_KEYS[:2] if k not in job]
    return found, is_old


_TOP_LEVEL = ("dump_folder", "hf_assets_path")


def document(run: Run) -> tuple[dict[str, Any], list[str]]:
    """The run's configuration as the tables of a TOML file, and the dotted keys that TOML cannot say."""
    left_out: list[str] = []
    tables = to_table(run.config, left_out=left_out)
    job = {"module": run.source.module, "config": run.source.config}
    if run.source.flavor:
        job["flavor"] = run.source.flavor
    plain = {k: v for k, v in tables.items() if not isinstance(v, dict)}
    sections = {k: v for k, v in tables.items() if isinstance(v, dict)}
    return {**plain, "job": job, **sections}, left_out


def save(
    tables: dict[str, Any], left_out: Sequence[str], folder: str, changes: Sequence[str] = ()
) -> list[pathlib.Path]:
    """Write a :func:`document` as ``folder/config.toml``, which runs again as it is. Returns its path, and behind it
    that of an earlier start's, where that was another one: it is kept under a number.

    ``changes`` (what this machine made of the settings) go into the head as comments: another machine decides anew.
    """
    head = [f"{HEAD[2:]} It runs again with --config THIS_FILE, on as many ranks."]
    head += [f"Set by this machine, not by the file: {line}" for line in changes]
    head += [f"Not expressible in TOML, taken from the registry config: {key}" for key in left_out]
    text = "".join(f"# {line}\n" for line in head) + "\n" + tomli_w.dumps(tables)
    path = pathlib.Path(folder, SAVED_NAME)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = write_keeping(path, text)
    return [path] if kept is None else [path, kept]
