"""Calls for the tokenizer alone, with a real one: what they are answered, and that one which takes
long keeps no other request.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.endpoints import TOKENIZER_ENDPOINTS
from jobs.protocol.requests import Claim, Finished, Request, RequestKey
from jobs.protocol.tokenization import DETOKENIZE, MOST_BYTES, TOKENIZE
from workers.replica.metrics import RequestMetrics
from workers.replica.preparation import Preparation
from workers.replica.sampling_params import ModelLimits
from workers.replica.tokenization import Tokenization, TokenizerAnswers
from workers.settings import DEMO_MODEL
from workers.text.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer.load(DEMO_MODEL)
LIMITS = ModelLimits(128, 1024)
SAY: list[dict[str, Any]] = [{"role": "user", "content": "What is 2 + 3?"}]


def claim(url: str, number: int = 0, **body: Any) -> Claim:
    request = Request(url, "demo", json.dumps(body).encode(), seed=1)
    return Claim(RequestKey(f"live_{number}", 0), 7, request, None, 1, True)


def answer(url: str, **body: Any) -> tuple[int, dict[str, Any]]:
    finished = TokenizerAnswers(TOKENIZER, ["demo"], LIMITS).answer(claim(url, **body))
    assert (finished.key, finished.fence, finished.delta) == (RequestKey("live_0", 0), 7, None)
    return finished.result.status, json.loads(finished.result.body)


def prompt_of(url: str, **body: Any) -> list[int]:
    """The tokens that the engine would get."""
    prepared, errors = Preparation(TOKENIZER, ["demo"], LIMITS).prepare([claim(url, model="demo", **body)])
    assert errors == []
    return prepared[0].prompts[0].token_ids


def test_a_text_has_the_tokens_of_a_completion() -> None:
    status, body = answer(TOKENIZE, prompt="Naïve 🙂 words")
    assert (status, body["tokens"]) == (200, prompt_of(COMPLETIONS, prompt="Naïve 🙂 words"))
    assert (body["count"], body["max_model_len"], body["token_strs"]) == (len(body["tokens"]), 128, None)
    assert answer(DETOKENIZE, tokens=body["tokens"]) == (200, {"prompt": "Naïve 🙂 words"})
    half = TOKENIZER.encode(["Hello 🙂"], special_tokens=False)[0][:-1]
    assert answer(DETOKENIZE, tokens=half) == (200, {"prompt": "Hello \ufffd"})


def test_a_chat_has_the_tokens_of_its_call_and_special_ones_show() -> None:
    _, body = answer(TOKENIZE, messages=SAY, return_token_strs=True)
    assert body["tokens"] == prompt_of(CHAT, messages=SAY)
    assert len(body["token_strs"]) == body["count"]
    _, shorter = answer(TOKENIZE, messages=SAY, add_generation_prompt=False)
    assert body["tokens"][: shorter["count"]] == shorter["tokens"] != body["tokens"]
    text = TOKENIZER.render(SAY, tools=None, add_generation_prompt=True, continue_final_message=False)
    assert answer(DETOKENIZE, tokens=body["tokens"]) == (200, {"prompt": text})


def test_a_text_may_be_longer_than_the_context() -> None:
    assert answer(TOKENIZE, prompt="word " * 1000)[1]["count"] > 1000
    assert answer(TOKENIZE, prompt="")[1]["count"] == 0


@pytest.mark.parametrize(
    ("url", "body", "status", "param", "code"),
    [
        (TOKENIZE, {"prompt": "x", "model": "other"}, 404, "model", "model_not_found"),
        (TOKENIZE, {"prompt": 5}, 400, "prompt", "invalid_type"),
        (TOKENIZE, {"prompt": "é" * (MOST_BYTES // 2 + 1)}, 400, "prompt", "string_above_max_length"),
        (DETOKENIZE, {"tokens": [1, 1024]}, 400, "tokens[1]", "integer_above_max_value"),
        (DETOKENIZE, {"tokens": "x"}, 400, "tokens", "invalid_type"),
    ],
)
def test_what_cannot_be_answered_names_what_is_wrong(
    url: str, body: dict[str, Any], status: int, param: str, code: str
) -> None:
    found, answered = answer(url, **body)
    assert (found, answered["error"]["param"], answered["error"]["code"]) == (status, param, code)


class HeldAnswers(TokenizerAnswers):
    """Answers once the test says so."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER, ["demo"], LIMITS)
        self.go, self.begun = threading.Semaphore(0), threading.Semaphore(0)

    def answer(self, claim: Claim) -> Finished:
        self.begun.release()
        assert self.go.acquire(timeout=60)
        return super().answer(claim)


class SentResults:
    """Takes the place of the outbox."""

    def __init__(self) -> None:
        self.finished: asyncio.Queue[Finished] = asyncio.Queue()

    def finish(self, finished: Finished) -> None:
        self.finished.put_nowait(finished)


def test_others_go_on_while_a_call_is_answered_and_a_cancelled_one_is_not() -> None:
    async def scenario() -> None:
        answers, sent, metrics = HeldAnswers(), SentResults(), RequestMetrics()
        tokenization = Tokenization(answers, sent, metrics)  # type: ignore[arg-type]
        try:
            calls = [claim(TOKENIZE, number, prompt=f"p{number}") for number in range(3)]
            bad, chat = claim(DETOKENIZE, 3), claim(CHAT, 4, messages=SAY)
            assert tokenization.take([*calls, bad, chat]) == [chat]
            assert await asyncio.to_thread(answers.begun.acquire, timeout=60)
            # The first runs, the second waits
            assert tokenization.cancel([calls[0].key, calls[1].key]) == [(calls[0].key, 7), (calls[1].key, 7)]
            answers.go.release(3)
            ended = [await asyncio.wait_for(sent.finished.get(), 60) for _ in range(2)]
            assert [(one.key, one.result.status) for one in ended] == [(calls[2].key, 200), (bad.key, 400)]
            assert sent.finished.empty()
            assert metrics.errors.values == {"missing_required_parameter": 1}
        finally:
            tokenization.close()

    asyncio.run(scenario())


def test_every_endpoint_of_the_tokenizer_is_answered() -> None:
    assert {answer(url)[0] for url in TOKENIZER_ENDPOINTS} == {400}
