"""Beside the generating endpoints, through the official client and on a real model: what vLLM's
users expect of the tokenizer, of tiers and of the fingerprint.
"""

import json
from typing import Any

import openai
import pytest

from tests.contract.calls import CHAT, results, submit, wait

SAY: Any = [{"role": "user", "content": "What is 23 + 45?"}]
CALL: dict[str, Any] = {"model": "demo", "messages": SAY, "max_tokens": 8, "temperature": 0}


def test_tokens_of_a_chat_are_those_that_its_answer_counts(model_client: openai.OpenAI) -> None:
    made: Any = model_client.post("../tokenize", body={"messages": SAY, "return_token_strs": True}, cast_to=dict)
    answer = model_client.chat.completions.create(**CALL, extra_body={"return_token_ids": True})
    assert made["tokens"] == answer.to_dict()["prompt_token_ids"]
    assert answer.usage is not None
    assert made["count"] == answer.usage.prompt_tokens == len(made["token_strs"])
    assert made["max_model_len"] == model_client.models.retrieve("demo").to_dict()["max_model_len"]
    text: Any = model_client.post("../detokenize", body={"model": "demo", "tokens": made["tokens"]}, cast_to=dict)
    assert SAY[0]["content"] in text["prompt"]
    again: Any = model_client.post("../tokenize", body={"prompt": "a b", "add_special_tokens": False}, cast_to=dict)
    assert (again["count"], again["token_strs"]) == (len(again["tokens"]), None)


def test_an_error_of_the_tokenizer_is_openais(model_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        model_client.post("../detokenize", body={"model": "demo", "tokens": [2**31 - 1]}, cast_to=dict)
    assert (caught.value.param, caught.value.code) == ("tokens[0]", "integer_above_max_value")
    with pytest.raises(openai.NotFoundError, match="`nobody` does not exist"):
        model_client.post("../tokenize", body={"model": "nobody", "prompt": "x"}, cast_to=dict)


def test_the_fingerprint_is_the_same_in_answers_streams_and_batches(model_client: openai.OpenAI) -> None:
    plain = model_client.chat.completions.create(**CALL).system_fingerprint
    chunks = model_client.chat.completions.create(**CALL, stream=True)
    assert {chunk.system_fingerprint for chunk in chunks} == {plain}
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {**CALL, "service_tier": "flex"}}
    batch = wait(model_client, submit(model_client, json.dumps(line).encode()).id)
    [result] = results(model_client, batch.output_file_id)
    body = result["response"]["body"]
    assert (body["system_fingerprint"], body["service_tier"]) == (plain, "flex")
    info: Any = model_client.get("../server_info", cast_to=object)
    assert [worker["system_fingerprint"] for worker in info["workers"]] == [plain]
    assert info["workers"][0]["device"] == "cpu"
    assert plain is not None
    assert plain.startswith("fp_")


@pytest.mark.parametrize(("tier", "used"), [("auto", "default"), ("priority", "priority"), ("flex", "flex")])
def test_a_tier_is_repeated(model_client: openai.OpenAI, tier: Any, used: str) -> None:
    assert model_client.chat.completions.create(**CALL, service_tier=tier).service_tier == used
    chunks = model_client.chat.completions.create(**CALL, service_tier=tier, stream=True)
    assert {chunk.service_tier for chunk in chunks} == {used}


def test_the_client_shows_what_is_left(model_client: openai.OpenAI) -> None:
    answer = model_client.chat.completions.with_raw_response.create(**CALL)
    assert int(answer.headers["openai-processing-ms"]) > 0
    left, limit = (int(answer.headers[f"x-ratelimit-{name}-requests"]) for name in ("remaining", "limit"))
    assert 0 < left < limit
