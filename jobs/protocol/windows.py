"""Completion windows as operators and clients write them: 24h, 30m, 10s."""

import re

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST = 366 * 86400


def window_seconds(text: str) -> int:
    """The length of a window. Raises ValueError for what is none."""
    match = re.fullmatch(r"([1-9][0-9]{0,7})([smhd])", text)
    if match is None or (seconds := int(match[1]) * _SECONDS[match[2]]) > _LONGEST:
        raise ValueError(f"{text!r} is no length of time up to a year, such as 24h, 30m or 10s")
    return seconds
