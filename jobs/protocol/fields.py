"""Reading a call's body, with errors in OpenAI's words that name the exact parameter."""

import math
import re
from collections.abc import Callable, Sized
from typing import Any, NoReturn, TypeVar

from jobs.protocol.results import ApiError

Read = TypeVar("Read")
Default = TypeVar("Default")

INT32 = 2**31 - 1
MOST_NAME = 64
NAME: dict[str, Any] = {"type": "string", "pattern": f"^[a-zA-Z0-9_-]{{1,{MOST_NAME}}}$"}
"""The JSON Schema of names that `name` accepts."""

_NAME = re.compile("[a-zA-Z0-9_-]+")
_MOST_SHOWN = 100  # characters of a bad value that an error repeats
_NAMES: dict[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def fail(message: str, param: str | None, code: str | None) -> NoReturn:
    """Raise OpenAI's error 400."""
    raise ApiError(400, message, param=param, code=code)


def wrong_type(value: Any, expected: str, param: str) -> NoReturn:
    """Raise an error for a value of another JSON type than expected."""
    got = _NAMES.get(type(value), "something else")
    fail(f"Invalid type for '{param}': expected {expected}, but got {got} instead.", param, "invalid_type")


def missing(param: str) -> NoReturn:
    """Raise an error for a required parameter that is missing."""
    fail(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")


def unsupported(param: str, why: str) -> NoReturn:
    """Raise an error for a value that OpenAI's API or vLLM's supports and this one does not."""
    fail(f"Unsupported value: '{param}' {why}", param, "unsupported_value")


def choice(value: Any, param: str, choices: tuple[str, ...]) -> str:
    """Return one of a few strings."""
    if text(value, param) not in choices:
        known = ", ".join(f"'{choice}'" for choice in choices)
        fail(f"Invalid value: '{shown(value)}'. Supported values are: {known}.", param, "invalid_value")
    return str(value)


def shown(value: str) -> str:
    """Return a bad value for an error message: one line of whole characters, shortened."""
    start = value[:_MOST_SHOWN]
    start = start if start.isprintable() else repr(start)[1:-1]
    return start if len(value) <= _MOST_SHOWN else f"{start}…"


def required(values: dict[str, Any], name: str, prefix: str = "") -> Any:
    """Return the value of a field that must be present and not null."""
    value = values.get(name)
    if value is None:
        missing(prefix + name)
    return value


def optional(
    values: dict[str, Any], name: str, read: Callable[[Any, str], Read], default: Default, prefix: str = ""
) -> Read | Default:
    """Return the value of a field as `read` returns it, or the default if it is absent or null."""
    value = values.get(name)
    return default if value is None else read(value, prefix + name)


def text(value: Any, param: str, most: int | None = None, least: int = 0) -> str:
    """Return a string of whole characters, at least `least` and at most `most` of them."""
    if not isinstance(value, str):
        wrong_type(value, "a string", param)
    _check_length(value, param, "a string", least, most)
    try:
        value.encode()
    except UnicodeEncodeError:
        fail(
            f"Invalid '{param}': the text has a lone surrogate, half of a character.",
            param,
            "invalid_value",
        )
    return value


def name(value: Any, param: str) -> str:
    """Return the name of a function or of a schema, in OpenAI's format."""
    if not _NAME.fullmatch(text(value, param, MOST_NAME, least=1)):
        fail(
            f"Invalid '{param}': string does not match pattern. Expected a string that matches the pattern"
            " '^[a-zA-Z0-9_-]+$'.",
            param,
            "invalid_value",
        )
    return str(value)


def boolean(value: Any, param: str) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        wrong_type(value, "a boolean", param)
    return value


def integer(value: Any, param: str, low: int, high: int) -> int:
    """Return an integer from `low` to `high`; it may be written as 4.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        wrong_type(value, "an integer", param)
    _check_range(value, param, "integer", low, high)
    return value


def integers(value: list[Any], param: str, low: int, high: int) -> list[int]:
    """Return a list of integers from `low` to `high`."""
    if set(map(type, value)) <= {int} and (not value or (low <= min(value) and max(value) <= high)):
        return value
    return [integer(item, f"{param}[{i}]", low, high) for i, item in enumerate(value)]


def number(value: Any, param: str, low: float, high: float) -> float:
    """Return a finite number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        wrong_type(value, "a decimal", param)
    if isinstance(value, float) and math.isnan(value):
        fail(f"Invalid '{param}': not a number.", param, "invalid_value")
    _check_range(value, param, "decimal", low, high)
    return float(value)


def array(value: Any, param: str, most: int | None = None, least: int = 0) -> list[Any]:
    """Return a list of at least `least` and at most `most` items."""
    if not isinstance(value, list):
        wrong_type(value, "an array", param)
    _check_length(value, param, "an array", least, most)
    return value


def mapping(value: Any, param: str, most: int | None = None) -> dict[str, Any]:
    """Return an object of at most `most` properties."""
    if not isinstance(value, dict):
        wrong_type(value, "an object", param)
    if most is not None and len(value) > most:
        expected = f"Expected an object with at most {most} properties"
        fail(
            f"Invalid '{param}': too many properties. {expected}, but got an object with {len(value)} properties"
            " instead.",
            param,
            "object_above_max_properties",
        )
    return value


def _check_length(value: Sized, param: str, kind: str, least: int, most: int | None) -> None:
    """Check the length of a value; `kind` is a noun with its article."""
    name = kind.split()[-1]
    if len(value) < least:
        fail(
            f"Invalid '{param}': empty {name}. Expected {kind} with minimum length {least}, but got an empty {name}"
            " instead.",
            param,
            f"empty_{name}",
        )
    if most is not None and len(value) > most:
        fail(
            f"Invalid '{param}': {name} too long. Expected {kind} with maximum length {most}, but got {kind} with"
            f" length {len(value)} instead.",
            param,
            f"{name}_above_max_length",
        )


def _check_range(value: int | float, param: str, kind: str, low: float, high: float) -> None:
    got = str(value) if abs(value) < 1e20 else "a very large one"
    if value < low:
        fail(
            f"Invalid '{param}': {kind} below minimum value. Expected a value >= {low}, but got {got} instead.",
            param,
            f"{kind}_below_min_value",
        )
    if value > high:
        fail(
            f"Invalid '{param}': {kind} above maximum value. Expected a value <= {high}, but got {got} instead.",
            param,
            f"{kind}_above_max_value",
        )
