"""Parse parameter values that models write as plain text, by the types in a tool's JSON Schema."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_TEXT = frozenset({"string"})
_JSON_TYPES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (type(None), "null"),
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def parameter_types(tools: Sequence[Mapping[str, Any]], function: str, parameter: str) -> frozenset[str]:
    """Return the types that a parameter may have; only text if the tools do not declare it."""
    for tool in tools:
        described = _mapping(tool.get("function"))
        if described.get("name") == function:
            properties = _mapping(_mapping(described.get("parameters")).get("properties"))
            return frozenset(_types(properties.get(parameter))) or _TEXT
    return _TEXT


def is_text(types: frozenset[str]) -> bool:
    """Return whether a value of these types is always its text."""
    return types == _TEXT


def read_value(text: str, types: frozenset[str]) -> Any:
    """Return the value of a text under the first type that it fits: null, a number, a boolean, an
    object or a list, else the text.

    Text that fits none of its types is parsed as JSON; invalid JSON is a string.
    """
    readers: list[Callable[[str], Any]] = [read for wanted, read in _READERS if wanted & types]
    for read in [*readers, _json]:
        try:
            return read(text)
        except (ValueError, KeyError, RecursionError):
            continue
    return text


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _types(schema: Any) -> Iterator[str]:
    schemas = [schema]
    while schemas:
        described = _mapping(schemas.pop())
        named = described.get("type")
        yield from (each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str))
        yield from map(_type_of, _list(described.get("enum")))
        for choices in ("anyOf", "oneOf", "allOf"):
            schemas += _list(described.get(choices))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _type_of(value: Any) -> str:
    return next(name for kind, name in _JSON_TYPES if isinstance(value, kind))


def _null(text: str) -> None:
    if text.lower() != "null":
        raise ValueError(text)


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not math.isfinite(number):
            raise
        return int(number) if number.is_integer() else number


def _truth(text: str) -> bool:
    return _TRUTH[text.strip().lower()]


def _json(text: str) -> Any:
    value = json.loads(text)
    json.dumps(value, allow_nan=False)
    return value


_READERS: tuple[tuple[frozenset[str], Callable[[str], Any]], ...] = (
    (frozenset({"null"}), _null),
    (frozenset({"integer"}), int),
    (frozenset({"number"}), _number),
    (frozenset({"boolean"}), _truth),
    (frozenset({"object", "array"}), _json),
    (_TEXT, str),
)
