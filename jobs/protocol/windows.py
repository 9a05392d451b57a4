"""Completion windows in text form: 24h, 30m, 10s."""

import re

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST = 366 * 86400


def window_seconds(text: str) -> int:
    """Return the length of a window in seconds. Raise ValueError for any other text."""
    match = re.fullmatch(r"([1-9][0-9]{0,7})([smhd])", text)
    if match is None or (seconds := int(match[1]) * _SECONDS[match[2]]) > _LONGEST:
        raise ValueError(f"{text!r} is not a length of time up to a year, such as 24h, 30m or 10s")
    return seconds
