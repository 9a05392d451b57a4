"""From claims to what the engine takes, and what the caller gets where that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from jobs.protocol.chat import CHAT
from jobs.protocol.format_parameters import FORMATS
from jobs.protocol.parameters import Parameters
from jobs.protocol.requests import Claim, DefaultsMark, Request, RequestKey
from tests.support.small_tokenizers import byte_level, panicking, write_folder
from workers.engine.messages.core import SamplingParams
from workers.replica.preparation import Preparation
from workers.replica.prepared import PreparedRequest
from workers.replica.sampling_params import ModelLimits
from workers.settings import DEMO_MODEL
from workers.text.tokenizer import TextTokenizer


def claim_of(url: str, line: int, **body: Any) -> Claim:
    raw = json.dumps({"model": "m", **body}).encode()
    return Claim(RequestKey("batch_a", line), 1, Request(url, "m", raw, seed=line), None, 1, False)


def claim(line: int, **body: Any) -> Claim:
    return claim_of("/v1/completions", line, **body)


def word_level(folder: Path, eos: str | None = None) -> TextTokenizer:
    """Without a token for unknown words, at which the library raises a plain Exception."""
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "end": 2}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos} if eos else {}))
    return TextTokenizer.load(str(folder))


def demo(max_model_len: int = 100) -> Preparation:
    return Preparation(TextTokenizer.load(DEMO_MODEL), ["m"], ModelLimits(max_model_len, 1024))


def refused(preparation: Preparation, *claims: Claim) -> list[tuple[int, str | None, str | None, str]]:
    """Status, param, code and message of each refusal; nothing else may be prepared."""
    prepared, errors = preparation.prepare(claims)
    assert prepared == []
    found = [
        (item.result.status, json.loads(item.result.body)["error"])
        for item in sorted(errors, key=lambda item: item.key)
    ]
    return [(status, error["param"], error["code"], error["message"]) for status, error in found]


def test_a_text_that_the_tokenizer_fails_on_ends_its_own_request_alone(tmp_path: Path) -> None:
    preparation = Preparation(word_level(tmp_path), ["m"], ModelLimits(100, 3))
    claims = [
        claim(0, prompt="one two"),
        claim(1, prompt="one three"),
        claim(2, prompt="two"),
        claim(3, prompt=["one", "three"]),
    ]
    prepared, errors = preparation.prepare(claims)
    assert [item.claim.key.line for item in prepared] == [0, 2]
    assert [[prompt.token_ids for prompt in item.prompts] for item in prepared] == [[[0, 1]], [[1]]]
    assert {item.key.line: item.result.status for item in errors} == {1: 400, 3: 400}
    error = json.loads(errors[0].result.body)["error"]
    assert (error["param"], error["code"]) == ("prompt", "invalid_value")
    assert "UNK" in error["message"]


def test_a_tokenizer_that_panics_hurts_one_request(tmp_path: Path) -> None:
    preparation = Preparation(
        TextTokenizer.load(str(write_folder(tmp_path, panicking()))), ["m"], ModelLimits(100, 1000)
    )
    prepared, errors = preparation.prepare([claim(0, prompt="fox"), claim(1, prompt="x" * 60), claim(2, prompt="fox")])
    assert [item.claim.key.line for item in prepared] == [0, 2]
    assert [item.result.status for item in errors] == [400]
    assert refused(preparation, claim(0, prompt="fox", bad_words=["fox", "x" * 60]))[0][:3] == (
        400,
        "bad_words[1]",
        "invalid_value",
    )


def test_what_the_engine_does_not_take_is_known() -> None:
    """Parameters by the name of a field of `SamplingParams` are copied; a misspelt one is not."""
    here = {"include_stop_str_in_output", "skip_special_tokens", "stop", "truncate_prompt_tokens"}
    of_the_answer = {"best_of", "echo", "n", "stream", "stream_options", "include_reasoning", "return_token_ids"}
    of_the_answer |= {"return_tokens_as_token_ids", "parallel_tool_calls", "tools", "tool_choice"}
    of_the_form = {*FORMATS, "guided_whitespace_pattern", "thinking_token_budget"}
    of_the_prompt = {"add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort"}
    of_the_prompt |= {"add_special_tokens"}
    joined = {"max_completion_tokens", "priority", "service_tier", "top_logprobs"}
    engine = set(SamplingParams.__struct_fields__)
    assert set(Parameters.__struct_fields__) - engine == here | of_the_answer | of_the_form | of_the_prompt | joined
    assert engine - set(Parameters.__struct_fields__) == {"choice"}


def test_all_that_a_call_asks_for_reaches_the_engine() -> None:
    body = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -100, "6": 2.5},
        "ignore_eos": True,
        "stop_token_ids": [3],
        "allowed_token_ids": [8, 3],
        "logprobs": 4,
        "prompt_logprobs": 2,
        "seed": 11,
    }
    (item,), errors = demo().prepare([claim(0, prompt="a b", **body)])
    assert errors == []
    assert item.prompts[0].sampling == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias=((5, -100.0), (6, 2.5)),
        ignore_eos=True,
        stop_token_ids=(3,),
        allowed_token_ids=(8, 3),
        logprobs=4,
        prompt_logprobs=2,
        seed=11,
    )


@pytest.mark.parametrize(
    ("body", "logprobs", "prompt_logprobs"),
    [
        ({}, -1, -1),
        ({"logprobs": 0}, 0, -1),
        ({"best_of": 2}, 0, -1),
        ({"best_of": 2, "logprobs": 3}, 3, -1),
        ({"n": 2}, -1, -1),
        ({"echo": True}, -1, -1),
        ({"echo": True, "logprobs": 3}, 3, 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 5}, 3, 5),
        ({"prompt_logprobs": 0}, -1, 0),
    ],
)
def test_which_log_probabilities_the_engine_is_asked_for(
    body: dict[str, Any], logprobs: int, prompt_logprobs: int
) -> None:
    (item,), _ = demo().prepare([claim(0, prompt="a b", **body)])
    sampling = item.prompts[0].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (logprobs, prompt_logprobs)


def test_every_form_of_prompt() -> None:
    tokenizer = TextTokenizer.load(DEMO_MODEL)
    one, two = tokenizer.encode(["one fox", "two"], special_tokens=True)
    claims = [
        claim(0, prompt="one fox"),
        claim(1, prompt=one),
        claim(2, prompt=["one fox", "two"]),
        claim(3, prompt=[two, one]),
    ]
    prepared, errors = demo().prepare(claims)
    assert errors == []
    assert [[prompt.token_ids for prompt in item.prompts] for item in prepared] == [
        [one],
        [one],
        [one, two],
        [two, one],
    ]


def test_an_echo_is_the_prompt_as_it_was_given_or_the_text_of_its_tokens() -> None:
    tokenizer = TextTokenizer.load(DEMO_MODEL)
    end = tokenizer.eos_token_id
    ids = tokenizer.encode(["a fox"], special_tokens=False)[0]
    claims = [
        claim(0, prompt=["a fox ", "two"], echo=True),
        claim(1, prompt=[end, *ids], echo=True),
        claim(2, prompt=[end, *ids], echo=True, skip_special_tokens=False),
        claim(3, prompt="a fox", echo=True, truncate_prompt_tokens=1),
        claim(4, prompt="a fox"),
        claim(5, prompt=tokenizer.encode(["a 🙂"], special_tokens=False)[0][:-1], echo=True),
    ]
    prepared, _ = demo().prepare(claims)
    name = tokenizer.special_tokens["eos_token"]
    texts = [[prompt.text for prompt in item.prompts] for item in prepared]
    assert texts == [["a fox ", "two"], [f"{name}a fox"], [f"{name}a fox"], [tokenizer.decode(ids[-1:])], [""], ["a "]]


@pytest.mark.parametrize(("kept", "expected"), [(1, [5]), (3, [3, 4, 5]), (5, [1, 2, 3, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_a_prompt_of_token_ids_keeps_its_end(kept: int, expected: list[int]) -> None:
    (item,), _ = demo().prepare([claim(0, prompt=[1, 2, 3, 4, 5], truncate_prompt_tokens=kept)])
    assert item.prompts[0].token_ids == expected


def that_begins_texts(folder: Path) -> tuple[Preparation, Tokenizer, int]:
    """Return a preparation whose tokenizer puts a token before texts, and that token."""
    tokenizer = byte_level()
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    template = "<|begin|>{{ messages[0].content }}"
    loaded = TextTokenizer.load(str(write_folder(folder, tokenizer, template=template)))
    return Preparation(loaded, ["m"], ModelLimits(50, 1000)), tokenizer, begin


def test_special_tokens_are_added_to_completions_and_as_the_call_says(tmp_path: Path) -> None:
    preparation, tokenizer, begin = that_begins_texts(tmp_path)
    fox = tokenizer.encode("fox", add_special_tokens=False).ids
    asked = ({}, {"add_special_tokens": True}, {"add_special_tokens": False})
    chat = {"messages": [{"role": "user", "content": "fox"}]}
    claims = [
        *(claim(line, prompt="<|begin|>fox", **body) for line, body in enumerate(asked)),
        claim(3, prompt="fox fox", add_special_tokens=False, truncate_prompt_tokens=len(fox)),
        *(claim_of(CHAT, line, **chat, **body) for line, body in enumerate(asked, 4)),
    ]
    prepared, errors = preparation.prepare(claims)
    assert errors == []
    once, twice = [begin, *fox], [begin, begin, *fox]
    last = tokenizer.encode("fox fox", add_special_tokens=False).ids[-len(fox) :]
    found = [[prompt.token_ids for prompt in item.prompts] for item in prepared]
    assert found == [[twice], [twice], [once], [last], [once], [twice], [once]]


def test_a_prompt_that_is_cut_keeps_the_token_that_begins_a_text(tmp_path: Path) -> None:
    preparation, tokenizer, begin = that_begins_texts(tmp_path)
    text = "the fox " * 1000
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for kept, expected in ((4, [begin, *ids[-3:]]), (1, ids[-1:])):
        (item,), _ = preparation.prepare([claim(0, prompt=text, truncate_prompt_tokens=kept)])
        assert item.prompts[0].token_ids == expected
    (item,), _ = preparation.prepare([claim(0, prompt=text, truncate_prompt_tokens=-1, max_tokens=10)])
    assert item.prompts[0].token_ids == [begin, *ids[-39:]]


def test_the_two_ways_of_writing_a_bad_word() -> None:
    tokenizer = TextTokenizer.load(DEMO_MODEL)
    (item,), _ = demo().prepare([claim(0, prompt="x", bad_words=["fox", "the"])])
    runs = [
        tuple(ids) for word in ("fox", " fox", "the", " the") for ids in tokenizer.encode([word], special_tokens=False)
    ]
    assert item.prompts[0].sampling.bad_words == tuple(dict.fromkeys(runs))


@pytest.mark.parametrize(
    ("body", "param", "code", "words"),
    [
        ({"prompt": [1, 1024]}, "prompt[1]", "integer_above_max_value", "<= 1023"),
        ({"prompt": [[1], [2, 1024]]}, "prompt[1][1]", "integer_above_max_value", "<= 1023"),
        ({"prompt": "x", "logit_bias": {"1024": 1}}, "logit_bias", "invalid_value", "1024. Maximum value is 1023"),
        ({"prompt": "x", "stop_token_ids": [3, 1024]}, "stop_token_ids[1]", "integer_above_max_value", "<= 1023"),
        (
            {"prompt": "x", "min_tokens": 100, "max_tokens": None, "temperature": 0},
            "min_tokens",
            "invalid_value",
            "is 16",
        ),
        ({"prompt": [1] * 100}, "prompt", "context_length_exceeded", "resulted in 100 tokens"),
        (
            {"prompt": [[1], [1] * 90], "max_tokens": 11},
            "prompt[1]",
            "context_length_exceeded",
            "101 tokens (90 in the prompt, 11",
        ),
        ({"prompt": "x " * 5_000_000}, "prompt", "context_length_exceeded", "at least 625000 tokens"),
        ({"prompt": ["x", "x " * 5_000_000]}, "prompt[1]", "context_length_exceeded", "at least 625000 tokens"),
    ],
)
def test_what_the_model_cannot_take(body: dict[str, Any], param: str, code: str, words: str) -> None:
    ((status, found_param, found_code, message),) = refused(demo(), claim(0, **body))
    assert (status, found_param, found_code) == (400, param, code)
    assert words in message


def test_least_and_most_tokens_of_a_chat_that_names_no_limit() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "min_tokens": 100}
    chat = Claim(RequestKey("batch_a", 0), 1, Request(CHAT, "m", json.dumps(body).encode(), seed=0), None, 1, False)
    ((status, param, _, message),) = refused(demo(), chat)
    assert (status, param) == (400, "min_tokens")
    assert "leaves room for" in message


@pytest.mark.parametrize(
    ("answers", "max_tokens", "fits"),
    [(1, None, True), (6, None, True), (7, None, False), (1, 24_966, True), (1, 24_967, False)],
)
def test_log_probabilities_of_a_chat_with_a_long_context(answers: int, max_tokens: int | None, fits: bool) -> None:
    messages = [{"role": "user", "content": "x"}]
    body = {
        "model": "m",
        "messages": messages,
        "logprobs": True,
        "top_logprobs": 20,
        "n": answers,
        "max_tokens": max_tokens,
    }
    chat = Claim(RequestKey("batch_a", 0), 1, Request(CHAT, "m", json.dumps(body).encode(), seed=0), None, 1, False)
    prepared, errors = demo(131_072).prepare([chat])
    assert (len(prepared), len(errors)) == (fits, not fits)
    if not fits:
        error = json.loads(errors[0].result.body)["error"]
        assert (error["param"], error["code"]) == ("logprobs", "invalid_value")
        assert "at most 524288 can be given" in error["message"]


@pytest.mark.parametrize(
    ("text", "fits"),
    [("the fox " * 1_000_000, False), ("?" * 10_000_000, False), ("the " * 49, True), ("the fox " * 99, False)],
)
def test_a_long_text_of_a_vocabulary_that_says_nothing_is_not_tokenized_whole(
    tmp_path: Path, text: str, fits: bool
) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<x>", lstrip=True)])
    preparation = Preparation(TextTokenizer.load(str(write_folder(tmp_path, tokenizer))), ["m"], ModelLimits(100, 1000))
    assert preparation._tokenizer.longest_token is None
    prepared, errors = preparation.prepare([claim(0, prompt=text, max_tokens=1)])
    assert (len(prepared), len(errors)) == (fits, not fits)
    if len(text) > 1000:
        assert "resulted in more than 100 tokens" in json.loads(errors[0].result.body)["error"]["message"]


def test_a_long_text_of_few_tokens_fits(tmp_path: Path) -> None:
    preparation = Preparation(word_level(tmp_path), ["m"], ModelLimits(100, 3))
    (item,), _ = preparation.prepare([claim(0, prompt=" " * 100_000 + "one two")])
    assert item.prompts[0].token_ids == [0, 1]


def test_messages_that_cannot_fit_are_not_tokenized() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 1000}] * 10_000}
    chat = Claim(RequestKey("batch_a", 0), 1, Request(CHAT, "m", json.dumps(body).encode(), seed=0), None, 1, False)
    ((status, param, code, message),) = refused(demo(), chat)
    assert (status, param, code) == (400, "messages", "context_length_exceeded")
    assert "resulted in at least" in message


def test_the_tokenizers_own_end_ends_an_answer(tmp_path: Path) -> None:
    preparation = Preparation(word_level(tmp_path, eos="end"), ["m"], ModelLimits(100, 3))
    ends_at_two = {"prompt": "one", "stop_token_ids": [1]}
    claims = [claim(0, prompt="one"), claim(1, **ends_at_two), claim(2, **ends_at_two, ignore_eos=True)]
    prepared, errors = preparation.prepare(claims)
    assert errors == []
    assert [item.prompts[0].sampling.stop_token_ids for item in prepared] == [(2,), (1, 2), (1,)]
    assert [item.call.stop_token_ids for item in prepared] == [(), (1,), (1,)]


def test_a_seed_of_the_request_goes_before_the_stored_one() -> None:
    preparation = Preparation(TextTokenizer.load(DEMO_MODEL), ["m"], ModelLimits(100, 1000))
    prepared, _ = preparation.prepare(
        [claim(7, prompt="x"), claim(7, prompt="x", seed=3), claim(7, prompt="x", seed=-1)]
    )
    assert [item.prompts[0].sampling.seed for item in prepared] == [7, 3, 2**64 - 1]


def test_a_live_call_gets_the_workers_defaults_and_a_line_its_own() -> None:
    """A line has them in its body, unless they were not known when it was read."""
    limits, defaults = ModelLimits(100, 1024), {"temperature": 0.25, "max_tokens": 60}
    preparation = Preparation(TextTokenizer.load(DEMO_MODEL), ["m"], limits, defaults=defaults)
    chat = {"messages": [{"role": "user", "content": "hi"}]}

    def sampled(live: bool, mark: DefaultsMark = "", **body: Any) -> tuple[float, int]:
        request = Request(CHAT, "m", json.dumps({"model": "m", **chat, **body}).encode(), seed=1, defaults=mark)
        key = RequestKey("live_a" if live else "batch_a", 0)
        [prepared], errors = preparation.prepare([Claim(key, 1, request, None, 1, live)])
        assert errors == []
        assert isinstance(prepared, PreparedRequest)
        sampling = prepared.prompts[0].sampling
        assert prepared.call.is_deterministic == (sampling.temperature == 0)
        return sampling.temperature, sampling.max_tokens

    [room] = {sampled(live=False)[1]}
    assert 60 < room < 100
    assert sampled(live=True) == sampled(live=False, mark="worker") == (0.25, 60)
    assert sampled(live=True, temperature=0, max_tokens=5) == (0.0, 5)
    assert sampled(live=False) == (1.0, room)


def test_a_default_of_max_tokens_shrinks_to_the_room_beside_the_prompt() -> None:
    preparation = Preparation(
        TextTokenizer.load(DEMO_MODEL), ["m"], ModelLimits(40, 1024), defaults={"max_tokens": 1000}
    )
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    live = Request(CHAT, "m", json.dumps(body).encode(), seed=1)
    line = Request(CHAT, "m", json.dumps(body | {"max_tokens": 1000}).encode(), seed=1, defaults="max_tokens")
    own = Request(CHAT, "m", line.body, seed=1)
    claims = [
        Claim(RequestKey(batch, number), 1, request, None, 1, batch == "live_a")
        for number, (batch, request) in enumerate([("live_a", live), ("batch_a", line), ("batch_a", own)])
    ]
    prepared, errors = preparation.prepare(claims)
    made = [item.prompts[0] for item in prepared if isinstance(item, PreparedRequest)]
    assert [len(prompt.token_ids) + prompt.sampling.max_tokens for prompt in made] == [40, 40]
    assert [json.loads(item.result.body)["error"]["code"] for item in errors] == ["context_length_exceeded"]
    long = [{"role": "user", "content": "long " * 500}]
    cut = Request(CHAT, "m", json.dumps(body | {"messages": long, "truncate_prompt_tokens": -1}).encode(), seed=1)
    [prepared], _ = preparation.prepare([Claim(RequestKey("live_b", 0), 1, cut, None, 1, True)])
    assert isinstance(prepared, PreparedRequest)
    assert (len(prepared.prompts[0].token_ids), prepared.prompts[0].sampling.max_tokens) == (39, 1)


def test_a_large_default_of_max_tokens_refuses_no_log_probabilities() -> None:
    preparation = Preparation(
        TextTokenizer.load(DEMO_MODEL), ["m"], ModelLimits(200_000, 1024), defaults={"max_tokens": 150_000}
    )
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 5}
    request = Request(CHAT, "m", json.dumps(body).encode(), seed=1)
    prepared, errors = preparation.prepare([Claim(RequestKey("live_a", 0), 1, request, None, 1, True)])
    assert (len(prepared), errors) == (1, [])
