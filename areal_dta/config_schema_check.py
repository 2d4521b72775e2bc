"""Check a nested mapping against the key tables, fill in defaults and build the records of `config_schema`.

A type is spelled as in `areal_keys.json`: ``int float bool str dict``, ``list[T]``, ``@Section``, each with ``?`` when
it may be null; ours may also be ``Bytes``, a number of bytes with an optional unit. Everything here is pure: no file
but the key table is read, nothing is mutated.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from areal_dta import config_schema

__all__ = ["ConfigError", "Key", "build", "fill", "is_areal_key", "nearest", "parse_bytes", "sections", "table"]

MANDATORY = "???"
ENFORCED_CHOICES = ("OptimizerConfig", "NormConfig", "RejectionSamplingConfig")
ROOT = "PPOConfig"
COPIES = ("ref.", "critic.", "teacher.", "eval_gconfig.", "valid_dataset.")  # sections that repeat another's keys
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKMGT])(i?)B?|B)?")
T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key, its value and the remedy."""


@dataclass(frozen=True)
class Key:
    """One key of a section: spelled type, default (`???`: mandatory), allowed values, whether a record carries it."""

    spelled: str
    default: Any
    choices: tuple[Any, ...] = ()
    typed: bool = False
    areal: bool = False


@functools.cache
def table() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "areal_keys.json").read_text())


@functools.cache
def sections() -> dict[str, dict[str, Key]]:
    """AReaL's sections merged with ours; our records come first in each section and override defaults."""
    merged: dict[str, dict[str, Key]] = {}
    for name, rows in table()["sections"].items():
        enforced = name in ENFORCED_CHOICES
        merged[name] = {
            key: Key(row[0], row[1], tuple(row[2]) if enforced and len(row) > 2 else (), areal=True)
            for key, row in rows.items()
        }
    for name in config_schema.__all__ + [ROOT]:
        record = getattr(config_schema, name)
        known = merged.get(name, {})
        ours = {f.name: _key_of_field(f, hint, known.get(f.name)) for f, hint in _fields(record)}
        merged[name] = {**ours, **{k: v for k, v in known.items() if k not in ours}}
    return merged


def _fields(record: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(record)
    for f in dataclasses.fields(record):
        yield f, hints[f.name]


def _key_of_field(f: dataclasses.Field[Any], hint: Any, known: Key | None) -> Key:
    spelled, choices = _spell(hint)
    if known is not None:
        spelled, choices = known.spelled, choices or known.choices
    default: Any = MANDATORY if known is None else known.default
    if f.default is not dataclasses.MISSING:
        default = list(f.default) if isinstance(f.default, tuple) else f.default
    elif f.default_factory is not dataclasses.MISSING:
        default = f.default_factory()
    elif known is None and spelled.startswith("@"):
        default = {}
    return Key(spelled, default, choices, typed=True, areal=known is not None)


def _spell(hint: Any) -> tuple[str, tuple[Any, ...]]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner, choices = _spell(next(a for a in args if a is not type(None)))
        return inner + "?", choices
    if origin is typing.Literal:
        return "str", args
    if origin is tuple:
        return f"list[{_spell(args[0])[0]}]", ()
    if origin is dict:
        return "dict", ()
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return "@" + hint.__name__, ()
    return hint.__name__, ()


def fill(given: Mapping[str, Any], section: str = ROOT, path: str = "") -> dict[str, Any]:
    """Check every given key and value, and add the defaults of the keys that records carry.

    Keys the records do not carry stay exactly when given. Raises ConfigError for unknown keys, wrong types, values
    outside the allowed ones and missing mandatory keys.
    """
    keys = sections()[section]
    for name in given:
        if name not in keys:
            raise ConfigError(_unknown(path, str(name), given[name], keys))
    out: dict[str, Any] = {}
    for name, key in keys.items():
        where = f"{path}.{name}" if path else name
        if name in given:
            out[name] = _value(given[name], key, where)
        elif key.typed:
            if key.default == MANDATORY:
                raise ConfigError(f"{where} is missing; set it in the file or give {where}=VALUE")
            out[name] = _value(key.default, key, where)
    return out


def _value(value: Any, key: Key, where: str) -> Any:
    checked = _typed(value, key.spelled, where)
    if key.choices and checked is not None and checked not in key.choices:
        allowed = ", ".join(str(c) for c in key.choices)
        hint = nearest(str(checked), [str(c) for c in key.choices])
        raise ConfigError(f"{where}={checked} is not allowed; choose one of: {allowed}" + hint)
    return checked


def _typed(value: Any, spelled: str, where: str) -> Any:
    if spelled.endswith("?"):
        return None if value is None else _typed(value, spelled[:-1], where)
    if spelled.startswith("@"):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}={value!r} must be a section (a mapping of keys), not {_kind(value)}")
        return fill(value, spelled[1:], where)
    if spelled.startswith("list["):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}={value!r} must be a list, not {_kind(value)}")
        return [_typed(v, spelled[5:-1], f"{where}[{i}]") for i, v in enumerate(value)]
    if spelled == "dict":
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}={value!r} must be a mapping, not {_kind(value)}")
        return dict(value)
    return _scalar(value, spelled, where)


def parse_bytes(value: Any, where: str) -> int:
    """Bytes of a whole number or of text such as ``2GiB``, ``1.5 GB``, ``512M`` (i: powers of 1024). Raises
    ConfigError.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and float(value).is_integer():
        return int(value)
    found = _BYTES.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(f"{where}={value!r} must be a number of bytes, not negative; a unit may follow, as in 2GiB")
    number, prefix, binary = found.groups()
    return round(float(number) * (1024 if binary else 1000) ** (" KMGT".index(prefix.upper()) if prefix else 0))


def _scalar(value: Any, spelled: str, where: str) -> Any:
    if spelled == "Bytes":
        return parse_bytes(value, where)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if spelled == "int" and number and float(value).is_integer():
        return int(value)
    if spelled == "float" and number:
        return float(value)
    if spelled == "bool" and isinstance(value, bool):
        return value
    if spelled == "str" and (isinstance(value, str) or number):
        return str(value)
    named = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}[spelled]
    raise ConfigError(f"{where}={value!r} must be {named}, not {_kind(value)}")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        bool: "true/false",
        int: "a whole number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a section",
    }
    return names.get(type(value), type(value).__name__)


def nearest(name: str, known: list[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _unknown(path: str, name: str, value: Any, keys: Mapping[str, Key]) -> str:
    where = f"{path}.{name}" if path else name
    text = f"unknown key {where}={value!r}"
    if hint := nearest(name, list(keys)):
        prefix = f"{path}." if path else ""
        return text + hint.replace("did you mean ", f"did you mean {prefix}")
    by_leaf: dict[str, str] = {}
    for known in sorted(all_paths(), key=lambda p: (p.startswith(COPIES), p.count("."))):
        by_leaf.setdefault(known.rsplit(".", 1)[-1], known)
    if found := difflib.get_close_matches(name, by_leaf, n=1, cutoff=0.8):
        return f"{text}; did you mean {by_leaf[found[0]]}?"
    return f"{text}; valid keys of {path or 'the top level'}: {', '.join(keys)}"


@functools.cache
def all_paths() -> list[str]:
    """Every dotted key path of the merged schema, sections included."""
    out: list[str] = []

    def walk(section: str, prefix: str) -> None:
        for name, key in sections()[section].items():
            out.append(prefix + name)
            if key.spelled.startswith("@"):
                walk(key.spelled.strip("@?"), f"{prefix}{name}.")

    walk(ROOT, "")
    return out


def is_areal_key(section: str, name: str) -> bool:
    return name in table()["sections"].get(section, {})


def build(record: type[T], mapping: Mapping[str, Any]) -> T:
    """The record of a filled mapping; keys it does not carry are left out."""
    values: dict[str, Any] = {}
    for f, hint in _fields(record):
        values[f.name] = _convert(hint, mapping[f.name])
    return record(**values)


def _convert(hint: Any, value: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType) and value is not None:
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(typing.cast(type, hint), value)
    if typing.get_origin(hint) is tuple and value is not None:
        return tuple(value)
    return value
