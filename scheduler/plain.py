"""Typed data to plain data (what JSON holds) and back, strictly.

    to_plain(Scenario(...)) -> dict, list, str, int, float, bool, None
    from_plain(Scenario, data) -> Scenario, or PlainError with the path of what is wrong

Knows dataclasses (by field names), named and other tuples, mappings, enums (by value), new types,
unions with None and the JSON scalars. Unknown keys, missing keys and wrong types are errors; a
`ValueError` of a `__post_init__` is one too. For scenario files, recordings and reports.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


class PlainError(ValueError):
    """The data does not fit the type: `path: what is wanted, not what is there`."""


def to_plain(value: object) -> object:
    if isinstance(value, Enum):
        return cast(object, value.value)
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[T], data: object, path: str = "") -> T:
    """Raises PlainError."""
    return cast(T, _read(kind, data, path))


def _read(kind: object, data: object, path: str) -> object:
    kind = getattr(kind, "__supertype__", kind)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        inner = [option for option in get_args(kind) if option is not type(None)]
        return None if data is None else _read(inner[0], data, path)
    if origin is tuple:
        return _read_tuple(get_args(kind), data, path)
    if origin is not None and issubclass(origin, Mapping):
        return _read_mapping(get_args(kind), data, path)
    if isinstance(kind, type):
        if is_dataclass(kind):
            return _read_fields(kind, data, path)
        if issubclass(kind, Enum):
            return _call(kind, path, data)
        if issubclass(kind, tuple):
            items = _read_tuple(tuple(hints_of(kind).values()), data, path)
            return _call(cast(Callable[..., object], kind), path, *items)
        return _read_scalar(kind, data, path)
    raise TypeError(f"{path}: {kind!r} is not supported")


def _read_scalar(kind: type, data: object, path: str) -> object:
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind or (isinstance(data, float) and not math.isfinite(data)):
        _wrong(path, kind.__name__, data)
    return data


def _read_tuple(kinds: tuple[object, ...], data: object, path: str) -> tuple[object, ...]:
    if not isinstance(data, list | tuple):
        _wrong(path, "a list", data)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(data)
    if len(kinds) != len(data):
        _wrong(path, f"{len(kinds)} items", data)
    pairs = zip(kinds, data, strict=True)
    return tuple(_read(kind, item, f"{path}.{index}") for index, (kind, item) in enumerate(pairs))


def _read_mapping(kinds: tuple[object, ...], data: object, path: str) -> dict[object, object]:
    """Keys that are integers stand in JSON as text."""
    if not isinstance(data, Mapping):
        _wrong(path, "a mapping", data)
    is_number = getattr(kinds[0], "__supertype__", kinds[0]) is int
    return {
        _call(int, path, key) if is_number else key: _read(kinds[1], item, f"{path}.{key}")
        for key, item in data.items()
    }


def _read_fields(kind: type, data: object, path: str) -> object:
    if not isinstance(data, Mapping):
        _wrong(path, "a mapping", data)
    dot, known = path and path + ".", {field.name: field for field in fields(kind)}
    for key in data:
        if key not in known:
            raise PlainError(f"{dot}{key}: unknown; there are: {', '.join(known)}")
    for name, field in known.items():
        if name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise PlainError(f"{dot}{name}: is missing")
    hints = hints_of(kind)
    given = {name: _read(hints[name], item, f"{dot}{name}") for name, item in data.items()}
    return _call(kind, path, **given)


def _call(kind: Callable[..., object], path: str, *given: object, **named: object) -> object:
    try:
        return kind(*given, **named)
    except ValueError as error:
        raise PlainError(f"{path or 'here'}: {error}") from None


@cache
def hints_of(kind: type) -> dict[str, object]:
    """The types of its fields, in their order."""
    return get_type_hints(kind)


def _wrong(path: str, wanted: str, data: object) -> NoReturn:
    raise PlainError(f"{path or 'here'}: wanted {wanted}, not {str(data)[:80]!r}")
