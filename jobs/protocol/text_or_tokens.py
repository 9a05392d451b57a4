"""A text, or the token ids of one, in a call."""

from typing import Any

from jobs.protocol import fields
from jobs.protocol.value_types import Integer, Schema

SOME_TEXT: Schema = {"type": "string", "minLength": 1}
"""The JSON Schema of a text that is not empty."""

TOKEN_IDS: Schema = {"type": "array", "minItems": 1, "items": Integer(0).schema}
"""The JSON Schema of non-empty lists that `read_token_ids` accepts."""


def read_text_or_tokens(value: Any, param: str, like: Any = None, least: int = 0) -> str | list[int]:
    """Return a text of at least `least` characters, or token ids.

    `like` is the first item of a list, whose type all items must have. Raise `ApiError`.
    """
    if isinstance(value, str) and (like is None or isinstance(like, str)):
        return fields.text(value, param, least=least)
    if isinstance(value, list) and isinstance(like, list):
        return read_token_ids(fields.array(value, param, least=1), param)
    if like is None:
        return fields.wrong_type(value, "a string, an array of token ids, or an array of either", param)
    return fields.wrong_type(value, "a string" if isinstance(like, str) else "an array of token ids", param)


def read_token_ids(value: list[Any], param: str) -> list[int]:
    """Return the items of a list as token ids. Raise `ApiError`."""
    return fields.integers(value, param, 0, fields.INT32)
