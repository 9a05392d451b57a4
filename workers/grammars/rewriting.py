"""Express keywords of JSON Schema that the grammar library lacks by others that it has."""

from __future__ import annotations

from typing import Any

_NARROWER = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas"})


def rewrite(node: dict[str, Any]) -> None:
    """Rewrite one schema, without its subschemas, where its meaning stays the same; the other
    keywords stay and are refused by name.
    """
    if node.get("uniqueItems") is False or (node.get("uniqueItems") is True and _at_most_one(node)):
        del node["uniqueItems"]
    if "propertyNames" in node:
        _rewrite_names(node)
    if not _NARROWER & node.keys():
        _rewrite_unevaluated(node)


def _at_most_one(node: dict[str, Any]) -> bool:
    most = node.get("maxItems")
    return isinstance(most, int) and most <= 1


def _rewrite_names(node: dict[str, Any]) -> None:
    names = node["propertyNames"]
    if names is True or (isinstance(names, dict) and not names.keys() - {"type"}):
        del node["propertyNames"]  # names are strings
    elif isinstance(names, dict) and not {"properties", "patternProperties"} & node.keys():
        values = node.get("additionalProperties", True)
        listed = [names["const"]] if "const" in names else names.get("enum")
        if isinstance(listed, list) and not names.keys() - {"const", "enum", "type"}:
            node["properties"] = {name: values for name in listed if isinstance(name, str)}
        elif isinstance(names.get("pattern"), str) and not names.keys() - {"pattern", "type"}:
            node["patternProperties"] = {names["pattern"]: values}
        else:
            return
        node["additionalProperties"] = False
        del node["propertyNames"]


def _rewrite_unevaluated(node: dict[str, Any]) -> None:
    """Rewrite `unevaluated*`: without adjacent schemas, it covers all unnamed properties and
    items.
    """
    for keyword, other in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if keyword in node:
            node.setdefault(other, node[keyword])
            del node[keyword]
