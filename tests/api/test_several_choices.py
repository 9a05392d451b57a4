"""Several choices and log probabilities through the official client, streamed and whole: a real
API, a real worker.
"""

from collections import defaultdict
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionTokenLogprob

from jobs.queue.request_queue import Queue
from tests.support.worker_process import running_worker

CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is 2 + 3?"}],
    "n": 3,
    "seed": 8,
    "temperature": 1.0,
    "max_tokens": 40,
    "logprobs": True,
    "top_logprobs": 2,
    "extra_body": {"ignore_eos": True},
}
COMPLETION: dict[str, Any] = {
    "model": "demo",
    "prompt": ["Say this:", "Then:"],
    "n": 3,
    "seed": 8,
    "max_tokens": 30,
    "logprobs": 1,
    "echo": True,
}


def test_what_is_streamed_is_what_is_given_whole(queue: Queue, redis_url: str, client: openai.OpenAI) -> None:
    with running_worker(queue, redis_url, "--max-num-seqs", "8"):
        check_chat(client)
        check_completion(client)


def check_chat(client: openai.OpenAI) -> None:
    whole: ChatCompletion = client.chat.completions.create(**CHAT)
    texts: defaultdict[int, str] = defaultdict(str)
    tokens: defaultdict[int, list[ChatCompletionTokenLogprob]] = defaultdict(list)
    reasons: dict[int, str | None] = {}
    for chunk in client.chat.completions.create(**CHAT, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
        reasons[choice.index] = choice.finish_reason
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert reasons[choice.index] == choice.finish_reason == "length"
        assert choice.logprobs is not None
        expected, streamed = choice.logprobs.content or [], tokens[choice.index]
        assert [one.token for one in streamed] == [one.token for one in expected]
        assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in expected], abs=1e-3)
        assert [len(one.top_logprobs) for one in streamed] == [2] * 40
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3 * 40


def check_completion(client: openai.OpenAI) -> None:
    whole = client.completions.create(**COMPLETION)
    texts: defaultdict[int, str] = defaultdict(str)
    tokens: defaultdict[int, list[str]] = defaultdict(list)
    offsets: defaultdict[int, list[int]] = defaultdict(list)
    for chunk in client.completions.create(**COMPLETION, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs is not None:
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
    assert [choice.index for choice in whole.choices] == list(range(6))
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert texts[choice.index] == choice.text
        assert choice.text.startswith(COMPLETION["prompt"][choice.index // 3])
        assert tokens[choice.index] == choice.logprobs.tokens
        assert offsets[choice.index] == choice.logprobs.text_offset
