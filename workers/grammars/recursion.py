"""Find the parts of a JSON Schema that refer to themselves without end, so that no JSON text can
satisfy them.
"""

from __future__ import annotations

from typing import Any

from workers.grammars.schema_walk import children
from workers.text.errors import FormatError

_WITH_PARTS = frozenset({"object", "array"})


def cut_endless(nodes: list[dict[str, Any]], root: dict[str, Any], pointed: dict[str, Any]) -> None:
    """Replace by `false` each reference that never ends: an answer that took it could never be
    completed.

    `nodes` are all schemas inside `root`, innermost first; `pointed` has the targets of references.
    Raises FormatError if the whole schema never ends.
    """
    if not pointed:
        return
    ending = _find_ending(nodes, pointed)
    if id(root) not in ending:
        endless = [name for name, target in pointed.items() if isinstance(target, dict) and id(target) not in ending]
        raise FormatError(
            "The schema is recursive without end, so that no JSON text can meet it: give"
            f" {endless[0] if endless else 'it'} an alternative that does not refer to itself."
        )
    for node in nodes:
        for container, key, child in list(children(node)):
            if isinstance(child, dict) and "$ref" in child and id(child) not in ending:
                container[key] = False


def _find_ending(nodes: list[dict[str, Any]], pointed: dict[str, Any]) -> set[int]:
    """Return the schemas, by `id`, that a text of finite length can satisfy as far as recursion
    goes.

    This is the least fixed point.
    """
    ending: set[int] = set()
    left = nodes
    while left:
        still = [node for node in left if not _marks(node, ending, pointed)]
        if len(still) == len(left):
            break
        left = still
    return ending


def _marks(node: dict[str, Any], ending: set[int], pointed: dict[str, Any]) -> bool:
    if _ends(node, ending, pointed):
        ending.add(id(node))
        return True
    return False


def _ends(node: dict[str, Any], ending: set[int], pointed: dict[str, Any]) -> bool:
    def good(schema: Any) -> bool:
        return not isinstance(schema, dict) or id(schema) in ending

    reference = node.get("$ref")
    if isinstance(reference, str) and not good(pointed.get(reference)):
        return False
    if not all(map(good, _items(node.get("allOf")))):
        return False
    for name in ("anyOf", "oneOf"):
        options = _items(node.get(name))
        if options and not any(map(good, options)):
            return False
    if "const" in node or "enum" in node:
        return True
    return _has_ending_type(node, good)


def _has_ending_type(node: dict[str, Any], good: Any) -> bool:
    given = node.get("type")
    types = [given] if isinstance(given, str) else _items(given)
    if not types or not _WITH_PARTS.issuperset(name for name in types if isinstance(name, str)):
        return True
    return ("object" in types and all(map(good, _required(node)))) or (
        "array" in types and all(map(good, _first_items(node)))
    )


def _required(node: dict[str, Any]) -> list[Any]:
    """Return the schemas of the required properties."""
    properties = node.get("properties")
    named = properties if isinstance(properties, dict) else {}
    other = node.get("additionalProperties", True)
    required = [named.get(name, other) for name in _items(node.get("required")) if isinstance(name, str)]
    least = node.get("minProperties")
    return [*required, other] if isinstance(least, int) and least > len(named) else required


def _first_items(node: dict[str, Any]) -> list[Any]:
    """Return the schemas of the required items."""
    least = node.get("minItems")
    if not isinstance(least, int) or least <= 0:
        return []
    items = node.get("items", True)
    first = items if isinstance(items, list) else _items(node.get("prefixItems"))
    rest = node.get("additionalItems", True) if isinstance(items, list) else items
    return [*first[:least], *([rest] if least > len(first) else [])]


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
