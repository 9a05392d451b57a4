"""Reading a call's body with errors that name the exact parameter, in OpenAI's words."""

import math
from typing import Any, NoReturn

from jobs.results import ApiError

_NAMES: dict[type, str] = {
    str: "a string", bool: "a boolean", int: "an integer", float: "a decimal number", list: "an array", dict: "an object",
    type(None): "null",
}  # fmt: skip


def fail(message: str, param: str | None, code: str | None) -> NoReturn:
    """Raises the 400 that clients of OpenAI know."""
    raise ApiError(400, message, param=param, code=code)


def wrong_type(value: Any, expected: str, param: str) -> NoReturn:
    """A value of another JSON type than expected."""
    got = _NAMES.get(type(value), "something else")
    fail(f"Invalid type for '{param}': expected {expected}, but got {got} instead.", param, "invalid_type")


def missing(param: str) -> NoReturn:
    """A parameter that must be there."""
    fail(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")


def unsupported(param: str, why: str) -> NoReturn:
    """A value that OpenAI's API knows and this one cannot honour."""
    fail(f"Unsupported value: '{param}' {why}", param, "unsupported_value")


def text(value: Any, param: str) -> str:
    """A string of whole characters."""
    if not isinstance(value, str):
        wrong_type(value, "a string", param)
    try:
        value.encode()
    except UnicodeEncodeError:
        fail(f"Invalid '{param}': the text holds half of a surrogate pair, which is no character.", param, "invalid_value")
    return value


def boolean(value: Any, param: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        wrong_type(value, "a boolean", param)
    return value


def integer(value: Any, param: str, low: int, high: int) -> int:
    """An integer of at least `low` and at most `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        wrong_type(value, "an integer", param)
    _check_range(value, param, "integer", low, high)
    return value


def number(value: Any, param: str, low: float, high: float, above_low: bool = False) -> float:
    """A finite number of at least (or, with `above_low`, above) `low` and at most `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        wrong_type(value, "a decimal number", param)
    if isinstance(value, float) and math.isnan(value):
        fail(f"Invalid '{param}': not a number.", param, "invalid_value")
    _check_range(value, param, "decimal", low, high)
    if above_low and value == low:
        fail(f"Invalid '{param}': decimal below minimum value. Expected a value > {low:g}, but got {value:g} instead.", param,
             "decimal_below_min_value")  # fmt: skip
    return float(value)


def array(value: Any, param: str, most: int | None = None, least: int = 0) -> list[Any]:
    """A list of at least `least` and at most `most` items."""
    if not isinstance(value, list):
        wrong_type(value, "an array", param)
    if len(value) < least:
        fail(f"Invalid '{param}': empty array. Expected an array with at least {least} item, but got none.", param, "empty_array")
    if most is not None and len(value) > most:
        fail(f"Invalid '{param}': array too long. Expected at most {most} items, but got {len(value)} instead.", param,
             "array_above_max_length")  # fmt: skip
    return value


def mapping(value: Any, param: str) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        wrong_type(value, "an object", param)
    return value


def _check_range(value: int | float, param: str, kind: str, low: float, high: float) -> None:
    shown = str(value) if abs(value) < 1e20 else "a very large one"
    if value < low:
        fail(f"Invalid '{param}': {kind} below minimum value. Expected a value >= {low}, but got {shown} instead.", param,
             f"{kind}_below_min_value")  # fmt: skip
    if value > high:
        fail(f"Invalid '{param}': {kind} above maximum value. Expected a value <= {high}, but got {shown} instead.", param,
             f"{kind}_above_max_value")  # fmt: skip
