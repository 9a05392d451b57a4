"""Prepare a JSON Schema for llguidance: no keyword that loosens it, bounded whitespace, exact
dates, and no reference that can never end.
"""

from __future__ import annotations

import json
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from workers.grammars.closed_objects import close_objects
from workers.grammars.recursion import cut_endless
from workers.grammars.rewriting import rewrite
from workers.grammars.schema_walk import MAX_DEPTH, Schema, subschemas, targets
from workers.grammars.used_names import replace_used_patterns
from workers.text.errors import FormatError

WHITESPACE = r" |\n(?: {1,16}|\t{1,8})?"
"""Whitespace between the tokens of JSON by default: one space, or one line feed with an
indentation. Without a bound a model may emit whitespace forever.
"""

_MOST_OPTIONAL = 500
"""Most optional properties of an object: 2,000 items of the library's parser."""

_YEAR = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
"""Formats that llguidance lacks or implements loosely: it has no leap years."""

_NARROWER = {
    "idn-email": "email",
    "idn-hostname": "hostname",
    "iri": "uri",
    "iri-reference": "uri",
    "uri-reference": "uri",
    "uri-template": "uri",
}
"""Formats whose texts include all texts of another format."""

_BOUNDS = {
    "minimum": ROUND_CEILING,
    "exclusiveMinimum": ROUND_CEILING,
    "maximum": ROUND_FLOOR,
    "exclusiveMaximum": ROUND_FLOOR,
}
_BOUND_DECIMALS = 15
_KNOWN_FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})


def prepare_schema(source: str, whitespace: str | None = None) -> dict[str, Any]:
    """Return the schema to compile. Raises FormatError."""
    schema = parse_json(source, "The schema")
    if not isinstance(schema, dict | bool):
        raise FormatError("The schema must be a JSON object or a boolean.")
    return prepare_parsed(schema, whitespace)


def prepare_parsed(schema: Schema, whitespace: str | None = None) -> dict[str, Any]:
    """Prepare a parsed schema in place; otherwise as `prepare_schema`."""
    if schema is False:
        raise FormatError("The schema is false, which no JSON value can meet.")
    root: dict[str, Any] = {} if schema is True else schema
    for node in subschemas(root):
        _check_optional(node)
        rewrite(node)
        replace_used_patterns(node)
        _make_formats_exact(node)
        _round_bounds_inward(node)
    nodes = subschemas(root)
    pointed = targets(nodes, root)
    close_objects(nodes, pointed)
    cut_endless(nodes, root, pointed)
    root["x-guidance"] = whitespace_options(whitespace)
    return root


def parse_json(source: str, what: str) -> Any:
    """Return the value of a JSON text. Raises FormatError, whose sentence begins with `what`."""
    try:
        return json.loads(source, parse_constant=_refuse_constant)
    except RecursionError:
        raise FormatError(f"{what} is nested deeper than {MAX_DEPTH} levels.") from None
    except ValueError as error:
        raise FormatError(f"{what} is not valid JSON: {error}.") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def whitespace_options(whitespace: str | None) -> dict[str, Any]:
    """Return the llguidance options of a schema. They replace all options it came with."""
    if whitespace == "":
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": WHITESPACE if whitespace is None else whitespace}


def _check_optional(node: dict[str, Any]) -> None:
    named, required = node.get("properties"), _list(node.get("required"))
    if not isinstance(named, dict):
        return
    optional = named.keys() - {name for name in required if isinstance(name, str)}
    if len(optional) > _MOST_OPTIONAL:
        raise FormatError(
            f"An object of the schema has {len(optional)} optional properties, '{min(optional)}' among them, and at"
            f" most {_MOST_OPTIONAL} are supported: require the others, or put some into objects of their own."
        )


def _make_formats_exact(node: dict[str, Any]) -> None:
    """Replace formats by patterns or by other formats; drop unknown ones, since JSON Schema calls
    them annotations.
    """
    name = node.get("format")
    if not isinstance(name, str):
        return
    if name in _PATTERNS:
        del node["format"]
        pattern = f"^(?:{_PATTERNS[name]})$"
        if "pattern" in node:
            node["allOf"] = [*_list(node.get("allOf")), {"pattern": pattern}]
        else:
            node["pattern"] = pattern
    elif name in _NARROWER:
        node["format"] = _NARROWER[name]
    elif name not in _KNOWN_FORMATS:
        del node["format"]


def _round_bounds_inward(node: dict[str, Any]) -> None:
    """Round bounds inward to llguidance's number of decimals.

    llguidance rounds to the nearest decimal, which may allow too much.
    """
    for name, rounding in _BOUNDS.items():
        bound = node.get(name)
        if isinstance(bound, float) and round(bound, _BOUND_DECIMALS) != bound:
            node[name] = float(Decimal(repr(bound)).quantize(Decimal(1).scaleb(-_BOUND_DECIMALS), rounding))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
