"""Keywords of JSON Schema that the grammar library lacks, said with those that it has."""

from __future__ import annotations

from typing import Any

_NARROWER = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas"})


def rewrite(node: dict[str, Any]) -> None:
    """Change one schema, without those inside it, where that is possible without changing what it
    means; the other keywords stay, to be refused by name.
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
    """Without schemas beside it, all properties and items that it does not name are unevaluated."""
    for keyword, other in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if keyword in node:
            node.setdefault(other, node[keyword])
            del node[keyword]
