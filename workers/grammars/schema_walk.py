"""Iterate over the subschemas of a JSON Schema, and resolve its references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from workers.text.errors import FormatError

Schema = dict[str, Any] | bool

MAX_DEPTH = 100
"""Deepest nesting of a schema; llguidance's parser reads 127 levels."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLES = (
    "additionalProperties",
    "additionalItems",
    "items",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)


def subschemas(root: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all object schemas inside a schema, itself included, innermost first, and the targets
    of references at other places.

    Raises FormatError if it is nested too deeply.
    """
    found: list[dict[str, Any]] = []
    _collect(root, 0, found)
    known = set(map(id, found))
    while more := [
        target for target in targets(found, root).values() if isinstance(target, dict) and id(target) not in known
    ]:
        _collect(more[0], 0, found)
        known = set(map(id, found))
    return found


def children(node: dict[str, Any]) -> Iterator[tuple[dict[str, Any] | list[Any], Any, Any]]:
    """Yield possible schemas directly below a schema: the container, the key and the value."""
    for name in _MAPS:
        if isinstance(inner := node.get(name), dict):
            yield from ((inner, key, value) for key, value in inner.items())
    for name in _LISTS:
        if isinstance(listed := node.get(name), list):
            yield from ((listed, index, value) for index, value in enumerate(listed))
    for name in _SINGLES:
        if name in node:
            yield node, name, node[name]
    if isinstance(listed := node.get("items"), list):  # tuples before draft 2020-12
        yield from ((listed, index, value) for index, value in enumerate(listed))


def targets(nodes: list[dict[str, Any]], root: dict[str, Any]) -> dict[str, Any]:
    """Return the target of each reference in these schemas, by reference.

    References to other documents or to missing places are left out.
    """
    anchors = {f"#{node['$anchor']}": node for node in nodes if isinstance(node.get("$anchor"), str)}
    ids = {name: node for node in nodes for key in ("$id", "id") if isinstance(name := node.get(key), str)}
    known = {**ids, **anchors}
    found: dict[str, Any] = {}
    for node in nodes:
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in found:
            target = known.get(reference, _at_pointer(root, reference))
            if target is not None:
                found[reference] = target
    return found


def _at_pointer(root: dict[str, Any], reference: str) -> Any:
    if not reference.startswith("#"):
        return None
    place: Any = root
    for part in unquote(reference[1:]).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and part.isdecimal() and int(part) < len(place):
            place = place[int(part)]
        elif isinstance(place, dict) and part in place:
            place = place[part]
        else:
            return None
    return place


def _collect(node: dict[str, Any], depth: int, found: list[dict[str, Any]]) -> None:
    if depth > MAX_DEPTH:
        raise FormatError(f"The schema is nested deeper than {MAX_DEPTH} levels.")
    for _, _, child in children(node):
        if isinstance(child, dict):
            _collect(child, depth + 1, found)
    found.append(node)
