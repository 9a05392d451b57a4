"""Detect stop strings: release text up to the first one, and hold back text that may become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Search one request's output for its stop strings, which may span any number of tokens.

    The string that is complete first ends the text; if two end at the same character, the longer
    one counts. So the released text does not depend on how it was split.
    """

    __slots__ = ("_first_characters", "_held", "_include", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """With `include` the text ends after the stop string found, else before it."""
        self._include = include
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can be released now, none once `matched` is set."""
        if self.matched is not None:
            return ""
        held, text = len(self._held), self._held + text
        first: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if 0 <= start <= held - len(stop):  # one from `pass_by`, within the text held back
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
        """Feed text in which a complete stop string does not count, only one that begins in it."""
        text = self._held + text
        kept = self._possible_start(text)
        self._held = text[kept:]
        return text[:kept]

    def finish(self) -> str:
        """Return the text held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Return the start of the longest tail that a stop string could begin with."""
        for position in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[position] in self._first_characters:
                tail = text[position:]
                if any(stop.startswith(tail) and stop != tail for stop in self._stops):
                    return position
        return len(text)
