"""Stop strings: text up to the first one is released, and what could still become one is held
back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one request's output text for its stop strings, which may straddle any number of
    tokens.

    The string that is complete first ends the text; of two that end at the same character the
    longer one counts. So what is released does not depend on how the text was cut into pieces.
    """

    __slots__ = ("_first_characters", "_held", "_include", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """With `include` the text ends with the string that was found, else before it."""
        self._include = include
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that may go out now; nothing more does once `matched` is set."""
        if self.matched is not None:
            return ""
        held, text = len(self._held), self._held + text
        first: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if 0 <= start <= held - len(stop):  # one that was passed by, within what is held back
                start = text.find(stop, held - len(stop) + 1)
            if start >= 0 and (first is None or (start + len(stop), start) < first[:2]):
                first = (start + len(stop), start, stop)
        if first is not None:
            self.matched = first[2]
            self._held = ""
            return text[: first[0] if self._include else first[1]]
        kept = self._possible_start(text)
        self._held = text[kept:]
        return text[:kept]

    def pass_by(self, text: str) -> str:
        """As `feed`, but none that is complete in this text counts; one that only begins in it
        still may.
        """
        text = self._held + text
        kept = self._possible_start(text)
        self._held = text[kept:]
        return text[:kept]

    def finish(self) -> str:
        """Return what was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Where the longest tail begins that a stop string could begin with."""
        for position in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[position] in self._first_characters:
                tail = text[position:]
                if any(stop.startswith(tail) and stop != tail for stop in self._stops):
                    return position
        return len(text)
