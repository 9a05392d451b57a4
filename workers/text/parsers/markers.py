"""Search for markers in text that arrives in pieces."""

from __future__ import annotations

import re


class Markers:
    """Texts with a meaning for a parser, such as tags."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._longest = max(map(len, markers))
        self._first_characters = frozenset(marker[0] for marker in markers)
        self._pattern = re.compile("|".join(map(re.escape, markers)))

    def split(self, text: str, final: bool) -> tuple[str, str | None, str]:
        """Return the text before the first marker, the marker, and the text after it.

        Without a marker, return the text that belongs to none, None, and the tail that may begin
        one. With `final` the tail is empty.
        """
        if self._first_characters.isdisjoint(text):
            return text, None, ""
        found = self._pattern.search(text)
        if found is not None:
            return text[: found.start()], found.group(), text[found.end() :]
        end = len(text) if final else self._possible_start(text)
        return text[:end], None, text[end:]

    def _possible_start(self, text: str) -> int:
        for position in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[position] in self._first_characters:
                tail = text[position:]
                if any(marker.startswith(tail) for marker in self._markers):
                    return position
        return len(text)
