"""TOML files over TorchTitan's registry configs, and the command line over the files.

Decides: how a table becomes a config section, which class a `type` names, and what every error says: file, line, table,
key, what was expected and the nearest valid name. Does not decide what the values mean (the config classes' own checks,
`checks.py`). Keeps: no process group exists when an error is raised, and a file with a bad [job] or [dmuon] table is
refused before TorchTitan is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import itertools
import logging
import pathlib
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tomli
import tomli_w

from torchtitan_dmuon.outputs import write_keeping
from torchtitan_dmuon.titan.config import ConfigError, DMuonConfig, to_dmuon_config, with_dmuon_optimizer
from torchtitan_dmuon.titan.tables import Merger, Path, mentioned, nearest, noun, to_table
from torchtitan_dmuon.titan.toml_lines import key_lines

JOB_KEYS = ("module", "config")
SAVED_NAME = "config.toml"  # in the dump folder
HEAD = "# The configuration of this run."  # how a saved file begins, and how it is known for ours


@dataclasses.dataclass
class Source:
    """Where a config came from: its registry entry, its file if any, and the keys set on the command line."""

    module: str
    config: str
    file: str = ""
    lines: Mapping[Path, int] = dataclasses.field(default_factory=dict)
    flags: frozenset[str] = frozenset()

    def locate(self, error: ConfigError) -> ConfigError:
        """The same error, its message beginning with where the value was set."""
        path = tuple(error.path.split(".")) if error.path else ()
        given = error.path.replace("-", "_")
        if any(given == flag or flag.startswith(f"{given}.") for flag in self.flags):
            return ConfigError(f"command line: --{error.path}: {error}", error.path)
        if not self.file:
            return ConfigError(f"{self.module} {self.config}: {error.path}: {error}", error.path)
        known = path
        while known and known not in self.lines:
            known = known[:-1]
        table = ".".join(path[:-1])
        where = f"in [{table}]: " if table else ""
        return ConfigError(f"{self.file}:{self.lines.get(known, 1)}: {where}{error}", error.path)


@dataclasses.dataclass
class Run:
    """What the entry points need: a Trainer.Config, and its source for errors and for the saved file."""

    config: Any
    source: Source


def parse(args: Sequence[str]) -> Run:
    """Read ``--config FILE.toml``, or ``--module M --config NAME`` of a registry, and apply the other flags on top.

    Raises :class:`ConfigError`, located.
    """
    module, config, rest = _take_job_flags(args)
    flags = frozenset(m[1].replace("-", "_") for a in rest if (m := re.match(r"--([\w.-]+)", a)))
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
        run = Run(_registry_config(source), source)
    run.source.flags = flags
    with _quiet():
        run.config = _with_flags(run, rest)
    return run


def load(file: str) -> Run:
    """The registry config named in the file's [job] table with the file's other tables on top."""
    try:
        with open(file, encoding="utf-8-sig") as f:  # some editors begin a file with a byte order mark
            text = f.read()
        data = tomli.loads(text)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}:1: not valid TOML: not UTF-8 ({error.reason})") from None
    except (tomli.TOMLDecodeError, RecursionError) as error:
        line = re.search(r"at line (\d+)", str(error))
        raise ConfigError(f"{file}:{line[1] if line else text.count(chr(10)) + 1}: not valid TOML: {error}") from None

    source = Source("", "", file, key_lines(text))
    job = data.pop("job", {})
    try:
        source.module, source.config = _check_job(job)
        merger = Merger()
        dmuon = data.get("dmuon")
        if dmuon is not None:  # checked first: it needs no import
            merger.value(("dmuon",), DMuonConfig, dmuon, DMuonConfig())
        with _quiet():
            base = _registry_config(source)
            base = _ours(base, wanted=dmuon is not None)
            return Run(merger.table((), type(base), data, base), source)
    except ConfigError as error:
        raise source.locate(error) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of configs that are only steps on the way: what is built in the end warns again."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


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


def _check_job(job: Any) -> tuple[str, str]:
    example = 'begin the file with\n    [job]\n    module = "llama3"\n    config = "llama3_debugmodel"'
    if not isinstance(job, dict) or not job:
        raise ConfigError(f"no [job] table names the registry config to build on; {example}")
    for key, value in job.items():
        if key not in JOB_KEYS:
            hint = " It is a key of the whole file: put it above the first table." if key in _TOP_LEVEL else ""
            raise ConfigError(f"unknown key {key!r}.{hint or nearest(key, JOB_KEYS)}", f"job.{key}")
        if not isinstance(value, str):
            raise ConfigError(f"{key} = {value!r}: expected a string, found {noun(value)}", f"job.{key}")
    for key in JOB_KEYS:
        if key not in job:
            raise ConfigError(f"key {key!r} is missing; {example}", f"job.{key}")
    return job["module"], job["config"]


_TOP_LEVEL = ("dump_folder", "hf_assets_path")


def _registry_config(source: Source) -> Any:
    from torchtitan_dmuon.titan import platform

    platform.prepare()
    from torchtitan.config import ConfigManager
    from torchtitan.experiments import _supported_experiments
    from torchtitan.models import _supported_models

    module, name = source.module, source.config
    try:
        base, _ = ConfigManager()._load_config(["--module", module, "--config", name])
    except ImportError as error:
        known = _supported_models | _supported_experiments
        cause = nearest(module, known) if module not in known and "." not in module else f" {_import_cause(module)}"
        message = f"module {module!r} has no config registry that can be imported.{cause} ({error})"
        raise ConfigError(message, "job.module") from None
    except ValueError as error:
        found = [m for n, m in sys.modules.items() if n in (module, f"{module}.config_registry") or n in _paths(module)]
        functions = [v for m in found for v in vars(m).values() if getattr(v, "__module__", "") == m.__name__]
        names = [f.__name__ for f in functions if isinstance(f, types.FunctionType) and f.__name__[0] != "_"]
        if name in names:  # the function exists and raised
            raise ConfigError(f"{module}'s {name} failed: {error}", "job.config") from None
        raise ConfigError(f"module {module!r} has no config {name!r}.{nearest(name, names)}", "job.config") from None
    return base


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


def _take_job_flags(args: Sequence[str]) -> tuple[str | None, str | None, list[str]]:
    found: dict[str, str | None] = {"--module": None, "--config": None}
    rest, queue = [], list(args)
    while queue:
        arg = queue.pop(0)
        flag, eq, value = arg.partition("=")
        if flag not in found:
            rest.append(arg)
            continue
        if not eq and not queue:
            raise ConfigError(f"{flag} needs a value")
        found[flag] = value if eq else queue.pop(0)
    return found["--module"], found["--config"], rest


def _with_flags(run: Run, flags: list[str]) -> Any:
    from torchtitan.config import ConfigManager

    class Manager(ConfigManager):
        def _load_config(self, args):
            return run.config, args

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return Manager().parse_args(flags)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise ConfigError(f"command line: {_first_paragraph(said.getvalue())}") from None
    except ConfigError as error:
        raise run.source.locate(error) from None
    except (ValueError, AssertionError, TypeError) as error:
        raise run.source.locate(ConfigError(str(error), mentioned(str(error), run.source.flags))) from None


def _first_paragraph(box: str) -> str:
    """What tyro says in a frame of many lines, as one line: the message, and the nearest flag where it names one."""
    lines = [line.strip().strip("│|").strip() for line in box.strip().splitlines()[1:]]  # the first is the title
    groups = itertools.groupby(lines, key=lambda line: bool(re.search(r"\w", line)))  # between rules
    message = next((" ".join(group) for has_words, group in groups if has_words), "")
    similar = next((line.split()[0] for line in lines if re.match(r"--\w", line)), "")
    hint = f" Did you mean {similar}?" if similar and "Unrecognized" in message else ""
    return f"{message.rstrip('.')}.{hint}" if message else box


def document(run: Run) -> tuple[dict[str, Any], list[str]]:
    """The run's configuration as the tables of a TOML file, and the dotted keys that TOML cannot say."""
    left_out: list[str] = []
    tables = to_table(run.config, left_out=left_out)
    job = {"module": run.source.module, "config": run.source.config}
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
