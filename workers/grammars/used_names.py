"""Remove patterns of property names that match no name besides those in `properties`.

llguidance would allow a comma for one more property whose name no text can be, and the answer could
never be completed.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from llguidance import LLMatcher

from workers.engine.guides.vocabulary import Vocabulary

_NULL: dict[str, Any] = {"type": "null"}


def replace_used_patterns(node: dict[str, Any]) -> None:
    """Move the schema of each such pattern to the properties that it matches, and forbid further
    properties if none has a name.
    """
    patterns = node.get("patternProperties")
    if not isinstance(patterns, dict) or not patterns:
        return
    names = _names(node)
    for pattern in list(patterns):
        matched = _matched(pattern, names)
        if _is_used_up(matched, {pattern: _NULL}, False):
            _require(node, matched, patterns.pop(pattern))
    is_open = node.get("additionalProperties", True) is not False
    if is_open and patterns and _is_used_up(names, dict.fromkeys(patterns, False), _NULL):
        node["additionalProperties"] = False


def _names(node: dict[str, Any]) -> list[str]:
    named, required = node.get("properties"), node.get("required")
    listed = [*(named if isinstance(named, dict) else ()), *(required if isinstance(required, list) else ())]
    return list(dict.fromkeys(name for name in listed if isinstance(name, str)))


def _require(node: dict[str, Any], names: list[str], schema: Any) -> None:
    """Make each of these properties meet a schema."""
    properties = node.setdefault("properties", {})
    for name in names:
        properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema


def _matched(pattern: str, names: list[str]) -> list[str]:
    """Return the names that a pattern matches, as llguidance reads it."""
    matcher = _object({}, {pattern: _NULL}, False)
    texts = {name: ("{" + json.dumps(name, ensure_ascii=False) + ":").encode(errors="replace") for name in names}
    return [name for name, text in texts.items() if matcher.validate_tokens(list(text)) == len(text)]


def _is_used_up(names: list[str], patterns: dict[str, Any], additional: Any) -> bool:
    """Return whether an object cannot have a property besides `names`."""
    matcher = _object(dict.fromkeys(names, False), patterns, additional, minProperties=1)
    matcher.consume_tokens(list(b"{"))
    matcher.compute_bitmask()
    return matcher.is_error() and matcher.get_error().startswith("NoExtension")


def _object(properties: dict[str, Any], patterns: dict[str, Any], additional: Any, **more: int) -> LLMatcher:
    schema = {
        "type": "object",
        "properties": properties,
        "patternProperties": patterns,
        "additionalProperties": additional,
        "x-guidance": {"whitespace_flexible": False},
        **more,
    }
    return _bytes().compile(json.dumps({"grammars": [{"json_schema": schema}]}))


@cache
def _bytes() -> Vocabulary:
    """Return a vocabulary of one token for each byte."""
    return Vocabulary([bytes([byte]) for byte in range(256)], 256)
