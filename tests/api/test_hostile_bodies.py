"""Bodies that are made to cost more than they are worth: each is answered soon, in one short
sentence, and the server goes on.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.api.scripted_worker import MODEL, ScriptedWorker

CHAT = "/v1/chat/completions"
MOST = 8 * 1024 * 1024  # a quarter of what a body may have
SECONDS = 10.0  # on a machine that is busy; each takes some tenths


def chat(**values: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}], **values}).encode()


def with_raw(name: str, value: bytes) -> bytes:
    return chat()[:-1] + b', "' + name.encode() + b'": ' + value + b"}"


def nested(opening: bytes, inner: bytes, closing: bytes, count: int) -> bytes:
    return with_raw("metadata", opening * count + inner + closing * count)


REFUSED = {
    "arrays in arrays": nested(b"[", b"", b"]", MOST // 2),
    "arrays that never end": b"[" * MOST,
    "a string that never ends": b"[" * 1000 + b'"' + b'\\"' * (MOST // 2),
    "objects in objects": nested(b'{"a":', b"1", b"}", MOST // 6),
    "empty arrays": with_raw("metadata", b"[" + b"[]," * (MOST // 3) + b"1]"),
    "digits": with_raw("seed", b"1" * MOST),
    "digits of a fraction": with_raw("temperature", b"0." + b"1" * (MOST // 2) + b"e" + b"9" * (MOST // 4)),
    "an exponent": with_raw("n", b"1e999999999"),
    "not a number": with_raw("temperature", b"NaN"),
    "infinity": with_raw("top_p", b"Infinity"),
    "bytes that are no UTF-8": chat()[:-2] + b"\xed\xa0\x80\xff" * 1000 + b'"}',
    "UTF-16": chat().decode().encode("utf-16"),
    "zero bytes": b"\0" * MOST,
    "messages": chat(messages=[{"role": "user", "content": "x"}] * 300_000, n=0),
    "parts of a message": chat(messages=[{"role": "user", "content": [{"type": "text"}] * 500_000}]),
    "choices": chat(n=10**18),
    "stop strings": chat(stop=["x"] * 1_000_000),
    "a stop string": chat(stop="x" * (MOST // 2)),
    "logit bias": chat(logit_bias={str(number): 101 for number in range(500_000)}),
    "variables": chat(chat_template_kwargs={f"a{number}": 1 for number in range(300_000)}),
    "tools": chat(tools=[{"type": "function", "function": {"name": "f"}}] * 200_000, tool_choice="required"),
    "a model's name": chat(model="m" * (MOST // 2)),
    "a role": chat(messages=[{"role": "r" * (MOST // 2), "content": "x"}]),
    "names that repeat": with_raw("n", b"1" + b', "n": 1' * (MOST // 9) + b', "n": 0'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_body_is_refused_soon_and_in_short(
    http: httpx.Client, scripted: Callable[..., ScriptedWorker], name: str
) -> None:
    worker = scripted(lambda claim: ["one"])
    began = time.process_time()  # of the API, too, which is in this process
    answer = http.post(CHAT, content=REFUSED[name], headers={"content-type": "application/json"})
    taken = time.process_time() - began
    print(f"{name}: {answer.status_code} after {taken:.2f} s for {len(REFUSED[name]) / 2**20:.1f} MiB: {answer.text}")
    assert 400 <= answer.status_code < 500
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert len(answer.text) < 1000
    assert taken < SECONDS
    assert worker.claims == []
    assert http.get("/health").status_code == 200


def test_of_names_that_repeat_the_last_one_counts_everywhere(
    http: httpx.Client, scripted: Callable[..., ScriptedWorker]
) -> None:
    """The API and the worker read one body alike: what was checked is what runs."""
    worker = scripted(lambda claim: ["one"])
    body = b'{"model": "other", "model": "%b", "prompt": ["a"], "prompt": "x", "n": 500000, "n": 1}' % MODEL.encode()
    answer = http.post("/v1/completions", content=body)
    assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
    assert json.loads(worker.claims[0].request.body) == {"model": MODEL, "prompt": "x", "n": 1}
