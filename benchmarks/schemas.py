"""Random JSON schemas with a seed, like those for the extraction of records: named fields with
types and limits.
"""

import json
import random
from typing import Any

Schema = dict[str, Any]

_WORDS = (
    *("account", "address", "amount", "author", "category", "city", "code", "color", "comment", "company", "contact"),
    *("country", "created", "currency", "customer", "date", "delivery", "description", "discount", "email", "height"),
    *("invoice", "language", "length", "level", "location", "material", "model", "name", "note", "number", "order"),
    *("owner", "phone", "price", "product", "quantity", "rating", "region", "score", "size", "status", "street"),
    *("summary", "supplier", "title", "total", "unit", "user", "value", "version", "weight", "width", "year"),
)
_SCALARS = ("text", "text", "name", "choice", "integer", "number", "flag", "date", "code", "nullable")
_NESTED = ("list", "record", "records")


def schema_of_fields(draw: random.Random, fields: int, depth: int = 1) -> Schema:
    """Return a schema of an object with `fields` required fields.

    Some fields hold lists and objects, nested down to `depth`.
    """
    names = [f"{draw.choice(_WORDS)}_{draw.choice(_WORDS)}_{number}" for number in range(fields)]
    properties = {name: _field(draw, depth) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def any_schema(draw: random.Random) -> Schema:
    """Return a schema of 1 to 25 fields, nested up to three deep."""
    return schema_of_fields(draw, draw.randint(1, 25), draw.randint(0, 2))


def grammar_text(schema: Schema) -> str:
    """Return the grammar of a schema in the engine's form."""
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _field(draw: random.Random, depth: int) -> Schema:
    kind = draw.choice(_SCALARS + _NESTED if depth else _SCALARS)
    if kind == "list":
        return {"type": "array", "items": _scalar(draw, draw.choice(_SCALARS)), "maxItems": draw.randint(1, 6)}
    if kind == "record":
        return schema_of_fields(draw, draw.randint(2, 5), depth - 1)
    if kind == "records":
        return {"type": "array", "items": schema_of_fields(draw, draw.randint(2, 4), depth - 1), "maxItems": 3}
    return _scalar(draw, kind)


def _scalar(draw: random.Random, kind: str) -> Schema:
    match kind:
        case "text":
            return {"type": "string", "maxLength": draw.randint(20, 80)}
        case "name":
            return {"type": "string", "minLength": 1, "maxLength": draw.randint(8, 30)}
        case "choice":
            return {"enum": sorted({draw.choice(_WORDS) for _ in range(draw.randint(2, 9))})}
        case "integer":
            low = draw.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(1, 100_000)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": draw.randint(1, 1_000_000)}
        case "flag":
            return {"type": "boolean"}
        case "date":
            return {"type": "string", "format": draw.choice(("date", "date-time", "time"))}
        case "code":
            return {"type": "string", "pattern": f"^[A-Z]{{2,{draw.randint(3, 6)}}}-[0-9]{{{draw.randint(2, 8)}}}$"}
        case _:
            return {"anyOf": [{"type": "string", "maxLength": 40}, {"type": "null"}]}
