"""Tables of plain values into config classes, and config classes into tables.

Decides: how a value becomes a field of the declared type, which class a `type` key names, and how a config is written
so that reading it gives the same config. Does not read files and does not know the command line. Keeps: an error names
the dotted key, what was found and what was expected; `toml_config.py` adds file and line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import re
import reprlib
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from torchtitan_dmuon.titan import old_names
from torchtitan_dmuon.titan.config import ConfigError, raise_all

Path = tuple[str, ...]
NONE = "none"  # TOML has no null
ENOUGH = 40  # errors of one table: nobody reads more, and a file of 200,000 wrong keys is answered at once
_MISSING = dataclasses.MISSING
_NOUNS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "a table",
}


def nearest(name: str, options: Iterable[str]) -> str:
    """ " Did you mean ...?", or the list of valid names; a sentence to append to an error."""
    options = list(options)
    spelled = {option.lower(): option for option in options}
    close = [spelled[found] for found in difflib.get_close_matches(name[:100].lower(), spelled, n=2, cutoff=0.55)]
    if close:
        return f" Did you mean {' or '.join(map(repr, close))}?"
    return f" Valid: {', '.join(sorted(options))}." if options else ""


def mentioned(message: str, names: Iterable[str]) -> str:
    """The dotted name whose last part the message speaks of, or ""."""
    return next((n for n in sorted(names) if re.search(rf"\b{re.escape(n.rpartition('.')[2])}\b", message)), "")


class _Shown(reprlib.Repr):
    """Values in messages: short whatever a file holds, and never an error of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100
        self.maxlist = self.maxtuple = self.maxdict = 12

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 128 else f"an integer of {x.bit_length()} bits"


shown = _Shown().repr


class Merger:
    """Rebuilds config instances bottom up, so that each class's ``__post_init__`` checks the merged values.

    Everything that is wrong with a file is raised at once; a table with a wrong key is not built, nor are those
    around it.
    """

    def table(self, path: Path, hint: Any, table: dict[str, Any], current: Any) -> Any:
        """``table`` over ``current``, or over the defaults of the class that ``type`` or ``hint`` names."""
        values = dict(table)
        cls = self._class(path, hint, values, current)
        if cls is None:
            return None
        fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
        keep = {f.name for f in dataclasses.fields(current)} & fields.keys() if _is_config(current) else ()
        kwargs = {name: getattr(current, name) for name in keep}
        hints = field_types(cls)
        found: list[ConfigError] = []
        unseen = 0
        for count, (key, value) in enumerate(values.items()):
            if len(found) >= ENOUGH:
                raise_all(found, unseen + len(values) - count)
            try:
                if key not in fields:
                    self._unknown(path, key, value, fields)
                if key == "model_spec":
                    self.fail((*path, key), "the model comes from the registry config; [job] chooses it")
                kwargs[key] = self.value((*path, key), hints[key], value, kwargs.get(key, _default(fields[key])))
            except ConfigError as error:
                found += error.errors
                unseen += error.unseen
        raise_all(found, unseen)
        missing = [n for n, f in fields.items() if n not in kwargs and _default(f) is _MISSING]
        if missing:
            self.fail((*path, missing[0]), f"key {missing[0]!r} is missing")
        return self._build(path, cls, kwargs, values, current)

    def value(self, path: Path, hint: Any, value: Any, current: Any = _MISSING) -> Any:
        """One TOML value as the type ``hint``. ``current`` is what it replaces; a section merges into it."""
        members = choices(hint)
        classes = [t for t in members.values() if _is_config_type(t)]
        if value == NONE and type(None) in members.values():
            return None
        if _is_config(current) or classes:
            if isinstance(value, dict):
                return self.table(path, hint, value, current)
            if all(_is_config_type(t) or t is type(None) for t in members.values()):
                self.fail(path, f"{path[-1]!r} is a table: write [{'.'.join(path)}], not {path[-1]} = {shown(value)}")
        expected = []
        for option in members.values():
            done, result = self._as(path, option, value)
            if done:
                return result
            expected.append(result)
        said = " or ".join(e for e in expected if e)
        literals = [str(x) for t in members.values() if get_origin(t) is Literal for x in get_args(t)]
        hint_name = nearest(value, literals) if isinstance(value, str) and literals else ""
        hint_name = hint_name if hint_name.startswith(" Did") else ""
        self.fail(path, f"{path[-1]} = {shown(value)}: expected {said}, found {noun(value)}.{hint_name}")

    def _as(self, path: Path, option: Any, value: Any) -> tuple[bool, Any]:
        """(True, value as ``option``) or (False, what ``option`` expects)."""
        origin, args = get_origin(option), get_args(option)
        if option is Any or isinstance(option, (typing.TypeVar, str)):
            return True, _plain(value)
        if option is type(None):
            return False, f'"{NONE}"'
        if origin is Literal:
            legal = [x for x in args if type(x) is type(value) and x == value]
            return (True, legal[0]) if legal else (False, "one of " + ", ".join(map(_toml_repr, args)))
        if option is list or origin is list:
            if not isinstance(value, list):
                return False, "an array"
            item = args[0] if args else Any
            return True, [self.value((*path, str(i)), item, v) for i, v in enumerate(value)]
        if option is tuple or origin is tuple:
            if not isinstance(value, list):
                return False, "an array"
            items = (
                [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args) or [Any] * len(value)
            )
            if len(items) != len(value):
                return False, f"an array of {len(items)} items"
            return True, tuple(
                self.value((*path, str(i)), t, v) for i, (t, v) in enumerate(zip(items, value, strict=True))
            )
        if option is dict or origin is dict:
            if not isinstance(value, dict):
                return False, "a table"
            item = args[1] if args else Any
            return True, {k: self.value((*path, k), item, v) for k, v in value.items()}
        if option is float and (type(value) is float or type(value) is int and abs(value) <= sys.float_info.max):
            return True, float(value)
        if isinstance(option, type) and type(value) is option:  # `type() is`: a bool is no int
            return True, value
        if isinstance(option, type) and type(value) is str and hasattr(option, "__members__"):
            return (True, option(value)) if value in [m.value for m in option] else (False, f"one of {list(option)}")
        return False, _NOUNS.get(option, getattr(option, "__name__", str(option)))

    def _class(self, path: Path, hint: Any, values: dict[str, Any], current: Any) -> type | None:
        options = {n: t for n, t in variants(hint).items()}
        own_type = _is_config(current) and any(f.name == "type" for f in dataclasses.fields(current))
        wanted = None if own_type or "type" not in values else values.pop("type")
        if wanted is None:
            if _is_config(current):
                return type(current)
            if len(options) == 1:
                return next(iter(options.values()))
            self.fail(path, f"several variants are possible: set type to one of {', '.join(map(repr, options))}")
        key = (*path, "type")
        if not isinstance(wanted, str):
            self.fail(key, f"type = {shown(wanted)}: expected a string, found {noun(wanted)}")
        if wanted == NONE and type(None) in choices(hint).values():
            if values:
                self.fail(
                    (*path, next(iter(values))), f"type = '{NONE}' switches the section off and takes no other keys"
                )
            return None
        if wanted in options:
            return options[wanted]
        if ":" in wanted:
            return self._imported(key, wanted, list(options.values()))
        names = [*options, *([NONE] if type(None) in choices(hint).values() else [])]
        others = "Others are named 'package.module:Class'."
        self.fail(key, f"unknown variant {shown(wanted)}.{nearest(wanted, names)} {others}")

    def _imported(self, path: Path, name: str, bases: list[type]) -> type:
        module, _, qualname = name.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in qualname.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, ValueError) as error:
            self.fail(path, f"{name!r} cannot be imported: {error}")
        cls = found if _is_config_type(found) else getattr(found, "Config", None)
        if not _is_config_type(cls) or not any(issubclass(cls, base) for base in bases):
            self.fail(path, f"{name!r} is no {' or '.join(b.__qualname__ for b in bases)}")
        return cls

    def _unknown(self, path: Path, key: str, value: Any, fields: Mapping[str, Any]) -> None:
        """Raise for a key, or for each key of a table, that TorchTitan had before, or that is none."""
        under = {key: value}
        for part in reversed(path):
            under = {part: under}
        names = [name for name, _ in old_names.leaves(under)]
        told = [(name, old_names.explain(name)) for name in names[:ENOUGH]]
        if any(now for _, now in told):
            last = [name.rpartition(".")[2] for name, _ in told]
            unknown = [ConfigError(f"unknown key {k!r}. {now}", n, bool(now)) for k, (n, now) in zip(last, told)]
            raise_all(unknown, len(names) - len(told))
        what = "key" if path else "table or key"
        self.fail((*path, key), f"unknown {what} {shown(key)}.{nearest(key, [n for n in fields if n != 'model_spec'])}")

    def _build(self, path: Path, cls: type, kwargs: dict[str, Any], given: Mapping[str, Any], current: Any) -> Any:
        try:
            return cls(**kwargs)
        except ConfigError as error:
            raise ConfigError(str(error), ".".join((*path, error.path) if error.path else path)) from None
        except _REFUSALS as error:
            said = " ".join(str(error).split())[:500] or f"{cls.__qualname__} refused these values"
            key = mentioned(said, given)
            if not key and (key := _culprit(cls, kwargs, given, current)):
                said = f"{key.rpartition('.')[2]}: {said}"
            self.fail((*path, *key.split(".")) if key else path, said)

    def fail(self, path: Path, message: str) -> NoReturn:
        raise ConfigError(message, ".".join(path)) from None


_REFUSALS = (ValueError, AssertionError, TypeError, AttributeError)


def _culprit(cls: type, kwargs: dict[str, Any], given: Mapping[str, Any], current: Any) -> str:
    """The given key without which the class would take the values; "" where there is no such one."""
    for key in given if _is_config(current) and type(current) is cls else ():
        before, value = getattr(current, key), kwargs[key]
        tries = {key: before}
        if _is_config(value) and type(before) is type(value) and isinstance(given[key], dict):
            with contextlib.suppress(*_REFUSALS):
                tries = {
                    f"{key}.{k}": dataclasses.replace(value, **{k: getattr(before, k)})
                    for k in given[key]
                    if hasattr(before, k)
                }
        for name, instead in tries.items():
            with contextlib.suppress(*_REFUSALS):
                cls(**{**kwargs, key: instead})
                return name
    return ""


def variants(hint: Any) -> dict[str, type]:
    """Config classes that a section of this type can be, by the short name that ``type`` takes.

    A union's members go by their tyro names ("full", "selective"); other sections by the name of the class they build:
    the annotated one and its subclasses that are imported.
    """
    found: dict[str, type] = {}
    for name, option in choices(hint).items():
        if not _is_config_type(option):
            continue
        if len(choices(hint)) > 1 and not isinstance(name, int):
            found[name] = option
            continue
        queue = [option]
        while queue:
            cls = queue.pop(0)
            queue += cls.__subclasses__()
            owner = getattr(cls, "_owner", None)
            if owner is not None and getattr(owner, "Config", None) is cls:  # not a stale slots=True original
                found.setdefault(owner.__qualname__, cls)
            elif cls is option:
                found[cls.__qualname__] = cls
    return found


def field_types(cls: type) -> dict[str, Any]:
    """Types of the fields, each resolved in the module that wrote it (config modules may postpone annotations)."""
    types_: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(cls)}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base) and base.__module__ in sys.modules:
            try:
                types_.update(typing.get_type_hints(base, vars(sys.modules[base.__module__]), include_extras=True))
            except NameError:
                continue
    return types_


def choices(hint: Any) -> dict[Any, Any]:
    """Members of a union by tyro's name where annotated, else by position; one member when ``hint`` is no union."""
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        names = [n for note in notes if isinstance(n := getattr(note, "name", None), str)]
        if get_origin(inner) not in (Union, types.UnionType):
            return {names[-1] if names else 0: inner}
        hint = inner
    if get_origin(hint) not in (Union, types.UnionType):
        return {0: hint}
    out: dict[Any, Any] = {}
    for index, member in enumerate(get_args(hint)):
        for name, option in choices(member).items():
            out[name if isinstance(name, str) else index] = option
    return out


def _default(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default_factory is not _MISSING else field.default


def _is_config(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_config_type(value: Any) -> bool:
    return isinstance(value, type) and dataclasses.is_dataclass(value)


def _plain(value: Any) -> Any:
    """A value for a field of any type: arrays as tuples, as the registries write them, and "none" as None."""
    if isinstance(value, list):
        return tuple(_plain(v) for v in value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return None if value == NONE else value


def noun(value: Any) -> str:
    return next((noun for kind, noun in _NOUNS.items() if type(value) is kind), f"a {type(value).__name__}")


def _toml_repr(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else repr(value)


# --- config classes into tables -----------------------------------------------------------------------------------


def to_table(config: Any, hint: Any = None, left_out: list[str] | None = None, path: Path = ()) -> dict[str, Any]:
    """A config as nested tables that :class:`Merger` turns into an equal one. None becomes "none".

    Values that TOML cannot say are left out, their dotted keys appended to ``left_out``: the registry config that a
    file builds on provides them again.
    """
    left_out = [] if left_out is None else left_out
    out: dict[str, Any] = {}
    options = variants(hint) if hint is not None else {}
    if len(choices(hint)) > 1 or len(options) > 1:
        named = next((name for name, cls in options.items() if cls is type(config)), None)
        out["type"] = named or f"{type(config).__module__}:{type(config).__qualname__}"
    hints = field_types(type(config))
    for field in dataclasses.fields(config):
        if field.name == "model_spec" or not field.init:
            continue
        key = (*path, field.name)
        try:
            out[field.name] = _written(getattr(config, field.name), hints[field.name], left_out, key)
        except TypeError:
            left_out.append(".".join(key))
    return out


def _written(value: Any, hint: Any, left_out: list[str], path: Path) -> Any:
    if _is_config(value):
        return to_table(value, hint, left_out, path)
    if value is None:
        # A section switched off; TOML tables come after plain keys, so it is written as one.
        return {"type": NONE} if any(_is_config_type(t) for t in choices(hint).values()) else NONE
    if hasattr(value, "value") and hasattr(type(value), "__members__"):
        return value.value
    if isinstance(value, (list, tuple)):
        item = next((get_args(t)[0] for t in choices(hint).values() if get_origin(t) in (list, tuple)), None)
        return [_written(v, item, left_out, (*path, str(i))) for i, v in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: _written(v, None, left_out, (*path, k)) for k, v in value.items()}
    if isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{'.'.join(path)}: {type(value).__name__}")
