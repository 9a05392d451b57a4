"""What one reader of JSON takes, all of them take, however deep in the program they are."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.protocol import lines
from jobs.protocol.chat import CHAT
from jobs.protocol.lines import MOST_NESTED, Line, decode_json, encode_body, read_line
from jobs.protocol.results import ApiError, encode_json
from jobs.protocol.validation import LineError, check_line, parse_call
from tests.support.bad_request import message


def deeper(frames: int, call: Callable[[], Any]) -> Any:
    """The call's value, made so many frames further down."""
    return call() if frames == 0 else deeper(frames - 1, call)


def line(depth: int, opening: bytes = b"[", closing: bytes = b"]", inside: bytes = b"") -> bytes:
    start = (
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x", "u": '
    )
    return start + opening * depth + inside + closing * depth + b"}}"


@pytest.mark.parametrize(
    ("opening", "closing", "inside"), [(b"[", b"]", b""), (b'{"a":', b"}", b"1"), (b'["]",', b',"["]', b"1")]
)
def test_what_is_accepted_can_be_read_at_every_later_stage(opening: bytes, closing: bytes, inside: bytes) -> None:
    raw = line(MOST_NESTED - 2, opening, closing, inside)
    found = check_line(raw, 1)
    assert isinstance(found, Line)
    for frames in (0, 100, 300):
        body = deeper(frames, lambda: read_line(raw).body)
        assert body == found.body
        values = deeper(frames, lambda: decode_json(found.body))
        assert decode_json(deeper(frames, lambda values=values: encode_body(values))) == values


@pytest.mark.parametrize("depth", [MOST_NESTED - 1, 900, 990, 995, 1000, 5000, 100_000])
def test_what_is_nested_more_deeply_is_refused_and_breaks_nothing(depth: int) -> None:
    for raw in (line(depth), line(depth, b'{"a":', b"}", b"1"), line(depth, b'["\\\\]\\"]",', b',"["]', b"1")):
        found = check_line(raw, 1)
        assert isinstance(found, LineError)
        assert (found.code, found.param) == ("invalid_json_line", None)
        assert f"more than {MOST_NESTED} arrays and objects" in found.message


def test_brackets_in_strings_count_for_nothing() -> None:
    text = '["' + "[{" * 1000 + '\\"' + "[" * 1000 + '\\\\"]'
    assert decode_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize("value", [b"[]", b'""', b'{"a":0}', b"0"])
def test_values_that_take_more_memory_than_text_are_counted(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_MOST_VALUES", 1000)
    assert len(decode_json(b"[" + b",".join([value] * 400) + b"]")) == 400
    with pytest.raises(ValueError, match="it holds more than 1000 values"):
        decode_json(b"[" + b",".join([value] * 1002) + b"]")
    assert decode_json(b'"' + b",[{:" * 2000 + b'"') == ",[{:" * 2000


@pytest.mark.parametrize("raw", [b'""' * 2000, b'"":' * 4000 + b"1", b'["a" "b"' + b",1" * 2000])
def test_counting_stops_at_what_is_no_json(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_MOST_VALUES", 1000)
    with pytest.raises(ValueError):  # noqa: PT011 - whichever reason
        decode_json(raw)


@given(
    st.recursive(
        st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30
    )
)
def test_values_come_through(value: Any) -> None:
    padded = {"value": value, "pad": [[]] * MOST_NESTED}
    assert decode_json(json.dumps(padded).encode()) == padded


@settings(max_examples=300)
@given(data=st.data())
def test_a_line_with_some_bytes_changed_is_read_alike_by_all_or_refused(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from(LINES)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2) | st.sampled_from(PIECES))
    found = check_line(bytes(raw), 1)
    if isinstance(found, Line):
        line = read_line(bytes(raw))
        assert repr(decode_json(found.body)) == repr(found.values)
        assert (line.custom_id, line.url, line.model, line.body) == (
            found.custom_id,
            found.url,
            found.model,
            found.body,
        )
        assert isinstance(decode_json(line.body), dict)
        encode_json({"custom_id": line.custom_id})
        with contextlib.suppress(ApiError):
            parse_call(line.url, decode_json(line.body))


PIECES = [b'"', b"\\", b"{", b"]", b"NaN", b"1e999"]
LINES = [
    line(2),
    json.dumps({"custom_id": "é\n", "method": "POST", "url": CHAT, "body": message(content="🙂")}).encode(),
    b'{"custom_id":"a","custom_id":"b","method":"POST","url":"/v1/completions",'
    b'"body":{"model":"m","model":"n","prompt":[1,2],"seed":1.5}}',
]
