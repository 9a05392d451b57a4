"""Parse one call that is a JSON object with a name and arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection

from workers.text.parsers.json_value import JsonValue, decode_string, may_begin_value, skip_space

_State = Callable[[str, int], int]  # takes a text and a start position; returns the end position


class JsonCall:
    """The object of a call, piece by piece.

    A call is `announced` once its name is complete and its arguments have begun; from then on
    arguments are passed on as they arrive. Before that it may become `broken`, if it is not a call.
    Until it is announced, `take_raw` returns the text read.
    """

    def __init__(self, raw: str = "", keys: tuple[str, ...] = ("arguments",), lenient: bool = False) -> None:
        """Start a call.

        `raw` is the marker read before the object, `keys` the possible keys of the arguments. With
        `lenient`, arguments may be left out, be null, or be JSON in a string.
        """
        self.complete = self.broken = self.announced = False
        self._raw = [raw]
        self._keys = keys
        self._lenient = lenient
        self._name: str | None = None
        self._arguments: list[str] | None = None  # not taken yet; None before they begin
        self._taken = False
        self._key: str | None = None
        self._value = JsonValue('"')
        self._value_text: list[str] = []  # of a key or value that is needed complete
        self._read: _State = self._before_object

    def feed(self, text: str) -> int:
        """Return how many characters belong to the object."""
        position = 0
        while position < len(text) and not (self.complete or self.broken):
            position = self._read(text, position)
        if not self.announced:
            self._raw.append(text[:position])
            self.announced = self._name is not None and self._arguments is not None
        return position

    def give_up(self) -> None:
        """End a call that has no more text."""
        self.broken = not self.complete

    def cut(self, names: Collection[str]) -> None:
        """End a call that has no more text and certainly is one of these functions'.

        It is announced if its function is clear, else dropped.
        """
        if not (self.complete or self.broken or self.announced):
            self._name = self._name or self._only_name(names)
            self._arguments = self._arguments or []
            self.announced = self._name is not None
            self._raw.clear()
        self.give_up()

    def take(self) -> tuple[str | None, str]:
        """Return new arguments of an announced call; the first time, also its name."""
        if not self.announced or self._arguments is None:
            return None, ""
        name = None if self._taken else self._name
        self._taken = True
        arguments = "".join(self._arguments)
        self._arguments.clear()
        return name, arguments

    def take_raw(self) -> str:
        """Return the text read and not yet taken."""
        raw = "".join(self._raw)
        self._raw.clear()
        return raw

    def _before_object(self, text: str, position: int) -> int:
        return self._expect(text, position, "{", self._before_key)

    def _before_key(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if text.startswith("}", position):
            return self._end(position)
        if text.startswith('"', position):
            self._begin_value('"', self._in_key)
            return position
        self.broken = position < len(text)
        return position

    def _in_key(self, text: str, position: int) -> int:
        end = self._collect(text, position)
        if self._value.complete:
            self._key = decode_string("".join(self._value_text))
            self._read = self._after_key
        return end

    def _after_key(self, text: str, position: int) -> int:
        return self._expect(text, position, ":", self._before_value)

    def _before_value(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        first = text[position]
        if may_begin_value(first):
            self._begin_value(first, self._reader(first))
        else:
            self.broken = True
        return position

    def _reader(self, first: str) -> _State:
        """Return the reader of the value that begins with this character."""
        if self._key == "name" and self._name is None:
            return self._in_name
        if self._key not in self._keys or self._arguments is not None:
            return self._in_other
        if self._lenient and first not in "{[":
            return self._in_lenient_arguments
        self._arguments = []
        return self._in_arguments

    def _in_name(self, text: str, position: int) -> int:
        end = self._collect(text, position)
        if self._value.complete:
            self._name = decode_string("".join(self._value_text))
            self.broken = self._name is None
            self._read = self._after_value
        return end

    def _in_arguments(self, text: str, position: int) -> int:
        end = self._in_other(text, position)
        if self._arguments is not None:
            self._arguments.append(text[position:end])
        return end

    def _in_lenient_arguments(self, text: str, position: int) -> int:
        end = self._collect(text, position)
        if self._value.complete:
            value = "".join(self._value_text)
            inner = decode_string(value) if value.startswith('"') else None
            self._arguments = ["{}" if value == "null" else value if inner is None else inner]
            self._read = self._after_value
        return end

    def _in_other(self, text: str, position: int) -> int:
        end = self._value.feed(text, position)
        if self._value.complete:
            self._read = self._after_value
        return end

    def _after_value(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if text.startswith("}", position):
            return self._end(position)
        return self._expect(text, position, ",", self._before_key)

    def _end(self, position: int) -> int:
        if self._arguments is None and self._lenient:
            self._arguments = ["{}"]
        self.complete = self._name is not None and self._arguments is not None
        self.broken = not self.complete
        return position + 1

    def _expect(self, text: str, position: int, character: str, state: _State) -> int:
        position = skip_space(text, position)
        if text.startswith(character, position):
            self._read = state
            return position + 1
        self.broken = position < len(text)
        return position

    def _only_name(self, names: Collection[str]) -> str | None:
        """Return the one name that begins as the text does, or None."""
        begun = "".join(self._value_text)[1:] if self._read == self._in_name else ""
        fitting = [name for name in names if name.startswith(begun)]
        return fitting[0] if len(fitting) == 1 else None

    def _begin_value(self, first: str, state: _State) -> None:
        self._value = JsonValue(first)
        self._value_text.clear()
        self._read = state

    def _collect(self, text: str, position: int) -> int:
        end = self._value.feed(text, position)
        self._value_text.append(text[position:end])
        return end
