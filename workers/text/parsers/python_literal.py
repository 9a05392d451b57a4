"""Parse calls and literals in Python syntax.

Python's own parser is not used: on deeply nested text it can crash the process.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any

_DEPTH = 50
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>[rRuUfF]{0,2}(?:\"\"\"(?:[^\\]|\\.)*?\"\"\"|'''(?:[^\\]|\\.)*?'''
        |"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'))
    |(?P<number>0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?)
    |(?P<name>[^\W\d]\w*)
    |(?P<sign>[()\[\]{},:=+\-.])
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:(\n)|([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\\": "\\", "'": "'", '"': '"'}
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def read_call(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a call such as `f(a=1, b=["x"])`.

    Raises ValueError for anything else.
    """
    return _Reader(text).read_call()


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._next = 0

    def read_call(self) -> tuple[str, dict[str, Any]]:
        name = self._take("name")
        while self._skip("."):
            name += "." + self._take("name")
        self._expect("(")
        arguments = {}
        while not self._skip(")"):
            key = self._take("name")
            self._expect("=")
            arguments[key] = self._value(0)
            if not self._skip(","):
                self._expect(")")
                break
        if self._next < len(self._tokens):
            raise ValueError("text behind the call")
        return name, arguments

    def _value(self, depth: int) -> Any:
        if depth > _DEPTH:
            raise ValueError("too deep")
        kind, text = self._peek()
        self._next += 1
        if kind == "string":
            return self._strings(text)
        if kind == "number":
            return _number(text)
        if kind == "name" and text in _WORDS:
            return _WORDS[text]
        if text in ("-", "+"):
            return self._signed(text, depth)
        if text in _CLOSING:
            return self._collection(text, depth)
        raise ValueError(f"{text} begins no literal")

    def _strings(self, first: str) -> str:
        """Read adjacent strings as one."""
        parts = [_string(first)]
        while self._peek()[0] == "string":
            parts.append(_string(self._take("string")))
        return "".join(parts)

    def _signed(self, sign: str, depth: int) -> int | float:
        value = self._value(depth + 1)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("a sign before what is no number")
        return -value if sign == "-" else value

    def _collection(self, opening: str, depth: int) -> Any:
        """Read a list, a tuple, a set or a dict as a list or an object, the only ones in JSON."""
        closing = _CLOSING[opening]
        items: list[Any] = []
        pairs: dict[Any, Any] = {}
        comma = False
        while not self._skip(closing):
            item = self._value(depth + 1)
            if opening == "{" and self._skip(":"):
                pairs[_key(item)] = self._value(depth + 1)
            else:
                items.append(item)
            comma = self._skip(",")
            if not comma:
                self._expect(closing)
                break
        return _collected(opening, items, pairs, comma)

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._next] if self._next < len(self._tokens) else ("", "")

    def _skip(self, sign: str) -> bool:
        found = self._peek() == ("sign", sign)
        self._next += found
        return found

    def _take(self, kind: str) -> str:
        found, text = self._peek()
        if found != kind:
            raise ValueError(f"no {kind}: {text}")
        self._next += 1
        return text

    def _expect(self, sign: str) -> None:
        if not self._skip(sign):
            raise ValueError(f"no {sign}")


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, position, text = [], 0, text.rstrip()
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None or found.lastgroup is None:
            raise ValueError(f"no token: {text[position : position + 10]}")
        tokens.append((found.lastgroup, found[found.lastgroup]))
        position = found.end()
    return tokens


def _number(text: str) -> int | float:
    if text[:2].lower() not in ("0x", "0o", "0b") and any(character in ".eE" for character in text):
        number = float(text)
        if not math.isfinite(number):
            raise ValueError("JSON has no infinity")
        return number
    return int(text, 0)


def _string(token: str) -> str:
    prefix = token[: min(token.find(quote) for quote in "'\"" if quote in token)].lower()
    body = token[len(prefix) :]
    width = 3 if body.startswith(('"""', "'''")) and len(body) >= 6 else 1
    body = body[width:-width]
    if "f" in prefix and ("{" in body or "}" in body):
        raise ValueError("a string with placeholders")
    return body if "r" in prefix else _ESCAPE.sub(_unescaped, body)


def _unescaped(found: re.Match[str]) -> str:
    line_break, octal, *hexadecimal, other = found.groups()
    if line_break:
        return ""
    if octal:
        return chr(int(octal, 8))
    if other:
        return _LETTERS.get(other, found.group())
    code = int(next(filter(None, hexadecimal)), 16)
    if code > sys.maxunicode:
        raise ValueError("no character")
    return chr(code)


def _key(value: Any) -> Any:
    if isinstance(value, list | dict):
        raise ValueError("no key of an object")
    return value


def _collected(opening: str, items: list[Any], pairs: dict[Any, Any], comma: bool) -> Any:
    if opening == "{" and pairs and items:
        raise ValueError("a set and a dict in one")
    if opening == "{" and not items:
        return pairs
    if opening == "(" and len(items) == 1 and not comma:
        return items[0]
    return items
