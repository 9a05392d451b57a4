"""A span of time that a listing is narrowed to."""

from typing import NamedTuple

MOST_SECONDS = 2**32 - 1
"""The last moment that can be asked for, in unix seconds."""


class Period(NamedTuple):
    """From the unix second `first` on, and before `end`; without one where it is None."""

    first: int | None = None
    end: int | None = None

    def names(self, prefix: str, digits: int) -> tuple[str | None, str | None]:
        """Return between which texts names of the period lie, the second of them excluded.

        The names go on behind `prefix` with so many hex digits of microseconds.
        """
        first, end = (None if one is None else f"{prefix}{one * 1_000_000:0{digits}x}" for one in self)
        return first, end


ALWAYS = Period()
