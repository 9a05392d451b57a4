"""Bodies and chunks are what the official client's types say."""

import codecs
import gc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.endpoint import AnswerHead, ChoiceEnd, Endpoint
from jobs.protocol.endpoints import ENDPOINTS
from jobs.protocol.logprobs import TextOffsets, chat_logprobs, completion_logprobs, text_offsets
from jobs.protocol.results import Choice, ParsedMessage, PositionLogprobs, TokenLogprob, ToolCall, Usage, encode_json

USAGE = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=4)
CHATS, TEXTS = ENDPOINTS[CHAT], ENDPOINTS[COMPLETIONS]
CHAT_HEAD, TEXT_HEAD = AnswerHead("chatcmpl-1", "m", 1), AnswerHead("cmpl-1", "m", 1)

A = TokenLogprob(5, b"a", -0.5, 1)
HALF = TokenLogprob(6, b"\xc3", -1.5, 2)
OTHER_HALF = TokenLogprob(7, b"\xa9", -0.25, 1)
NEVER = TokenLogprob(8, b"z", float("-inf"), 1000)
FIRST = TokenLogprob(9, b"p", None, 0)


def tokens(*texts: bytes) -> list[PositionLogprobs]:
    return [PositionLogprobs(TokenLogprob(number, text, -1.0, 1), []) for number, text in enumerate(texts)]


def strictly(model, body):  # type: ignore[no-untyped-def]
    """Validated as it would be after a trip over the wire: every required field there, of its
    type.
    """
    return model.model_validate_json(encode_json(body), strict=True)


def written(body: Any) -> Any:
    """As clients read it."""
    return msgspec.json.decode(encode_json(body))


def test_chat_body() -> None:
    choices = [Choice(0, "hello", "stop", "\n"), Choice(1, "world", "length")]
    body = CHATS.body(AnswerHead(CHATS.new_id(), "m", 1_700_000_000), choices, USAGE)
    parsed = strictly(ChatCompletion, body)
    assert parsed.id.startswith("chatcmpl-")
    assert [
        (choice.index, choice.message.content, choice.finish_reason, choice.logprobs) for choice in parsed.choices
    ] == [
        (0, "hello", "stop", None),
        (1, "world", "length", None),
    ]
    assert parsed.usage.total_tokens == 12
    assert parsed.usage.prompt_tokens_details.cached_tokens == 4
    assert [choice["stop_reason"] for choice in body["choices"]] == ["\n", None]
    assert "prompt_logprobs" not in body
    assert (body["object"], body["created"]) == ("chat.completion", 1_700_000_000)


def test_completion_body() -> None:
    body = TEXTS.body(AnswerHead(TEXTS.new_id(), "m", 1_700_000_000), [Choice(0, "hello", "length")], USAGE)
    parsed = strictly(Completion, body)
    assert parsed.id.startswith("cmpl-")
    assert (parsed.choices[0].text, parsed.choices[0].finish_reason, parsed.choices[0].logprobs) == (
        "hello",
        "length",
        None,
    )
    assert parsed.usage.prompt_tokens == 7


CALLS = [ToolCall("call_1", "f", '{"a": 1}'), ToolCall("call_2", "g", "")]
CALLS_IN_JSON = [
    {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
    {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": ""}},
]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (ParsedMessage("hello"), {"content": "hello"}),
        (ParsedMessage("", "why"), {"content": "", "reasoning": "why", "reasoning_content": "why"}),
        (ParsedMessage("", ""), {"content": ""}),
        (ParsedMessage(None, None, CALLS), {"content": None, "tool_calls": CALLS_IN_JSON}),
        (
            ParsedMessage("I call", "why", CALLS),
            {"content": "I call", "reasoning": "why", "reasoning_content": "why", "tool_calls": CALLS_IN_JSON},
        ),
    ],
)
def test_a_message_that_was_parsed(message: ParsedMessage, expected: dict[str, Any]) -> None:
    reason = "tool_calls" if message.tool_calls else "stop"
    body = CHATS.body(CHAT_HEAD, [Choice(0, "<the text>", reason, message=message)], USAGE)
    found = strictly(ChatCompletion, body).choices[0]
    assert body["choices"][0]["message"] == {"role": "assistant", "refusal": None, **expected}
    assert (found.finish_reason, found.message.content) == (reason, message.content)
    assert [call.function.name for call in found.message.tool_calls or []] == [call.name for call in message.tool_calls]


def test_tokens_of_reasoning_are_counted_where_they_are_known() -> None:
    choices = [Choice(0, "x", "stop")]
    assert strictly(ChatCompletion, CHATS.body(CHAT_HEAD, choices, USAGE)).usage.completion_tokens_details is None
    for count in (0, 3):
        usage = Usage(7, 5, 4, count)
        found = strictly(ChatCompletion, CHATS.body(CHAT_HEAD, choices, usage)).usage
        assert (found.completion_tokens_details.reasoning_tokens, found.total_tokens) == (count, 12)


def test_usage_adds_up() -> None:
    assert Usage().plus(USAGE).plus(Usage(1, 2, 3, 4)) == Usage(8, 7, 7, 4)


def test_token_ids_are_where_vllm_has_them() -> None:
    choices = [
        Choice(number, "x", "stop", token_ids=[5, number], prompt_token_ids=[1, 2, 3 * number]) for number in (0, 1)
    ]
    body = CHATS.body(CHAT_HEAD, choices, USAGE)
    strictly(ChatCompletion, body)
    assert [choice["token_ids"] for choice in body["choices"]] == [[5, 0], [5, 1]]
    assert body["prompt_token_ids"] == [1, 2, 0]
    body = TEXTS.body(TEXT_HEAD, choices, USAGE)
    strictly(Completion, body)
    assert [choice["token_ids"] for choice in body["choices"]] == [[5, 0], [5, 1]]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[1, 2, 0], [1, 2, 3]]


def test_tokens_of_log_probabilities_may_be_ids() -> None:
    choice = Choice(0, "aé", "stop", logprobs=[PositionLogprobs(A, [A, HALF])], tokens_as_ids=True)
    content = strictly(ChatCompletion, CHATS.body(CHAT_HEAD, [choice], USAGE)).choices[0].logprobs.content
    assert [(token.token, token.bytes) for token in content] == [("token_id:5", [97])]
    assert [top.token for top in content[0].top_logprobs] == ["token_id:5", "token_id:6"]
    logprobs = strictly(Completion, TEXTS.body(TEXT_HEAD, [choice], USAGE)).choices[0].logprobs
    assert (logprobs.tokens, logprobs.text_offset) == (["token_id:5"], [0])
    assert logprobs.top_logprobs == [{"token_id:5": -0.5, "token_id:6": -1.5}]


def test_logprobs_of_a_chat() -> None:
    choice = Choice(
        0,
        "aé",
        "stop",
        logprobs=[PositionLogprobs(A, [A, HALF]), PositionLogprobs(HALF, []), PositionLogprobs(NEVER, [A])],
    )
    content = strictly(ChatCompletion, CHATS.body(CHAT_HEAD, [choice], USAGE)).choices[0].logprobs.content
    assert [(token.token, token.logprob, token.bytes) for token in content] == [
        ("a", -0.5, [97]),
        ("\\xc3", -1.5, [0xC3]),
        ("z", -9999.0, [122]),
    ]
    assert [[top.token for top in token.top_logprobs] for token in content] == [["a", "\\xc3"], [], ["a"]]


def test_logprobs_of_a_completion() -> None:
    positions = [
        PositionLogprobs(HALF, [A]),
        PositionLogprobs(OTHER_HALF, [OTHER_HALF]),
        PositionLogprobs(A, [A, NEVER]),
    ]
    body = TEXTS.body(TEXT_HEAD, [Choice(0, "éa", "stop", logprobs=positions)], USAGE)
    logprobs = strictly(Completion, body).choices[0].logprobs
    assert logprobs.tokens == ["bytes:\\xc3", "bytes:\\xa9", "a"]
    assert logprobs.token_logprobs == [-1.5, -0.25, -0.5]
    assert logprobs.top_logprobs == [
        {"a": -0.5, "bytes:\\xc3": -1.5},
        {"bytes:\\xa9": -0.25},
        {"a": -0.5, "z": -9999.0},
    ]
    assert logprobs.text_offset == [0, 0, 1]


def test_the_first_token_of_an_echoed_prompt_has_no_logprob() -> None:
    positions = [PositionLogprobs(FIRST, []), PositionLogprobs(A, [A])]
    body = TEXTS.body(TEXT_HEAD, [Choice(0, "pa", "length", logprobs=positions)], USAGE)
    logprobs = body["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["token_logprobs"]) == (["p", "a"], [None, -0.5])
    assert (logprobs["top_logprobs"], logprobs["text_offset"]) == ([None, {"a": -0.5}], [0, 1])


def test_tokens_behind_a_stop_string_are_at_the_end_of_the_text() -> None:
    body = TEXTS.body(TEXT_HEAD, [Choice(0, "abc", "stop", "def", tokens(b"ab", b"c", b"d", b"ef"))], USAGE)
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 2, 3, 3]


@pytest.mark.parametrize(
    ("text", "pieces", "offsets"),
    [
        ("", [], []),
        ("héé!", [b"h\xc3", b"\xa9", b"\xc3", b"\xa9!"], [0, 1, 2, 2]),
        ("🙂a", [b"\xf0\x9f", b"\x99", b"\x82", b"a"], [0, 0, 0, 1]),
        ("the fox", [b"<s>", b" the", b" fox", b"</s>"], [0, 0, 3, 7]),
        ("a\ufffdb", [b"a", b"\xff", b"b"], [0, 1, 2]),
        ("\ud800x", [b"?", b"x"], [0, 1]),
        ("a\ufffd", [b"a", b"\xf0", b"\x9f\x8c"], [0, 1, 1]),
        ("é\ufffdbc", [b"\xc3", b"\xa9\xf0", b"\x9fb", b"c"], [0, 0, 1, 3]),
        ("\U0001f336b", [b"\x8c", b"\xb6", b"b"], [0, 0, 1]),
        ("\U0001f336\ufffd", [b"\xb6\xf0", b"\x9f"], [0, 1]),
    ],
)
def test_offsets_in_a_text(text: str, pieces: list[bytes], offsets: list[int]) -> None:
    assert text_offsets(text, tokens(*pieces)) == offsets


def test_of_two_tokens_that_read_the_same_the_more_likely_one_is_given() -> None:
    twins = PositionLogprobs(TokenLogprob(1, b"A", -3.0, 2), [TokenLogprob(2, b"A", -0.1, 1)])
    assert completion_logprobs([twins], [0])["top_logprobs"] == [{"A": -0.1}]
    assert chat_logprobs([twins])["content"][0].logprob == -3.0


def test_a_long_answer_costs_few_objects() -> None:
    """A text is made once for all positions that show it, and the garbage collector has nothing to
    look at.
    """
    first, second = chat_logprobs([PositionLogprobs(A, [A, HALF]), PositionLogprobs(A, [HALF])])["content"]
    assert first.token is second.token is first.top_logprobs[0].token
    assert first.top_logprobs[1].bytes is second.top_logprobs[0].bytes
    of_prompt = CHATS.body(CHAT_HEAD, [Choice(0, "x", "stop", prompt_logprobs=[PositionLogprobs(A, [A])])], USAGE)
    assert not any(map(gc.is_tracked, [A, first, *first.top_logprobs, *of_prompt["prompt_logprobs"][0].values()]))


@pytest.mark.parametrize("endpoint", [CHATS, TEXTS])
def test_half_a_character_in_a_model_s_name_does_not_keep_log_probabilities_from_being_written(
    endpoint: Endpoint,
) -> None:
    choices = [Choice(0, "a", "stop", logprobs=[PositionLogprobs(A, [A])], prompt_logprobs=[PositionLogprobs(A, [A])])]
    whole, broken = (written(endpoint.body(AnswerHead("1", name, 1), choices, USAGE)) for name in ("m", "\ud800"))
    assert broken == whole | {"model": "\ufffd"}


def test_logprobs_of_a_prompt() -> None:
    prompt = [PositionLogprobs(FIRST, []), PositionLogprobs(HALF, [A])]
    expected = [
        None,
        {
            "6": {"logprob": -1.5, "rank": 2, "decoded_token": "\ufffd"},
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
    ]
    choices = [Choice(0, "x", "stop", prompt_logprobs=prompt)]
    assert written(TEXTS.body(TEXT_HEAD, choices, USAGE))["choices"][0]["prompt_logprobs"] == expected
    assert written(CHATS.body(CHAT_HEAD, choices, USAGE))["prompt_logprobs"] == expected


def test_offsets_go_on_from_chunk_to_chunk() -> None:
    offsets = TextOffsets()
    assert offsets.of(tokens(b"a", b"b\xc3"), "ab") == [0, 1]
    assert offsets.of(tokens(b"\xa9", b"c", b"<end>"), "éc") == [2, 3, 4]
    assert offsets.of(tokens(b"d", b"e", b"f"), "") == [
        9,
        10,
        11,
    ]  # a held back text does not show that a token left nothing in it
    assert offsets.of(tokens(b"g", b"h"), "defgh") == [7, 8]


@pytest.mark.proof
@given(
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=12),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_offsets_of_a_stream_are_those_of_the_whole(
    text: str, pieces: list[tuple[int, bool]], begun: int, lost: int
) -> None:
    """Whatever bytes the tokens have, and wherever text is held back.

    The prompt may have the first bytes of the first character, and the last one may lack its end.
    """
    written, decoder, offsets = text.encode(), codecs.getincrementaldecoder("utf-8")("replace"), TextOffsets()
    before = b""
    if len(text) > 1:
        begun = min(begun, len(text[0].encode()) - 1)
        before = written[:begun]
        assert decoder.decode(before) == ""
        written = written[begun : len(written) - min(lost, len(text[-1].encode()) - 1)]
    found: list[int] = []
    parts: list[bytes] = []
    shown, held, waiting = "", "", []
    for length, hold in [*pieces, (len(written), False)]:
        token, written = written[:length], written[length:]
        parts.append(token)
        waiting.append(token)
        held += decoder.decode(token)
        if not hold:
            found += offsets.of(tokens(*waiting), held)
            shown, held, waiting = shown + held, "", []
    shown += decoder.decode(b"", True)
    assert found == text_offsets(shown, tokens(*parts))
    for offset, token in zip(found, parts, strict=True):
        assert offset == len(before.decode(errors="ignore")) or not token
        before += token


def test_chat_chunks() -> None:
    first = strictly(ChatCompletionChunk, CHATS.chunk(CHAT_HEAD, 2, CHATS.opening() or {}))
    assert (first.choices[0].index, first.choices[0].delta.role, first.choices[0].delta.content) == (2, "assistant", "")
    delta = CHATS.delta("a", [PositionLogprobs(A, [A])])
    middle = strictly(ChatCompletionChunk, CHATS.chunk(CHAT_HEAD, 0, delta))
    assert (middle.choices[0].delta.content, middle.choices[0].finish_reason) == ("a", None)
    assert middle.choices[0].logprobs.content[0].top_logprobs[0].logprob == -0.5
    ended = CHATS.chunk(CHAT_HEAD, 0, CHATS.delta(None, ()), ChoiceEnd("stop", 5))
    last = strictly(ChatCompletionChunk, ended)
    assert (last.choices[0].delta.content, last.choices[0].finish_reason) == (None, "stop")
    assert ended["choices"][0]["stop_reason"] == 5
    usage = strictly(ChatCompletionChunk, CHATS.usage_chunk(CHAT_HEAD, USAGE))
    assert (usage.choices, usage.usage.completion_tokens) == ([], 5)


def test_completion_chunks() -> None:
    assert TEXTS.opening() is None
    body = TEXTS.chunk(TEXT_HEAD, 3, TEXTS.delta("a", [PositionLogprobs(A, [])], TextOffsets()))
    assert (body["choices"][0]["index"], body["choices"][0]["finish_reason"]) == (3, None)
    assert body["choices"][0]["logprobs"]["text_offset"] == [0]
    last = strictly(Completion, TEXTS.chunk(TEXT_HEAD, 0, TEXTS.delta(None, ()), ChoiceEnd("stop")))
    assert (last.choices[0].text, last.choices[0].finish_reason) == ("", "stop")
    assert strictly(Completion, TEXTS.usage_chunk(TEXT_HEAD, USAGE)).usage.total_tokens == 12


@pytest.mark.parametrize(("endpoint", "prefix"), [(CHATS, "chatcmpl-"), (TEXTS, "cmpl-")])
def test_ids_differ(endpoint: Endpoint, prefix: str) -> None:
    ids = {endpoint.new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(body_id.startswith(prefix) for body_id in ids)
