"""The one reading of JSON from outside, used by every stage: strict UTF-8 first, then JSON with
whatever values it holds.

Whether a value makes sense is not decided here: the content of a request's body is judged where the
request runs, and by then an odd line must be read just as it was when the file was accepted.
"""

import itertools
import json
import re
from typing import Any

import msgspec

BOM = b"\xef\xbb\xbf"
_MOST_DIGITS = 4300  # what Python reads
MOST_NESTED = 500
"""Arrays and objects inside each other.

Readers recurse, and how far they come depends on who calls them; this they all can.
"""

_MOST_VALUES = 2_000_000  # in one text; an empty one of 3 bytes takes up to 100 as an object

_STEPS = [{ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}.get(byte, 0) for byte in range(256)]
# One that never ends reaches to the end: else the search would begin again at each quote inside
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_AT_ONCE = 4096  # brackets; the depth is found out soon where it is too much
_NO_BRACKETS = bytes(byte for byte, step in enumerate(_STEPS) if step == 0)


class Line(msgspec.Struct, frozen=True):
    """A line that `validation.check_line` lets pass."""

    custom_id: str
    url: str
    model: str  # "" where the line names none and no default is known
    body: bytes  # JSON for `decode_json`, as the line has it wherever that is possible
    values: dict[str, Any] = {}  # of the body, where `check_line` has read it


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw


class _Model(msgspec.Struct):
    model: str | None = None


_line_decoder = msgspec.json.Decoder(_Line)
_model_decoder = msgspec.json.Decoder(_Model)


def decode_json(raw: bytes) -> Any:
    """The value of JSON text, which may hold halves of characters, NaN and numbers out of range.

    Raises ValueError, with the reason.
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
    """The JSON that `decode_json` reads back, whatever values it holds."""
    return json.dumps(body, separators=(",", ":")).encode()


def read_line(raw: bytes) -> Line:
    """Take a line apart; for one that `validation.check_line` lets pass."""
    try:
        line = _line_decoder.decode(raw)
        body = bytes(line.body)
        return Line(line.custom_id, line.url, _model_decoder.decode(body).model or "", body)
    except msgspec.DecodeError:  # values that the strict reader refuses
        values = decode_json(raw)
        body = values["body"]
        return Line(values["custom_id"], values["url"], body.get("model") or "", encode_body(body))


def body_of(raw: bytes, values: dict[str, Any]) -> bytes:
    """Return the JSON of a line's body, given its values: as the line has it wherever possible."""
    try:
        return bytes(_line_decoder.decode(raw).body)
    except msgspec.DecodeError:
        return encode_body(values)


def _check_shape(raw: bytes) -> None:
    """Raise ValueError, soon: what costs most is left out or counted by C code.

    What is no JSON is left to the parser, which comes no deeper than this does.
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
