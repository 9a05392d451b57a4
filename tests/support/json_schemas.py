"""JSON Schemas at random, of the kinds that public collections have: bounded, so that every answer
that meets one is short.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ("id", "name", "kind", "tags", "address", "größe", "zip-code", "is_open", "items", "$price", "a b", "notes")
_WORDS = ("red", "green", "blue", "Größe", 'say "hi"', "a\\b", "", "naïve 🙂", "line\nfeed", "0")
_PATTERNS = (
    "^[A-Z]{2}-[0-9]{4}$",
    r"^\d{3}(-\d{2})?$",
    "^(yes|no|maybe)$",
    "^[a-f0-9]{8}$",
    r"^\+?[1-9]\d{1,10}$",
    "^v[0-9]{1,2}\\.[0-9]{1,2}(\\.[0-9]{1,2})?$",
    "^.{1,8}$",
)
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6")


class SchemaMaker:
    """Makes one schema after the other."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._definitions: dict[str, Schema] = {}

    def make(self) -> Schema:
        """Return a schema of an object with up to ten properties."""
        self._definitions = {}
        draft = self._chance.choice(["$defs", "definitions"])
        for number in range(self._chance.randrange(3)):
            self._definitions[f"#/{draft}/part{number}"] = self._any(2)
        schema = self._object(0, self._chance.randint(1, 10))
        if self._definitions:
            schema[draft] = {name.rpartition("/")[2]: part for name, part in self._definitions.items()}
        if self._chance.random() < 0.3:
            schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        if self._chance.random() < 0.3:
            schema |= {"title": "Made at random", "description": "A schema of a test."}
        return schema

    def _any(self, depth: int) -> Schema:
        makers: list[Callable[[int], Schema]] = [
            self._string,
            self._pattern,
            self._format,
            self._enum,
            self._constant,
            self._integer,
            self._number,
            self._plain,
        ]
        if depth < 3:
            makers += [
                self._array,
                self._tuple,
                self._map,
                self._object,
                self._any_of,
                self._one_of,
                self._all_of,
                self._nullable,
            ]
        if depth < 3 and self._definitions:
            makers += [self._reference, self._reference]
        return self._chance.choice(makers)(depth + 1)

    def _string(self, depth: int) -> Schema:
        least = self._chance.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + self._chance.randrange(12)}

    def _pattern(self, depth: int) -> Schema:
        return {"type": "string", "pattern": self._chance.choice(_PATTERNS)}

    def _format(self, depth: int) -> Schema:
        return {"type": "string", "format": self._chance.choice(_FORMATS)}

    def _enum(self, depth: int) -> Schema:
        values: list[Any] = list(self._chance.sample(_WORDS, self._chance.randint(1, 6)))
        if self._chance.random() < 0.2:
            return {"enum": [*values, 1, -2.5, None, True, {"a": [1]}]}
        return {"type": "string", "enum": values}

    def _constant(self, depth: int) -> Schema:
        return {"const": self._chance.choice([*_WORDS, 7, 1.5, None, False, [1, "two"], {"a": None}])}

    def _integer(self, depth: int) -> Schema:
        low = self._chance.randint(-2000, 2000)
        schema: Schema = {"type": "integer", self._chance.choice(["minimum", "exclusiveMinimum"]): low}
        schema[self._chance.choice(["maximum", "exclusiveMaximum"])] = low + self._chance.randint(15, 5000)
        if self._chance.random() < 0.3:
            schema["multipleOf"] = self._chance.choice([2, 5, 7])
        return schema

    def _number(self, depth: int) -> Schema:
        if self._chance.random() < 0.3:
            step = self._chance.choice([0.25, 0.5, 10])
            return {"type": "number", "minimum": 0, "maximum": 100, "multipleOf": step}
        low = round(self._chance.uniform(-100, 100), self._chance.randrange(4))
        return {"type": "number", "minimum": low, "maximum": low + self._chance.choice([0.5, 1, 10.25, 1000])}

    def _plain(self, depth: int) -> Schema:
        return {"type": self._chance.choice(["boolean", "null"])}

    def _array(self, depth: int) -> Schema:
        least = self._chance.randrange(3)
        bounds = {"minItems": least, "maxItems": least + self._chance.randrange(4)}
        unique = {"uniqueItems": True} if self._chance.random() < 0.05 else {}  # of which not all can be had
        return {"type": "array", "items": self._any(depth), **bounds, **unique}

    def _map(self, depth: int) -> Schema:
        bounds = {"minProperties": self._chance.randrange(2), "maxProperties": self._chance.randint(1, 3)}
        names = r"^[a-z]{2,6}(_[0-9])?$"
        if self._chance.random() < 0.5:
            named = {"patternProperties": {names: self._any(depth)}, "additionalProperties": False}
        else:
            named = {"propertyNames": {"pattern": names}, "additionalProperties": self._any(depth)}
        return {"type": "object", **named, **bounds}

    def _tuple(self, depth: int) -> Schema:
        parts = [self._any(depth) for _ in range(self._chance.randint(1, 3))]
        bounds = {"minItems": len(parts), "maxItems": len(parts)}
        if self._chance.random() < 0.5:
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
        return {"type": "array", "prefixItems": parts, **bounds}

    def _object(self, depth: int, size: int | None = None) -> Schema:
        names = self._chance.sample(_NAMES, size or self._chance.randint(1, 4))
        schema: Schema = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        if self._chance.random() < 0.8:
            schema["required"] = [name for name in names if self._chance.random() < 0.7]
        if self._chance.random() < 0.7:
            schema["additionalProperties"] = False
        return schema

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._chance.randint(2, 3))]}

    def _one_of(self, depth: int) -> Schema:
        kinds = self._chance.sample(["circle", "square", "line"], 2)
        return {"oneOf": [self._tagged(kind, depth) for kind in kinds]}

    def _tagged(self, kind: str, depth: int) -> Schema:
        return {
            "type": "object",
            "properties": {"kind": {"const": kind}, "size": self._any(depth)},
            "required": ["kind"],
            "additionalProperties": False,
        }

    def _all_of(self, depth: int) -> Schema:
        low = self._chance.randint(-50, 50)
        return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + self._chance.randint(0, 500)}]}

    def _nullable(self, depth: int) -> Schema:
        inner = self._any(depth)
        kind = inner.get("type")
        if isinstance(kind, str) and kind != "null" and "enum" not in inner:
            return {**inner, "type": [kind, "null"]}
        return {"anyOf": [inner, {"type": "null"}]}

    def _reference(self, depth: int) -> Schema:
        reference = {"$ref": self._chance.choice(list(self._definitions))}
        return {**reference, "description": "a part"} if self._chance.random() < 0.3 else reference
