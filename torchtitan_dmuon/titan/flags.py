"""The command line over a config: TorchTitan's own flags, with values as a TOML file writes them.

Decides: which arguments name the job, that `--checkpoint.enable true` and `--checkpoint.exclude_from_loading '["x"]'`
are taken as the file would take them, and how a flag that is wrong is answered, in one line. Everything else about
flags is tyro's, as in TorchTitan.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from collections.abc import Sequence
from typing import Any

import tomli

from torchtitan_dmuon.titan import old_names
from torchtitan_dmuon.titan.config import ConfigError
from torchtitan_dmuon.titan.tables import choices, field_types, mentioned


def take_job(args: Sequence[str]) -> tuple[str | None, str | None, list[str]]:
    """(--module, --config, the other arguments)."""
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


def keys(flags: Sequence[str]) -> frozenset[str]:
    """The dotted keys that these arguments set."""
    return frozenset(m[1].replace("-", "_") for a in flags if (m := re.match(r"--([\w.-]+)", a)))


def apply(config: Any, flags: Sequence[str]) -> Any:
    """``config`` with the flags on top. ConfigError, with the key where it is known, for what cannot be."""
    from torchtitan.config import ConfigManager

    class Manager(ConfigManager):
        def _load_config(self, args):
            return config, args

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return Manager().parse_args(as_tyro(config, flags))
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise ConfigError(f"command line: {_first_paragraph(said.getvalue(), flags)}") from None
    except ConfigError:
        raise
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(" ".join(str(error).split()), mentioned(str(error), keys(flags))) from None


def as_tyro(config: Any, flags: Sequence[str]) -> list[str]:
    """Booleans and arrays that are written as in TOML, in tyro's words: --key, --no-key, True, and a,b,c."""
    out: list[str] = []
    queue = list(flags)
    while queue:
        arg = queue.pop(0)
        flag, eq, value = arg.partition("=")
        key = flag.removeprefix("--").replace("-", "_")
        options = _type_of(config, key) if arg.startswith("--") else []
        if not options or not (eq or queue):
            out.append(arg)
            continue
        value = value if eq else queue[0]
        words = _words(flag, options, value)
        if words is None:
            out.append(arg)
            continue
        out += words
        if not eq:
            queue.pop(0)
    return out


def _words(flag: str, options: list[Any], value: str) -> list[str] | None:
    """tyro's words for one flag and its value in TOML's, None where they are the same."""
    if bool in options and value.lower() in ("true", "false"):
        if len(options) > 1:
            return [flag, value.capitalize()]
        table, dot, name = flag.removeprefix("--").rpartition(".")
        return [flag if value.lower() == "true" else f"--{table}{dot}no-{name}"]
    if value.startswith("[") and list[str] in options:  # of which TorchTitan's flags take a,b,c
        with contextlib.suppress(tomli.TOMLDecodeError):
            items = tomli.loads(f"x = {value}")["x"]
            if items and all(isinstance(item, str) and "," not in item for item in items):
                return [flag, ",".join(items)]
    return None


def _type_of(config: Any, key: str) -> list[Any]:
    """The types that a dotted key can have; none for what is no key."""
    *tables, name = key.split(".")
    for table in tables:
        config = getattr(config, table, None)
    hints = field_types(type(config)) if hasattr(type(config), "__dataclass_fields__") else {}
    return list(choices(hints[name]).values()) if name in hints else []


def _first_paragraph(box: str, flags: Sequence[str]) -> str:
    """What tyro says in a frame of many lines, as one line: the message, and the nearest flag where it names one."""
    lines = [line.strip().strip("│|").strip() for line in box.strip().splitlines()[1:]]  # the first is the title
    groups = itertools.groupby(lines, key=lambda line: bool(re.search(r"\w", line)))  # between rules
    message = next((" ".join(group) for has_words, group in groups if has_words), "")
    similar = next((line.split()[0] for line in lines if re.match(r"--\w", line)), "")
    hint = f" Did you mean {similar}?" if similar and "Unrecognized" in message else ""
    old = (old_names.explain(key) for key in sorted(keys(flags)) if key in message.replace("-", "_"))
    hint = next((f" {now}" for now in old if now), hint)
    return f"{message.rstrip('.')}.{hint}" if message else box
