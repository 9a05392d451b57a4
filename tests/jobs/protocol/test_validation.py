"""Every bad value gets the code, the parameter and a message that names it; nothing that comes from
outside crashes the validator.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.lines import Line
from jobs.protocol.pooling_parameters import RERANK
from jobs.protocol.results import ApiError
from jobs.protocol.validation import LineError, check_line, decode_body, parse_call
from tests.support.bad_request import BadRequest, as_json
from tests.support.bad_requests import BAD_REQUESTS, HOSTILE_BUT_GOOD, NOT_JSON

MESSAGES = [{"role": "user", "content": "hi"}]
PART_B = {"type": "text", "text": "b"}


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "messages": MESSAGES, **changes}


def completion(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hi", **changes}


def without(body: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != name}


class TestGoodCalls:
    def test_chat_defaults(self) -> None:
        call = parse_call(CHAT, chat())
        assert (call.model, call.messages, call.prompts) == ("m", MESSAGES, ())
        assert (call.max_tokens, call.temperature, call.top_p, call.top_k, call.seed) == (None, 1.0, 1.0, 0, None)
        assert (call.stop, call.stop_token_ids, call.ignore_eos, call.stream, call.include_usage) == (
            [],
            (),
            False,
            False,
            False,
        )

    def test_completion_defaults(self) -> None:
        call = parse_call(COMPLETIONS, completion())
        assert (call.prompts, call.messages, call.max_tokens) == (["hi"], (), 16)

    @pytest.mark.parametrize(
        ("prompt", "prompts"),
        [
            ("a", ["a"]),
            ([1, 2], [[1, 2]]),
            (["a"], ["a"]),
            ([[1, 2]], [[1, 2]]),
            (["a", "b"], ["a", "b"]),
            ([[1], [2, 3]], [[1], [2, 3]]),
        ],
    )
    def test_forms_of_prompts(self, prompt: Any, prompts: Any) -> None:
        assert parse_call(COMPLETIONS, completion(prompt=prompt)).prompts == prompts

    def test_everything(self) -> None:
        call = parse_call(
            CHAT,
            chat(
                max_tokens=9,
                max_completion_tokens=5,
                temperature=0,
                top_p=0.5,
                top_k=-1,
                seed=-(2**63),
                stop="x",
                stop_token_ids=[1],
                ignore_eos=True,
                stream=True,
                stream_options={"include_usage": True},
                n=2,
                logprobs=True,
                top_logprobs=3,
                min_tokens=5,
                min_p=0.25,
                presence_penalty=-2,
                frequency_penalty=2,
                repetition_penalty=1.5,
                logit_bias={"5": -100, "7": 1.5},
                bad_words=["fox"],
                skip_special_tokens=False,
                priority=-7,
                truncate_prompt_tokens=-1,
                response_format={"type": "text"},
                unheard_of={"a": 1},
                user="me",
                tools=[],
                tool_choice="auto",
                modalities=["text"],
                length_penalty=1.0,
            ),
        )
        assert (call.n, call.best_of, call.sequences, call.logprobs, call.prompt_logprobs, call.echo) == (
            2,
            2,
            2,
            3,
            None,
            False,
        )
        assert (call.min_p, call.presence_penalty, call.frequency_penalty, call.repetition_penalty) == (
            0.25,
            -2.0,
            2.0,
            1.5,
        )
        assert (call.logit_bias, call.bad_words, call.min_tokens) == ({5: -100.0, 7: 1.5}, ["fox"], 5)
        assert (call.skip_special_tokens, call.priority, call.truncate_prompt_tokens) == (False, -7, -1)
        assert (call.max_tokens, call.temperature, call.top_p, call.top_k, call.seed) == (5, 0.0, 0.5, 0, -(2**63))
        assert (call.stop, call.stop_token_ids, call.ignore_eos, call.stream, call.include_usage) == (
            ["x"],
            (1,),
            True,
            True,
            True,
        )

    def test_what_only_completions_have(self) -> None:
        body = completion(prompt=["a", "b"], n=2, best_of=3, logprobs=0, prompt_logprobs=5, echo=True, max_tokens=0)
        call = parse_call(COMPLETIONS, body)
        assert (call.n, call.best_of, call.sequences) == (2, 3, 6)
        assert (call.logprobs, call.prompt_logprobs, call.echo, call.max_tokens) == (0, 5, True, 0)

    @pytest.mark.parametrize(("prompts", "answers"), [(512, 1), (4, 128), (170, 3)])
    def test_as_many_sequences_as_may_be(self, prompts: int, answers: int) -> None:
        assert parse_call(COMPLETIONS, completion(prompt=["x"] * prompts, n=answers)).sequences <= 512

    def test_null_is_the_default(self) -> None:
        names = (
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "seed",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "stream",
            "stream_options",
            "n",
            "best_of",
            "logprobs",
            "top_logprobs",
            "prompt_logprobs",
            "echo",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
            "min_tokens",
            "bad_words",
            "skip_special_tokens",
            "priority",
            "truncate_prompt_tokens",
            "tools",
            "response_format",
            "chat_template",
        )
        assert parse_call(CHAT, chat(**dict.fromkeys(names))) == parse_call(CHAT, chat())

    def test_parts_of_text_stay_apart_and_tool_messages_are_kept(self) -> None:
        calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        call = parse_call(
            CHAT,
            chat(
                messages=[
                    {"role": "developer", "content": [{"type": "text", "text": "a", "x": 1}, PART_B]},
                    {"role": "assistant", "content": None, "tool_calls": calls},
                    {"role": "tool", "content": "7", "tool_call_id": "c1"},
                    {"role": "user", "content": "", "name": "ann", "unknown": 1},
                ]
            ),
        )
        assert call.messages == [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, PART_B]},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "7", "tool_call_id": "c1"},
            {"role": "user", "content": "", "name": "ann"},
        ]


REFUSED = [case for case in BAD_REQUESTS if not case.needs_model and case.code != "model_not_found"]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_bad_calls(case: BadRequest) -> None:
    with pytest.raises(ApiError) as caught:
        parse_call(case.endpoint, decode_body(case.body))
    error = caught.value
    assert (error.status, error.type, error.param, error.code) == (400, "invalid_request_error", case.param, case.code)
    assert case.words in error.message
    json.dumps(error.body())
    assert len(error.message) < 500


@pytest.mark.parametrize("name", NOT_JSON)
def test_bodies_that_are_no_json(name: str) -> None:
    with pytest.raises(ApiError, match="could not parse the JSON body") as caught:
        decode_body(NOT_JSON[name])
    assert (caught.value.status, caught.value.type) == (400, "invalid_request_error")


@pytest.mark.parametrize("name", HOSTILE_BUT_GOOD)
def test_hostile_calls_that_are_good(name: str) -> None:
    body = HOSTILE_BUT_GOOD[name]
    parse_call(CHAT if "messages" in body else COMPLETIONS, decode_body(as_json(body)))


@given(
    endpoint=st.sampled_from([CHAT, COMPLETIONS]),
    body=st.dictionaries(
        st.sampled_from(
            [
                "model",
                "messages",
                "prompt",
                "max_tokens",
                "temperature",
                "top_p",
                "top_k",
                "seed",
                "stop",
                "stop_token_ids",
                "ignore_eos",
                "stream",
                "stream_options",
                "n",
                "best_of",
                "logprobs",
                "top_logprobs",
                "prompt_logprobs",
                "logit_bias",
                "tools",
                "response_format",
                "min_p",
                "min_tokens",
                "bad_words",
                "echo",
                "truncate_prompt_tokens",
                "priority",
                "chat_template",
            ]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["role", "content", "type", "text", "include_usage"]), inner, max_size=3
                )
            ),
            max_leaves=6,
        ),
    ),
)
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
        assert check_line(raw, 3) == Line("a", CHAT, "m", body, json.loads(body))

    def test_bad_values_inside_the_body_pass(self) -> None:
        for name, value in (
            ("temperature", -1),
            ("stop", "\ud800"),
            ("top_p", 1e300),
            ("top_p", float("nan")),
            ("seed", 10**4400),
        ):
            raw = (
                json.dumps(line(body=chat(**{name: 0}))).replace(f'"{name}": 0', f'"{name}": {written(value)}').encode()
            )
            checked = check_line(raw, 1)
            assert isinstance(checked, Line)
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
            (json.dumps(line(custom_id="ä" * 513)).encode(), "custom_id", "string_above_max_length"),
            (json.dumps(line(custom_id="\ud800")).encode(), "custom_id", "invalid_value"),
            (json.dumps(without(line(), "method")).encode(), "method", "missing_required_parameter"),
            (json.dumps(line(method="GET")).encode(), "method", "invalid_method"),
            (json.dumps(line(method="post")).encode(), "method", "invalid_method"),
            (json.dumps(line(method=["POST"])).encode(), "method", "invalid_method"),
            (json.dumps(without(line(), "url")).encode(), "url", "missing_required_parameter"),
            (json.dumps(line(url="/v1/responses")).encode(), "url", "invalid_url"),
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
        error = check_line(raw, 17, endpoint=CHAT, models={"m": None})
        assert isinstance(error, LineError)
        assert (error.code, error.line, error.param) == (code, 17, param)
        assert error.message.endswith(".")

    def test_where_no_model_is_served_each_is_refused(self) -> None:
        error = check_line(json.dumps(line()).encode(), 1, endpoint=CHAT, models={})
        assert isinstance(error, LineError)
        assert error.code == "model_not_found"
        assert error.message.endswith("Served here: none.")

    @pytest.mark.parametrize("alias", ["/rerank", "/v2/rerank", "/v1/rerank"])
    @pytest.mark.parametrize("endpoint", [None, RERANK])
    def test_a_url_may_be_any_of_its_endpoint(self, alias: str, endpoint: str | None) -> None:
        body = {"model": "m", "query": "q", "documents": ["d"]}
        found = check_line(json.dumps(line(url=alias, body=body)).encode(), 1, endpoint=endpoint)
        assert isinstance(found, Line)
        assert found.url == RERANK

    @pytest.mark.parametrize("url", [[], {}, [CHAT], 5, ""])
    @pytest.mark.parametrize("endpoint", [CHAT, None])
    def test_a_url_may_be_anything(self, url: Any, endpoint: str | None) -> None:
        error = check_line(json.dumps(line(url=url)).encode(), 1, endpoint=endpoint, models={"m": None})
        assert isinstance(error, LineError)
        assert (error.code, error.param) == ("invalid_url", "url")

    def test_either_endpoint_when_none_is_given(self) -> None:
        for url, body in ((CHAT, chat()), (COMPLETIONS, completion())):
            assert isinstance(check_line(json.dumps(line(url=url, body=body)).encode(), 1), Line)
