"""Unforeseen bodies: each is answered or refused, and never breaks anything, over HTTP
and in a file.

What is answered whole is answered with the same tokens as a stream and from a file.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.pipeline.results import read_results
from tests.support import http_calls
from tests.support.bad_request import CHAT, COMPLETIONS, MODEL, as_json
from tests.support.commands import run_pipeline, running_pipeline
from tests.support.waiting import wait_until

CALLS = 150
FLAGS = ("--served-model-name", MODEL, "--dtype", "float32")
ALIKE = (
    # Share of answers that must agree: arithmetic in another order may tip a token that is as
    # likely as the next
    0.99
)

pytestmark = pytest.mark.proof

ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 30)
    | st.floats()
    | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(), max_size=4) | st.integers(0, 2000).map(str), inner, max_size=4)
    ),
    max_leaves=8,
)
TOKEN = st.integers(0, 1023)
TEXT = st.text(st.characters(codec="utf-8") | st.sampled_from(" the fox\n"), min_size=1, max_size=30)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXT},
    optional={
        "name": TEXT,
        "tool_calls": st.lists(st.dictionaries(TEXT, ODD, max_size=2), max_size=2),
        "tool_call_id": TEXT,
    },
).map(lambda message: {"tool_call_id": "c", **message} if message["role"] == "tool" else message)
PROMPT = TEXT | st.lists(TEXT, min_size=1, max_size=3) | st.lists(TOKEN, min_size=1, max_size=10)
SCHEMA = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "integer", "minimum": -5, "maximum": 30},
        {"enum": ["fox", "dog", None]},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 3},
        {"type": "no type"},
    ]
)
FORM = (
    st.builds(lambda schema, dense: {"json": schema, "disable_any_whitespace": dense}, SCHEMA, st.booleans())
    | st.lists(TEXT, min_size=1, max_size=3).map(lambda texts: {"choice": texts})
    | st.sampled_from([{"regex": "[a-z]{3}( fox)?"}, {"regex": "(((("}, {"json_object": True}, {"regex": "a"}])
)


def named(schema: dict[str, Any]) -> dict[str, Any]:
    """A response format of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


PARAMETERS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 12),
    "min_tokens": st.integers(0, 4),
    "n": st.integers(1, 4),
    "best_of": st.integers(4, 5),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 2000),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100),
    "logit_bias": st.dictionaries(TOKEN.map(str), st.floats(-100, 100), max_size=5),
    "stop": TEXT | st.lists(TEXT, max_size=4),
    "stop_token_ids": st.lists(TOKEN, max_size=4),
    "bad_words": st.lists(TEXT, max_size=4),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "prompt_logprobs": st.integers(0, 20),
    "truncate_prompt_tokens": st.sampled_from([-1, 1, 2, 20]),
    "priority": st.integers(-5, 5),
    "user": TEXT,
    "response_format": st.sampled_from(["text", "json_object"]).map(lambda kind: {"type": kind}) | SCHEMA.map(named),
    "structured_outputs": FORM,
    "guided_json": SCHEMA | SCHEMA.map(json.dumps),
    "guided_choice": st.lists(TEXT, min_size=1, max_size=3),
    "guided_whitespace_pattern": st.sampled_from(["", " ", "[ ]?"]),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
}


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """An endpoint and a body, four of five of which make sense."""
    names = draw(st.lists(st.sampled_from(sorted(PARAMETERS)), max_size=6, unique=True))
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "seed": draw(st.integers(0, 2**63 - 1))}
    body |= {name: draw(PARAMETERS[name]) for name in names}
    endpoint = draw(st.sampled_from([CHAT, COMPLETIONS]))
    if endpoint == CHAT:
        body["messages"] = draw(st.lists(MESSAGE, min_size=1, max_size=3))
        body |= draw(st.sampled_from([{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}]))
    else:
        body["prompt"] = draw(PROMPT)
        body |= draw(
            st.sampled_from([{}, {"logprobs": 0}, {"logprobs": 3}, {"echo": True}, {"echo": True, "logprobs": 3}])
        )
    if draw(st.integers(0, 4)) == 0:
        body |= draw(st.dictionaries(st.sampled_from(sorted({*body, *PARAMETERS} - {"model"})), ODD, max_size=2))
    return endpoint, body


def of_whole(body: dict[str, Any]) -> dict[int, Any]:
    """What a response says of each choice: text, tokens of its log probabilities, and the end."""
    return {
        choice["index"]: [
            choice["message"]["content"] if "message" in choice else choice["text"],
            _tokens(choice),
            _end(choice),
        ]
        for choice in body["choices"]
    }


def of_stream(text: str) -> dict[int, Any]:
    """The same, put together from the events of a stream."""
    found: dict[int, Any] = {}
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            one = found.setdefault(choice["index"], ["", [], None])
            one[0] += (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
            one[1] += _tokens(choice)
            one[2] = _end(choice)
    return found


def _tokens(choice: dict[str, Any]) -> list[str]:
    logprobs = choice["logprobs"] or {}
    return [token["token"] for token in logprobs["content"]] if "content" in logprobs else logprobs.get("tokens", [])


def _end(choice: dict[str, Any]) -> tuple[Any, Any]:
    return choice["finish_reason"], choice.get("stop_reason")


@pytest.mark.timeout(600)
def test_whatever_is_asked_is_answered_or_refused_and_alike_everywhere(tmp_path: Path) -> None:
    asked: list[tuple[str, dict[str, Any], httpx.Response]] = []
    streamed: list[bool] = []

    def ask(http: httpx.Client, endpoint: str, body: dict[str, Any]) -> None:
        answer = http.post(endpoint, content=as_json(body))
        asked.append((endpoint, body, answer))
        if answer.status_code != 200:
            assert answer.status_code in (400, 404), answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            return
        stream = http.post(endpoint, content=as_json({**body, "stream": True}))
        if stream.status_code == 200:
            streamed.append(of_stream(stream.text) == of_whole(answer.json()))
        else:
            assert (stream.status_code, stream.json()["error"]["param"] in ("best_of", "prompt_logprobs")) == (
                400,
                True,
            ), stream.text

    with running_pipeline("serve", "--port", 0, *FLAGS) as command:
        url = re.search(r"listening on (http://\S+)", command.wait_for("listening on"))
        assert url is not None
        command.wait_for("worker INFO ready")
        wait_until(lambda: http_calls.get(f"{url[1]}/health").json().get("models"), 60, "the model to be served")
        with httpx.Client(base_url=url[1], timeout=120) as http:

            @seed(int(os.environ.get("CALLS_SEED", 1)))
            @settings(max_examples=CALLS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(call=calls())
            def ask_all(call: tuple[str, dict[str, Any]]) -> None:
                ask(http, *call)

            ask_all()
        assert "Traceback" not in command.output

    answered = {number for number, (_, _, answer) in enumerate(asked) if answer.status_code == 200}
    assert len(answered) > len(asked) / 2
    assert sum(streamed) >= ALIKE * len(streamed)
    rows = from_a_file(tmp_path, [(endpoint, body) for endpoint, body, _ in asked])
    assert {number for number, row in rows.items() if row["response"]["status_code"] == 200} == answered
    alike = [of_whole(rows[number]["response"]["body"]) == of_whole(asked[number][2].json()) for number in answered]
    assert sum(alike) >= ALIKE * len(alike)
    refusals = [
        (rows[number]["response"]["body"], asked[number][2].json()) for number in rows if number not in answered
    ]
    assert all(in_file == live for in_file, live in refusals)


def from_a_file(folder: Path, calls: list[tuple[str, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """The result lines of a batch of these, by their numbers."""
    source, output = folder / "requests.jsonl", folder / "out.jsonl"
    lines = [
        {"custom_id": str(number), "method": "POST", "url": endpoint, "body": body}
        for number, (endpoint, body) in enumerate(calls)
    ]
    source.write_bytes(b"\n".join(map(as_json, lines)))
    done = run_pipeline("run-batch", source, "-o", output, *FLAGS, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    rows = {int(row["custom_id"]): row for row in read_results(output)}
    assert sorted(rows) == list(range(len(calls)))
    return rows
