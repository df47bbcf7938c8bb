"""`dmuon convert-config`: a file of TorchTitan 0.1 or 0.2 as one of 0.3's, with what could not be carried over.

Decides: what each old key becomes beyond a new name (`old_names.py` has those), and what is said of the rest. Keeps:
the new file is written only after it has been read and checked as a run's would be, and never over one that exists.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from torchtitan_dmuon.titan import old_names, registry, toml_config
from torchtitan_dmuon.titan.config import ConfigError

# What old files that do not say otherwise were trained with: the registry's optimizer may have other values.
_OPTIMIZER = {"name": "AdamW", "lr": 8e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
_MODEL = {"name": "llama3", "flavor": "debugmodel"}
_OWNED_GROUP = r"""For DMuon, put this group before the other (and see docs/configuration.md for its arguments):
[[optimizer.param_groups]]
pattern = 'layers\.\d+\.(attention|feed_forward)\.'
optimizer_name = "DMuon"
optimizer_kwargs = { lr = LR, weight_decay = DECAY, adjust_lr_fn = "match_rms_adamw" }"""


def convert(text: str, file: str) -> str:
    """The text of a file for TorchTitan 0.3 that says what ``text``, of an older one, says. Raises ConfigError where
    the file is no older TorchTitan's, or its model is not in 0.3."""
    old = toml_config.tables_of(text, file)
    if not old_names.is_old(old) or "module" in _table(old, "job"):
        raise ConfigError(f"{file}: no key of TorchTitan 0.1 or 0.2 in it: nothing to convert")
    model, optimizer = {**_MODEL, **_table(old, "model")}, {**_OPTIMIZER, **_table(old, "optimizer")}
    module, config, flavor, reason = registry.nearest_config(str(model["name"]), str(model["flavor"]))
    new: dict[str, Any] = {"job": {"module": module, "config": config} | ({"flavor": flavor} if flavor else {})}
    lost: dict[str, str] = {}
    for key, value in old_names.leaves(old):
        to = old_names.renamed(key) or key
        if key in old_names.RESHAPED:
            continue
        if key not in old_names.RENAMED and (why := old_names.gone(key)):
            lost[key] = f"{_written(key, value)}: {why}"
        else:
            _put(new, to, value)
    if optimizer.get("fused"):
        _put(new, "optimizer.implementation", "fused")
    kwargs = {key: optimizer[key] for key in ("lr", "eps", "weight_decay")}
    kwargs["betas"] = [optimizer["beta1"], optimizer["beta2"]]
    group = {"pattern": ".*", "optimizer_name": optimizer["name"], "optimizer_kwargs": kwargs}
    new.setdefault("optimizer", {})["param_groups"] = [group]
    new = dict(sorted(new.items(), key=lambda item: isinstance(item[1], dict)))  # keys come before tables
    _drop_refused(new, lost, file)
    example = _OWNED_GROUP.replace("LR", str(optimizer["lr"])).replace("DECAY", str(optimizer["weight_decay"]))
    head = [
        f"Converted from {Path(file).name}, a file of TorchTitan 0.1 or 0.2.",
        f"What neither file says is as {module}'s {config} has it.",
        *([f"It builds on that config with another flavor, because {reason}"] if reason else []),
        *(["", "Not carried over:"] if lost else []),
        *(f"  {line}" for line in lost.values()),
        "",
        *example.splitlines(),
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in head) + "\n" + tomli_w.dumps(new)


def _drop_refused(new: dict[str, Any], lost: dict[str, str], file: str) -> None:
    """Move what 0.3 refuses from ``new`` to ``lost``, until what is left can be read and checked."""
    from torchtitan_dmuon.titan import checks

    for _ in range(100):
        try:
            checks.check_run(toml_config.from_text(tomli_w.dumps(new), file).config, None)
            return
        except ConfigError as error:
            removed = [_take(new, e.path) for e in error.errors]
            for each, (key, value) in zip(error.errors, removed):
                if key:
                    said = str(each).partition(": ")[2].removeprefix(f"in [{key.rpartition('.')[0]}]: ")
                    lost[key] = f"{_written(key, value)}: {said}"
            if not any(key for key, _ in removed):
                raise
    raise AssertionError("each round removes a key")


def _take(tables: dict[str, Any], path: str) -> tuple[str, Any]:
    """Remove a dotted key and return it with its value; ("", None) for what is no key of these tables, or of [job]."""
    *parents, name = path.split(".")
    table: Any = tables
    for part in parents:
        table = table.get(part, {}) if isinstance(table, dict) else {}
    if path.startswith(("job", "optimizer")) or not isinstance(table, dict) or name not in table:
        return "", None
    return path, table.pop(name)


def _table(tables: dict[str, Any], name: str) -> dict[str, Any]:
    return tables[name] if isinstance(tables.get(name), dict) else {}


def _put(tables: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for part in parents:
        tables = tables.setdefault(part, {})
    tables[name] = value


def _written(key: str, value: Any) -> str:
    return " ".join(tomli_w.dumps({key.rpartition(".")[2]: value}).split()).join((f"[{key.rpartition('.')[0]}] ", ""))


def main(argv: Sequence[str] | None = None, prog: str = "dmuon convert-config") -> int:
    """Exit code 0, or 2 with a reason on standard error."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Write a TOML file of TorchTitan 0.1 or 0.2 as one of 0.3, comments aside."
    )
    parser.add_argument("config", metavar="OLD.toml")
    parser.add_argument("--out", type=Path, metavar="NEW.toml", help="default: OLD.converted.toml beside it")
    args = parser.parse_args(argv)
    out = args.out or Path(args.config).with_suffix(".converted.toml")
    try:
        if out.exists():
            raise ConfigError(f"{out} exists: name another file with --out")
        text = convert(toml_config.read(args.config), args.config)
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except (ConfigError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    lost = sum(line.startswith("#   ") for line in text.splitlines())
    print(f"{out}: read and checked; {lost} keys were not carried over, its head says why")
    return 0


if __name__ == "__main__":
    sys.exit(main())
