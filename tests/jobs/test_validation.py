"""Every bad value gets the code, the parameter and a message that names it; nothing that comes from outside crashes the validator."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.results import ApiError
from jobs.validation import CHAT, COMPLETIONS, LineError, LineRequest, check_line, decode_body, parse_call

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "messages": MESSAGES, **changes}


def completion(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hi", **changes}


def without(body: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != name}


def message(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": "hi"} | fields])


class TestGoodCalls:
    def test_chat_defaults(self) -> None:
        call = parse_call(CHAT, chat())
        assert (call.model, call.messages, call.prompts) == ("m", MESSAGES, [])
        assert (call.max_tokens, call.temperature, call.top_p, call.top_k, call.seed) == (None, 1.0, 1.0, 0, None)
        assert (call.stop, call.stop_token_ids, call.ignore_eos, call.stream, call.include_usage) == ([], [], False, False, False)

    def test_completion_defaults(self) -> None:
        call = parse_call(COMPLETIONS, completion())
        assert (call.prompts, call.messages, call.max_tokens) == (["hi"], [], 16)

    @pytest.mark.parametrize(("prompt", "prompts"), [("a", ["a"]), ([1, 2], [[1, 2]]), (["a"], ["a"]), ([[1, 2]], [[1, 2]])])
    def test_forms_of_prompts(self, prompt: Any, prompts: Any) -> None:
        assert parse_call(COMPLETIONS, completion(prompt=prompt)).prompts == prompts

    def test_everything(self) -> None:
        call = parse_call(CHAT, chat(
            max_tokens=9, max_completion_tokens=5, temperature=0, top_p=0.5, top_k=-1, seed=-(2**63), stop="x", stop_token_ids=[1],
            ignore_eos=True, stream=True, stream_options={"include_usage": True}, n=1, logprobs=False, top_logprobs=0,
            frequency_penalty=0, response_format={"type": "text"}, unheard_of={"a": 1}, user="me", tools=[],
        ))  # fmt: skip
        assert (call.max_tokens, call.temperature, call.top_p, call.top_k, call.seed) == (5, 0.0, 0.5, 0, -(2**63))
        assert (call.stop, call.stop_token_ids, call.ignore_eos, call.stream, call.include_usage) == (["x"], [1], True, True, True)

    def test_null_is_the_default(self) -> None:
        names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "stream", "stream_options",
                 "n", "logprobs", "tools", "response_format")  # fmt: skip
        assert parse_call(CHAT, chat(**dict.fromkeys(names))) == parse_call(CHAT, chat())

    def test_parts_of_text_are_joined_and_tool_messages_kept(self) -> None:
        calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        call = parse_call(CHAT, chat(messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": "7", "tool_call_id": "c1"},
            {"role": "user", "content": "", "name": "ann", "unknown": 1},
        ]))  # fmt: skip
        assert call.messages == [
            {"role": "developer", "content": "a\nb"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "7", "tool_call_id": "c1"},
            {"role": "user", "content": "", "name": "ann"},
        ]


# endpoint, body, param, code
BAD_CALLS: list[tuple[str, Any, str | None, str]] = [
    (CHAT, [], "body", "invalid_type"),
    (CHAT, "x", "body", "invalid_type"),
    (CHAT, None, "body", "invalid_type"),
    (CHAT, without(chat(), "model"), "model", "missing_required_parameter"),
    (CHAT, chat(model=3), "model", "invalid_type"),
    (CHAT, chat(model=["m"]), "model", "invalid_type"),
    (CHAT, without(chat(), "messages"), "messages", "missing_required_parameter"),
    (CHAT, chat(messages=None), "messages", "missing_required_parameter"),
    (CHAT, chat(messages="hi"), "messages", "invalid_type"),
    (CHAT, chat(messages={"role": "user"}), "messages", "invalid_type"),
    (CHAT, chat(messages=[]), "messages", "empty_array"),
    (CHAT, chat(messages=["hi"]), "messages[0]", "invalid_type"),
    (CHAT, chat(messages=[None]), "messages[0]", "invalid_type"),
    (CHAT, chat(messages=[{"content": "hi"}]), "messages[0].role", "missing_required_parameter"),
    (CHAT, message(role="robot"), "messages[0].role", "invalid_value"),
    (CHAT, message(role="function"), "messages[0].role", "invalid_value"),
    (CHAT, message(role=1), "messages[0].role", "invalid_type"),
    (CHAT, chat(messages=[{"role": "user"}]), "messages[0].content", "missing_required_parameter"),
    (CHAT, message(content=None), "messages[0].content", "missing_required_parameter"),
    (CHAT, message(content=5), "messages[0].content", "invalid_type"),
    (CHAT, message(content={}), "messages[0].content", "invalid_type"),
    (CHAT, message(content=[]), "messages[0].content", "empty_array"),
    (CHAT, message(content=["a"]), "messages[0].content[0]", "invalid_type"),
    (CHAT, message(content=[{"text": "a"}]), "messages[0].content[0].type", "missing_required_parameter"),
    (CHAT, message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type", "invalid_value"),
    (CHAT, message(content=[{"type": "text", "text": "a"}, {"type": "text"}]), "messages[0].content[1].text",
     "missing_required_parameter"),
    (CHAT, message(content=[{"type": "text", "text": 4}]), "messages[0].content[0].text", "invalid_type"),
    (CHAT, message(content="\ud800"), "messages[0].content", "invalid_value"),
    (CHAT, message(name=4), "messages[0].name", "invalid_type"),
    (CHAT, message(role="assistant", content=None), "messages[0].content", "missing_required_parameter"),
    (CHAT, message(role="assistant", tool_calls={}), "messages[0].tool_calls", "invalid_type"),
    (CHAT, message(role="assistant", tool_calls=[1]), "messages[0].tool_calls[0]", "invalid_type"),
    (CHAT, message(role="assistant", tool_calls=[{"a": "\ud800"}]), "messages[0].tool_calls", "invalid_value"),
    (CHAT, chat(messages=[*MESSAGES, {"role": "user", "content": 1}]), "messages[1].content", "invalid_type"),
    (COMPLETIONS, without(completion(), "prompt"), "prompt", "missing_required_parameter"),
    (COMPLETIONS, completion(prompt=5), "prompt", "invalid_type"),
    (COMPLETIONS, completion(prompt={}), "prompt", "invalid_type"),
    (COMPLETIONS, completion(prompt=""), "prompt", "empty_string"),
    (COMPLETIONS, completion(prompt=[]), "prompt", "empty_array"),
    (COMPLETIONS, completion(prompt=[[]]), "prompt[0]", "empty_array"),
    (COMPLETIONS, completion(prompt=[""]), "prompt[0]", "empty_string"),
    (COMPLETIONS, completion(prompt=[1, "a"]), "prompt[1]", "invalid_type"),
    (COMPLETIONS, completion(prompt=[1, -2]), "prompt[1]", "integer_below_min_value"),
    (COMPLETIONS, completion(prompt=[2**31]), "prompt[0]", "integer_above_max_value"),
    (COMPLETIONS, completion(prompt=[1.5]), "prompt[0]", "invalid_type"),
    (COMPLETIONS, completion(prompt=[True]), "prompt[0]", "invalid_type"),
    (COMPLETIONS, completion(prompt="\udfff"), "prompt", "invalid_value"),
    (CHAT, chat(echo=True), "echo", "unsupported_value"),
    (COMPLETIONS, completion(suffix="x"), "suffix", "unsupported_value"),
    (CHAT, chat(n=0), "n", "integer_below_min_value"),
    (CHAT, chat(n="1"), "n", "invalid_type"),
    (CHAT, chat(n=True), "n", "invalid_type"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools", "unsupported_value"),
    (CHAT, chat(presence_penalty="x"), "presence_penalty", "invalid_type"),
    (CHAT, chat(response_format={"type": "json_object"}), "response_format.type", "unsupported_value"),
    (CHAT, chat(response_format="json"), "response_format", "invalid_type"),
    *[(CHAT, chat(max_tokens=value), "max_tokens", code) for value, code in (
        (0, "integer_below_min_value"), (-1, "integer_below_min_value"), (2**31, "integer_above_max_value"),
        (10**40, "integer_above_max_value"), ("9", "invalid_type"), (1.0, "invalid_type"), (True, "invalid_type"), ([], "invalid_type"))],
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens", "integer_below_min_value"),
    *[(CHAT, chat(temperature=value), "temperature", code) for value, code in (
        (-0.1, "decimal_below_min_value"), (-1, "decimal_below_min_value"), (2.1, "decimal_above_max_value"),
        (float("nan"), "invalid_value"), (float("inf"), "decimal_above_max_value"), (float("-inf"), "decimal_below_min_value"),
        (10**400, "decimal_above_max_value"), ("0.5", "invalid_type"), (False, "invalid_type"), ({}, "invalid_type"))],
    *[(CHAT, chat(top_p=value), "top_p", code) for value, code in (
        (0, "decimal_below_min_value"), (-0.5, "decimal_below_min_value"), (1.01, "decimal_above_max_value"), ("1", "invalid_type"))],
    *[(CHAT, chat(top_k=value), "top_k", code) for value, code in (
        (-2, "integer_below_min_value"), (2.0, "invalid_type"), (2**40, "integer_above_max_value"))],
    *[(CHAT, chat(seed=value), "seed", code) for value, code in (
        (2**63, "integer_above_max_value"), (-(2**63) - 1, "integer_below_min_value"), (1.5, "invalid_type"), ("1", "invalid_type"))],
    *[(CHAT, chat(stop=value), param, code) for value, param, code in (
        (5, "stop", "invalid_type"), ("", "stop", "empty_string"), (["a", ""], "stop[1]", "empty_string"),
        ([1], "stop[0]", "invalid_type"),
        (["x"] * 17, "stop", "array_above_max_length"), (["x"] * 100_000, "stop", "array_above_max_length"), ({}, "stop", "invalid_type"),
        (["\ud800"], "stop[0]", "invalid_value"))],
    *[(CHAT, chat(stop_token_ids=value), param, code) for value, param, code in (
        (5, "stop_token_ids", "invalid_type"), ([-1], "stop_token_ids[0]", "integer_below_min_value"),
        (["a"], "stop_token_ids[0]", "invalid_type"), ([1] * 2000, "stop_token_ids", "array_above_max_length"))],
    (CHAT, chat(ignore_eos=1), "ignore_eos", "invalid_type"),
    (CHAT, chat(stream="yes"), "stream", "invalid_type"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options", "invalid_value"),
    (CHAT, chat(stream=True, stream_options=[]), "stream_options", "invalid_type"),
    (CHAT, chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage", "invalid_type"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("endpoint", "body", "param", "code"), BAD_CALLS, ids=lambda value: None if isinstance(value, dict) else str(value)[:30]
)
def test_bad_calls(endpoint: str, body: Any, param: str | None, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_call(endpoint, body)
    error = caught.value
    assert (error.status, error.type, error.param, error.code) == (400, "invalid_request_error", param, code)
    assert str(param) in error.message or code == "invalid_value"
    json.dumps(error.body())
    assert len(error.message) < 500


@given(
    endpoint=st.sampled_from([CHAT, COMPLETIONS]),
    body=st.dictionaries(
        st.sampled_from([
            "model", "messages", "prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos",
            "stream", "stream_options", "n", "logprobs", "logit_bias", "tools", "response_format", "min_p",
        ]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
            lambda inner: st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage"]), inner, max_size=3),
            max_leaves=6,
        ),
    ),
)  # fmt: skip
def test_whatever_comes_is_a_call_or_an_error(endpoint: str, body: dict[str, Any]) -> None:
    try:
        parse_call(endpoint, {"model": "m", "messages": MESSAGES, "prompt": "x", **body})
    except ApiError as error:
        json.dumps(error.body())


def line(**changes: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": CHAT, "body": chat(), **changes}


def written(value: Any) -> str:
    return "1" + "0" * 4400 if value == 10**4400 else json.dumps(value).replace("1e+300", "1e999")


class TestLines:
    def test_a_good_one_keeps_its_body_byte_for_byte(self) -> None:
        body = b'{"model": "m",  "messages":[], "x": 1.50}'
        raw = b'{"custom_id": "a" , "method":"POST","url":"/v1/chat/completions", "body" : %b, "more": 1}' % body
        assert check_line(raw, 3) == LineRequest("a", CHAT, "m", body)

    def test_bad_values_inside_the_body_pass(self) -> None:
        for name, value in (("temperature", -1), ("stop", "\ud800"), ("top_p", 1e300), ("top_p", float("nan")), ("seed", 10**4400)):
            raw = json.dumps(line(body=chat(**{name: 0}))).replace(f'"{name}": 0', f'"{name}": {written(value)}').encode()
            checked = check_line(raw, 1)
            assert isinstance(checked, LineRequest)
            with pytest.raises(ApiError) as caught:
                parse_call(CHAT, decode_body(checked.body))
            assert caught.value.param == name

    @pytest.mark.parametrize(
        ("raw", "param", "code"),
        [
            (b"", None, "invalid_json_line"),
            (b"{", None, "invalid_json_line"),
            (b"[]", None, "invalid_json_line"),
            (b"5", None, "invalid_json_line"),
            (b'{"custom_id": "\xff"}', None, "invalid_json_line"),
            (b'{"custom_id": NaN}', "custom_id", "invalid_type"),
            (b'{"custom_id": nan}', None, "invalid_json_line"),
            (b"\xef\xbb\xbf" + json.dumps(line()).encode(), None, "invalid_json_line"),
            (json.dumps(line()).encode("utf-16"), None, "invalid_json_line"),
            (json.dumps(line()).encode("utf-16-le"), None, "invalid_json_line"),
            (json.dumps(line()).encode("utf-32-be"), None, "invalid_json_line"),
            (json.dumps(line(unknown="ü"), ensure_ascii=False).encode("latin-1"), None, "invalid_json_line"),
            (b"[" * 100_000, None, "invalid_json_line"),
            (b'{"a":' * 100_000, None, "invalid_json_line"),
            (json.dumps(line(body=0)).encode().replace(b": 0", b": " + b"9" * 5000), "body", "invalid_type"),
            (json.dumps(without(line(), "custom_id")).encode(), "custom_id", "missing_required_parameter"),
            (json.dumps(line(custom_id=None)).encode(), "custom_id", "missing_required_parameter"),
            (json.dumps(line(custom_id=5)).encode(), "custom_id", "invalid_type"),
            (json.dumps(line(custom_id="")).encode(), "custom_id", "empty_string"),
            (json.dumps(line(custom_id="\ud800")).encode(), "custom_id", "invalid_value"),
            (json.dumps(without(line(), "method")).encode(), "method", "missing_required_parameter"),
            (json.dumps(line(method="GET")).encode(), "method", "invalid_method"),
            (json.dumps(line(method="post")).encode(), "method", "invalid_method"),
            (json.dumps(line(method=["POST"])).encode(), "method", "invalid_method"),
            (json.dumps(without(line(), "url")).encode(), "url", "missing_required_parameter"),
            (json.dumps(line(url="/v1/embeddings")).encode(), "url", "invalid_url"),
            (json.dumps(line(url=COMPLETIONS)).encode(), "url", "invalid_url"),
            (json.dumps(line(url={})).encode(), "url", "invalid_url"),
            (json.dumps(without(line(), "body")).encode(), "body", "missing_required_parameter"),
            (json.dumps(line(body=[])).encode(), "body", "invalid_type"),
            (json.dumps(line(body="x")).encode(), "body", "invalid_type"),
            (json.dumps(line(body=chat(stream=True))).encode(), "body.stream", "streaming_unsupported"),
            (json.dumps(line(body=without(chat(), "model"))).encode(), "body.model", "missing_required_parameter"),
            (json.dumps(line(body=chat(model=5))).encode(), "body.model", "invalid_type"),
            (json.dumps(line(body=chat(model="other"))).encode(), "body.model", "model_not_found"),
        ],
        ids=lambda value: None if isinstance(value, bytes) else str(value),
    )
    def test_bad_ones(self, raw: bytes, param: str | None, code: str) -> None:
        error = check_line(raw, 17, endpoint=CHAT, models={"m"})
        assert isinstance(error, LineError)
        assert (error.code, error.line, error.param) == (code, 17, param)
        assert error.message.endswith(".")

    def test_either_endpoint_when_none_is_given(self) -> None:
        for url, body in ((CHAT, chat()), (COMPLETIONS, completion())):
            assert isinstance(check_line(json.dumps(line(url=url, body=body)).encode(), 1), LineRequest)


def test_a_body_that_is_not_json() -> None:
    with pytest.raises(ApiError) as caught:
        decode_body(b"{")
    assert (caught.value.status, caught.value.type) == (400, "invalid_request_error")
