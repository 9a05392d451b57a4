"""`/tokenize` and `/detokenize` over HTTP: live calls like others, which the demo model's tokenizer
answers.
"""

from collections.abc import Callable

import httpx
import pytest

from jobs.queue.request_queue import Queue
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support.control_plane import echo

Scripted = Callable[..., ScriptedWorker]
BOTH = ("generate", "tokenize")


@pytest.mark.parametrize("named", [{"model": MODEL}, {}], ids=["model", "no model"])
def test_a_text_becomes_tokens_and_text_again(
    http: httpx.Client, scripted: Scripted, queue: Queue, named: dict[str, str]
) -> None:
    worker = scripted(echo, tasks=BOTH)
    answer = http.post("/tokenize", json={"prompt": "Naïve 🙂", "return_token_strs": True, **named})
    assert answer.status_code == 200
    body = answer.json()
    assert list(body) == ["count", "max_model_len", "tokens", "token_strs"]
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) > 1
    back = http.post("/detokenize", json={"tokens": body["tokens"], **named})
    assert back.json() == {"prompt": "Naïve 🙂"}
    assert [(claim.request.endpoint, claim.live) for claim in worker.claims] == [
        ("/tokenize", True),
        ("/detokenize", True),
    ]
    assert answer.headers["x-ratelimit-limit-requests"] == "5000"
    assert queue.token_totals() == (0, 0)


def test_a_bad_call_is_refused_without_a_worker(http: httpx.Client, scripted: Scripted) -> None:
    worker = scripted(echo, tasks=BOTH)
    answer = http.post("/tokenize", json={"model": MODEL, "prompt": 5})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert worker.claims == []


def test_what_only_a_worker_knows_comes_from_it(http: httpx.Client, scripted: Scripted) -> None:
    scripted(echo, tasks=BOTH)
    answer = http.post("/detokenize", json={"model": MODEL, "tokens": [5_000_000]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "integer_above_max_value")


def test_a_model_must_be_named_where_there_are_several(http: httpx.Client, scripted: Scripted) -> None:
    scripted(echo, models=(MODEL, "another"), tasks=BOTH)
    answer = http.post("/tokenize", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "missing_required_parameter")


def test_workers_of_the_version_before_are_not_asked(http: httpx.Client, scripted: Scripted) -> None:
    old, new = scripted(lambda claim: ["x"]), scripted(echo, tasks=BOTH)
    answer = http.post("/tokenize", json={"model": MODEL, "prompt": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": f"The model `{MODEL}` cannot be used with /tokenize: some of its workers, of an older version,"
        " lack it.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "unsupported_endpoint",
    }
    assert old.claims == new.claims == []
    assert http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}).status_code == 200
