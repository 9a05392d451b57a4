"""Log probabilities of answers and prompts equal transformers', for every family, through the real
scheduler and runner.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.engine.driving import make_core, run
from tests.workers.engine.models.tiny_models import MODELS, NEW_TOKENS, VOCAB, prompt_logits, reference
from workers.engine.messages.core import EngineRequest, SamplingParams, TokenLogprobs

TOLERANCE = 1e-4
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"depth": 0},
    "chunked-ahead": {"depth": 1, "max_num_batched_tokens": 16},
    "preempted-ahead-chunked": {"depth": 1, "max_num_batched_tokens": 40, "num_blocks": 20},
}

FAMILIES = [pytest.param(name, marks=() if name in ("gpt2", "qwen3") else pytest.mark.proof) for name in MODELS]


def check(actual: list[TokenLogprobs], tokens: list[int], logits: Tensor, top: int) -> None:
    """`logits` [tokens, vocab] are those that each token was drawn from."""
    assert len(actual) == len(tokens)
    for item, token, expected in zip(actual, tokens, logits.double().log_softmax(-1), strict=True):
        assert (item.token_ids[0], len(item.token_ids)) == (token, 1 + top)
        assert (torch.tensor(item.logprobs) - expected[item.token_ids]).abs().max() < TOLERANCE
        # The likeliest by value, not by token, for near ties may come in either order.
        best = expected.sort(descending=True).values[:top]
        assert torch.allclose(torch.tensor(item.logprobs[1:], dtype=torch.float64), best, atol=TOLERANCE, rtol=0)
        above = (expected > expected[token] + TOLERANCE).sum(), (expected > expected[token] - TOLERANCE).sum()
        assert above[0] < item.rank <= max(above[1], 1)


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_same_as_transformers(name: str, variant: str) -> None:
    expected, prompts = reference(name), prompt_logits(name)
    core = make_core(name, max_model_len=224, max_num_seqs=8, **VARIANTS[variant])
    tops = [(number % 3 * 4, number % 2 * 5) for number in range(len(expected.prompts))]
    requests = [
        EngineRequest(
            number,
            prompt,
            [],
            SamplingParams(NEW_TOKENS, temperature=0.0, logprobs=tops[number][0], prompt_logprobs=tops[number][1]),
        )
        for number, prompt in enumerate(expected.prompts)
    ]
    run(
        core,
        [EngineRequest(100 + number, prompt, [], SamplingParams(1)) for number, prompt in enumerate(expected.prompts)],
    )
    got = run(core, requests)
    layers = core._executor.model_config.layers
    if all(layer.pattern.window is None and layer.reads is None for layer in layers):  # else memory is enough
        assert (got.preemptions > 0) == (variant == "preempted-ahead-chunked")
    for number, prompt in enumerate(expected.prompts):
        answer = got.answers[number]
        assert answer.tokens == expected.tokens[number]
        check(answer.logprobs, expected.tokens[number], expected.logits[number], tops[number][0])
        assert answer.prompt_logprobs is not None
        check(answer.prompt_logprobs, prompt[1:], prompts[number][:-1], tops[number][1])


def test_without_a_request_for_them_none_are_reported() -> None:
    expected = reference("llama")
    requests = [
        EngineRequest(
            number,
            prompt,
            [],
            SamplingParams(5, temperature=0.0, logprobs=number % 2 - 1, prompt_logprobs=number // 2 % 2 - 1),
        )
        for number, prompt in enumerate(expected.prompts)
    ]
    answers = run(make_core("llama"), requests).answers
    assert [len(answers[number].logprobs) for number in range(6)] == [0, 5, 0, 5, 0, 5]
    assert [answers[number].prompt_logprobs is not None for number in range(6)] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_resumed_request_gets_those_of_its_prompt_and_of_new_tokens(depth: int) -> None:
    expected, prompts = reference("llama"), prompt_logits("llama")
    core = make_core("llama", depth=depth, max_num_batched_tokens=30)
    sampling = SamplingParams(NEW_TOKENS, temperature=0.0, logprobs=2, prompt_logprobs=2)
    requests = [
        EngineRequest(number, prompt, expected.tokens[number][:20], sampling)
        for number, prompt in enumerate(expected.prompts)
    ]
    for number, answer in run(core, requests).answers.items():
        check(answer.logprobs, expected.tokens[number][20:], expected.logits[number][20:], 2)
        assert answer.prompt_logprobs is not None
        check(answer.prompt_logprobs, expected.prompts[number][1:], prompts[number][:-1], 2)


def test_a_scored_prompt_still_fills_the_cache() -> None:
    """A request is read again when it comes back from a preemption."""
    prompt = reference("llama").prompts[1]
    core = make_core("llama")
    scored = SamplingParams(1, temperature=0.0, prompt_logprobs=0)
    assert run(core, [EngineRequest(1, prompt, [], scored)]).prefix_hit_tokens == 0
    assert run(core, [EngineRequest(2, prompt, [], scored)]).prefix_hit_tokens == 0
    assert (
        run(core, [EngineRequest(3, prompt, [], SamplingParams(1))]).prefix_hit_tokens == (len(prompt) - 1) // 16 * 16
    )


def test_a_prompt_scored_in_parts_is_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = reference("llama").prompts[1]
    request = EngineRequest(1, prompt, [], SamplingParams(1, temperature=0.0, prompt_logprobs=3))
    at_once = run(make_core("llama"), [request]).answers[1].prompt_logprobs
    monkeypatch.setattr("workers.engine.device.model_runner._SCORED_LOGITS", 7 * VOCAB)
    in_parts = run(make_core("llama"), [request]).answers[1].prompt_logprobs
    assert at_once is not None
    assert in_parts is not None
    assert [item.token_ids for item in in_parts] == [item.token_ids for item in at_once]
    assert [item.logprobs for item in in_parts] == [pytest.approx(item.logprobs, abs=1e-5) for item in at_once]
