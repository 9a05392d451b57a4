"""A model's defaults: how they are read, and what a body gets of them."""

import json
from typing import Any

import pytest

from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.default_parameters import DefaultParameters, read_generation, with_defaults
from jobs.protocol.lines import decode_json
from jobs.protocol.pooling_parameters import EMBEDDINGS
from jobs.protocol.validation import parse_call

DEFAULTS: DefaultParameters = {"temperature": 0.6, "top_k": 20, "max_tokens": 7}


def body(**members: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **members}


def test_a_generation_config_gives_what_differs_from_the_usual_values() -> None:
    config = {"temperature": 0.6, "top_p": None, "top_k": -1, "repetition_penalty": 1, "max_new_tokens": 7}
    assert read_generation(config | {"do_sample": False, "eos_token_id": [1]}) == {"temperature": 0.6, "max_tokens": 7}


@pytest.mark.parametrize("config", [{"temperature": 3}, {"top_p": "a"}, {"max_new_tokens": 0}, {"min_p": True}])
def test_a_value_that_no_call_may_have_is_named(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(config))):
        read_generation(config)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, (0.6, 20, 7, True)),
        ({"temperature": 0, "top_k": None}, (0.0, 20, 7, True)),
        ({"max_tokens": 3}, (0.6, 20, 3, False)),
        ({"max_completion_tokens": 3, "max_tokens": None}, (0.6, 20, 3, False)),
    ],
    ids=str,
)
def test_own_values_go_before_defaults_and_null_does_not(own: dict[str, Any], expected: tuple[object, ...]) -> None:
    """The same in a live call and in a line."""
    live = parse_call(CHAT, body(**own), DEFAULTS)
    assert (live.temperature, live.top_k, live.max_tokens, live.soft_max_tokens) == expected
    line, mark = with_defaults(json.dumps(body(**own)).encode(), CHAT, DEFAULTS)
    read = parse_call(CHAT, decode_json(line))
    assert (read.temperature, read.top_k, read.max_tokens, mark == "max_tokens") == expected


def test_a_completion_keeps_its_own_limit() -> None:
    given = {"model": "m", "prompt": "hi"}
    assert parse_call(COMPLETIONS, given, DEFAULTS).max_tokens == 16
    line, mark = with_defaults(json.dumps(given).encode(), COMPLETIONS, DEFAULTS)
    assert (decode_json(line), mark) == ({**given, "temperature": 0.6, "top_k": 20}, "")


def test_a_line_stays_as_it_is_where_nothing_is_added() -> None:
    raw = b'{ "model":"m", "input": "\xc3\xa9" } '
    assert with_defaults(raw, EMBEDDINGS, DEFAULTS) == (raw, "")
    assert with_defaults(raw, EMBEDDINGS, None) == (raw, "")
    assert with_defaults(raw, CHAT, {}) == (raw, "")
    assert with_defaults(raw, CHAT, None) == (raw, "worker")


def test_values_that_the_strict_reader_refuses_stay() -> None:
    raw = json.dumps(body(temperature=float("nan"), seed=10**30)).encode()
    line, _ = with_defaults(raw, CHAT, DEFAULTS)
    assert line.startswith(raw[:-1])
    assert decode_json(line)["top_k"] == 20
    assert "temperature" not in str(line[len(raw) - 1 :])
