"""The example requests whose answers have structure: one with a schema, one with a tool.

The demo model was trained on neither. It gets these two right, by a wide margin at each token.
"""

from typing import Any

_NUMBER = {"type": "integer", "minimum": 10, "maximum": 99}
_SORTED = {"type": "array", "items": _NUMBER, "minItems": 4, "maxItems": 4}


def structured_requests() -> list[dict[str, Any]]:
    """Return both as batch lines."""
    form = {"name": "sorted_numbers", "strict": True, "schema": _object(Sorted=_SORTED)}
    add = {"name": "add", "description": "Add two numbers.", "parameters": _object(x=_NUMBER, y=_NUMBER)}
    return [
        _line(
            "example-schema",
            "Put these numbers in ascending order: 32, 97, 55, 69",
            response_format={"type": "json_schema", "json_schema": form},
        ),
        _line(
            "example-tool",
            "How much is 83 plus 20?",
            tools=[{"type": "function", "function": add}],
            tool_choice={"type": "function", "function": {"name": "add"}},
        ),
    ]


def _line(custom_id: str, asked: str, **parameters: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": asked}]
    body = {"model": "demo", "messages": messages, "max_tokens": 1024, "temperature": 0, **parameters}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def _object(**properties: Any) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
