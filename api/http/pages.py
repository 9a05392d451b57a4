"""Pages of listings, as OpenAI's clients read them.

They take `limit` and `after`, and return `first_id`, `last_id` and `has_more`.
"""

import re
from typing import Any

from fastapi import Request

from api.http.openapi import query
from jobs.protocol import fields
from jobs.protocol.period import MOST_SECONDS, Period
from jobs.protocol.results import ApiError

_SECONDS = {"type": "integer", "minimum": 0, "maximum": MOST_SECONDS}
PERIOD = [
    query("created_after", "unix seconds; only what was created then or later", _SECONDS),
    query("created_before", "unix seconds; only what was created earlier", _SECONDS),
]
"""The parameters that `query_period` reads."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")


def query_integer(request: Request, name: str, low: int, high: int) -> int | None:
    """Return an integer of the query, None if it is absent. Raises `ApiError`."""
    text = request.query_params.get(name)
    if text is None:
        return None
    if not _INTEGER.fullmatch(text):
        fields.fail(
            f"Invalid value for '{name}': expected an integer, but got '{fields.shown(text)}' instead.",
            name,
            "invalid_value",
        )
    return fields.integer(int(text), name, low, high)


def query_choice(request: Request, name: str, choices: tuple[str, ...]) -> str | None:
    """Return one of the allowed words of the query, None if it is absent. Raises `ApiError`."""
    text = request.query_params.get(name)
    return None if text is None else fields.choice(text, name, choices)


def query_choices(request: Request, name: str, choices: tuple[str, ...]) -> list[str]:
    """Return all words of a parameter of the query.

    They are separated by commas, in repeated parameters, or in lists of OpenAI's clients
    (`name[]`). Raises `ApiError`.
    """
    given = [*request.query_params.getlist(name), *request.query_params.getlist(f"{name}[]")]
    return [fields.choice(word, name, choices) for text in given for word in text.split(",")]


def query_period(request: Request) -> Period:
    """Return the period in which listed objects were created. Raises `ApiError`."""
    return Period(*(query_integer(request, name, 0, MOST_SECONDS) for name in ("created_after", "created_before")))


def not_after(name: str) -> ApiError:
    """Return the error of a listing whose `after` is no listed object."""
    message = f"Invalid value for 'after': '{fields.shown(name)}' is no id of the objects listed here."
    return ApiError(400, message, param="after", code="invalid_value")


def envelope(objects: list[dict[str, Any]], has_more: bool, last_id: str | None = None) -> dict[str, Any]:
    """Return the `PageOf` these objects; `last_id` is that of the last one by default."""
    first, last = (objects[0]["id"], objects[-1]["id"]) if objects else (None, None)
    return {"object": "list", "data": objects, "first_id": first, "last_id": last_id or last, "has_more": has_more}
