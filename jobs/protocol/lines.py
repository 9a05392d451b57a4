"""The JSON reader for outside input, shared by every stage: strict UTF-8, then any JSON value.

Values are not validated here. The worker validates a request's body, and must read an unusual line
in the same way as the API did when it accepted the file.
"""

import itertools
import json
import re
from typing import Any

import msgspec

BOM = b"\xef\xbb\xbf"
_MOST_DIGITS = 4300  # that Python reads
MOST_NESTED = 500
"""Most levels of nested arrays and objects.

Readers recurse, and their limit depends on the caller's stack; each caller can read this depth.
"""

_MOST_VALUES = 2_000_000  # in one text; an empty value of 3 bytes takes up to 100 as an object

_STEPS = [{ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}.get(byte, 0) for byte in range(256)]
# An unterminated string matches to the end; otherwise each quote inside would start a new search.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_AT_ONCE = 4096  # brackets per step, so that excessive depth is found early
_NO_BRACKETS = bytes(byte for byte, step in enumerate(_STEPS) if step == 0)


class Line(msgspec.Struct, frozen=True):
    """A line that `validation.check_line` accepts."""

    custom_id: str
    url: str
    model: str  # "" if the line names none and no default is known
    body: bytes  # JSON for `decode_json`, as in the line if possible
    values: dict[str, Any] = {}  # of the body, if `check_line` has read it


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw


class _Model(msgspec.Struct):
    model: str | None = None


_line_decoder = msgspec.json.Decoder(_Line)
_model_decoder = msgspec.json.Decoder(_Model)


def decode_json(raw: bytes) -> Any:
    """Return the value of JSON text; it may have lone surrogates, NaN and numbers out of range.

    Raise ValueError with the reason.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error
    opened = raw.count(b"[") + raw.count(b"{")
    if opened > MOST_NESTED or opened + raw.count(b",") > _MOST_VALUES:
        _check_shape(raw)
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        try:
            return json.loads(text, parse_int=_integer)
        except ValueError:
            raise ValueError(_reason(raw, error)) from error


def encode_body(body: dict[str, Any]) -> bytes:
    """Return JSON that `decode_json` reads back to the same value."""
    return json.dumps(body, separators=(",", ":")).encode()


def read_line(raw: bytes) -> Line:
    """Parse a line that `validation.check_line` accepts."""
    try:
        line = _line_decoder.decode(raw)
        body = bytes(line.body)
        return Line(line.custom_id, line.url, _model_decoder.decode(body).model or "", body)
    except msgspec.DecodeError:  # values that the strict reader refuses
        values = decode_json(raw)
        body = values["body"]
        return Line(values["custom_id"], values["url"], body.get("model") or "", encode_body(body))


def body_of(raw: bytes, values: dict[str, Any]) -> bytes:
    """Return the JSON of a line's body, given its values; unchanged from the line if possible."""
    try:
        return bytes(_line_decoder.decode(raw).body)
    except msgspec.DecodeError:
        return encode_body(values)


def _check_shape(raw: bytes) -> None:
    """Raise ValueError early for text with too many values or levels; C code does the counting.

    Malformed JSON is left to the parser, which recurses no deeper than the limit.
    """
    outside = _STRING.sub(b"", raw)
    if sum(map(outside.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise ValueError(f"it holds more than {_MOST_VALUES} values")
    brackets, depth = outside.translate(None, _NO_BRACKETS), 0
    for start in range(0, len(brackets), _AT_ONCE):
        steps = map(_STEPS.__getitem__, brackets[start : start + _AT_ONCE])
        depths = list(itertools.accumulate(steps, initial=depth))
        if max(depths) > MOST_NESTED:
            raise ValueError(f"it is nested too deeply, in more than {MOST_NESTED} arrays and objects")
        depth = depths[-1]


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def _reason(raw: bytes, error: Exception) -> str:
    if raw.startswith(BOM):
        return "a byte order mark is allowed at the start of the file only"
    if b"\0" in raw:
        return "it holds zero bytes; the file must be UTF-8, not UTF-16"
    return str(error)
