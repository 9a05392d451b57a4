"""Forbid further properties of objects that name some, unless the JSON Schema says otherwise.

xgrammar and OpenAI's strict mode do the same. Otherwise an answer could continue forever with
properties of any name.
"""

from __future__ import annotations

from typing import Any

from workers.grammars.schema_walk import children

_APPLICATORS = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties", "patternProperties", "minProperties"})


def close_objects(nodes: list[dict[str, Any]], pointed: dict[str, Any]) -> None:
    """Forbid further properties in each schema of `nodes` that names some.

    Schemas that apply to the same object stay unchanged, since one may require properties that
    another does not name. `pointed` has the targets of references.
    """
    shared = _find_shared(nodes, pointed)
    for node in nodes:
        if id(node) not in shared and _names_all(node):
            node["additionalProperties"] = False


def _names_all(node: dict[str, Any]) -> bool:
    """Return whether a schema describes an object only by some of its properties."""
    named, required = node.get("properties"), node.get("required", [])
    if not isinstance(named, dict) or not named or not isinstance(required, list):
        return False
    if (_APPLICATORS | _OF_OBJECTS - {"properties", "required"}) & node.keys():
        return False
    return all(isinstance(name, str) and name in named for name in required)


def _find_shared(nodes: list[dict[str, Any]], pointed: dict[str, Any]) -> set[int]:
    """Return the schemas, by `id`, whose values another schema also constrains."""
    left = [node for node in nodes if _combines(node)]
    shared: set[int] = set()
    while left:
        node = left.pop()
        if id(node) not in shared:
            shared.add(id(node))
            below = [child for _, _, child in children(node)]
            reference = node.get("$ref")
            below.append(pointed.get(reference) if isinstance(reference, str) else None)
            left += [child for child in below if isinstance(child, dict)]
    return shared


def _combines(node: dict[str, Any]) -> bool:
    """Return whether a value must satisfy more than one schema here."""
    applied = _APPLICATORS & node.keys()
    every = node.get("allOf")
    return (
        len(applied) > 1 or bool(applied and _OF_OBJECTS & node.keys()) or (isinstance(every, list) and len(every) > 1)
    )
