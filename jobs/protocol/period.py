"""The time range of a listing."""

from typing import NamedTuple

MOST_SECONDS = 2**32 - 1
"""The last moment that a range may name, in unix seconds."""


class Period(NamedTuple):
    """From the unix second `first` on, and before `end`; None means no limit."""

    first: int | None = None
    end: int | None = None

    def names(self, prefix: str, digits: int) -> tuple[str | None, str | None]:
        """Return the bounds of names in the period, the second one exclusive.

        A name is `prefix` followed by `digits` hex digits of microseconds.
        """
        first, end = (None if one is None else f"{prefix}{one * 1_000_000:0{digits}x}" for one in self)
        return first, end


ALWAYS = Period()
