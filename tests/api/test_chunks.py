"""The chunks of streams with several answers, log probabilities and echo are what the official
client's types say.
"""

from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from api.chunks import Chunks
from api.http.event_stream import event
from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.endpoint import AnswerHead
from jobs.protocol.endpoints import ENDPOINTS
from jobs.protocol.requests import ParsedDelta, RequestKey, StreamEntry, TokenChunk, ToolCallDelta
from jobs.protocol.results import Choice, PositionLogprobs, Result, TokenLogprob, Usage, encode_json
from jobs.protocol.validation import parse_call

KEY = RequestKey("live_1", 0)
USAGE = Usage(3, 4)


def chunks_of(endpoint: str, *entries: StreamEntry, **body: Any) -> list[dict[str, Any]]:
    """All chunks of a call, opening ones first; as events they are the same."""
    call = parse_call(
        endpoint, {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x", "stream": True, **body}
    )
    chunks, again = Chunks(call, 1), Chunks(call, 1)
    again._head = chunks._head
    openings = chunks.openings()
    answer = [chunk for entry in entries for chunk in chunks.of(entry)]
    assert again.events(entries) == b"".join(map(event, answer))
    found = [*openings, *answer]
    for chunk in found:
        model = ChatCompletionChunk if endpoint == CHAT else Completion
        choices = chunk.get("choices", [])
        # Completion requires finish reasons
        if "error" not in chunk and all(choice["finish_reason"] or endpoint == CHAT for choice in choices):
            model.model_validate_json(encode_json(chunk), strict=True)
    return found


def position(text: bytes) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(1, text, -0.5, 1), [TokenLogprob(1, text, -0.5, 1)])


def entry(*chunks: TokenChunk, result: Result | None = None) -> StreamEntry:
    return StreamEntry(KEY, "1-0", list(chunks), result=result)


def end(endpoint: str, *choices: Choice) -> Result:
    return Result(200, encode_json(ENDPOINTS[endpoint].body(AnswerHead("id", "m", 1), choices, USAGE)), USAGE, "req_1")


def test_each_answer_of_a_chat_has_its_opening_its_text_and_its_end() -> None:
    result = end(CHAT, Choice(0, "ab", "stop", "\n"), Choice(1, "c", "length"))
    found = chunks_of(
        CHAT,
        entry(TokenChunk(0, 0, [1], "a", 0), TokenChunk(1, 0, [3], "c", 0)),
        entry(TokenChunk(0, 1, [2], "b", 1), TokenChunk(1, 1, [4], "", 1), result=result),
        n=2,
        stream_options={"include_usage": True},
    )
    assert [
        [(choice["index"], choice["delta"], choice["finish_reason"]) for choice in chunk["choices"]] for chunk in found
    ] == [
        [(0, {"role": "assistant", "content": ""}, None)],
        [(1, {"role": "assistant", "content": ""}, None)],
        [(0, {"content": "a"}, None)],
        [(1, {"content": "c"}, None)],
        [(0, {"content": "b"}, None)],
        [(0, {}, "stop")],
        [(1, {}, "length")],
        [],
    ]
    assert [chunk["choices"][0].get("stop_reason") for chunk in found[-3:-1]] == ["\n", None]
    assert found[-1]["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in found[:-1])


def test_logprobs_of_a_chat_come_with_their_tokens_even_where_the_text_is_held_back() -> None:
    first = entry(TokenChunk(0, 0, [1], "", 0, [position(b"a")]))
    second = entry(TokenChunk(0, 1, [1, 1], "aab", 0, [position(b"a"), position(b"b")]))
    found = chunks_of(CHAT, first, second, logprobs=True, top_logprobs=1)
    assert [chunk["choices"][0]["delta"]["content"] for chunk in found] == ["", "", "aab"]
    contents = [(chunk["choices"][0]["logprobs"] or {}).get("content") for chunk in found]
    assert contents[0] is None
    assert [[token.token for token in content] for content in contents[1:]] == [["a"], ["a", "b"]]
    assert contents[1][0].top_logprobs[0].logprob == -0.5


def parsed(tokens: int, content: str = "", reasoning: str = "", *calls: ToolCallDelta) -> ParsedDelta:
    return ParsedDelta(tokens, content, reasoning, list(calls))


def deltas_in(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def test_deltas_of_a_text_that_was_parsed_take_its_place() -> None:
    opening = [
        parsed(1, "", "I "),
        parsed(2, "", "think"),
        parsed(4, "Let me see. "),
        parsed(5, "", "", ToolCallDelta(0, '{"a"', "call_1", "f")),
    ]
    rest = [
        parsed(6, "", "", ToolCallDelta(0, ": 1}")),
        parsed(7, "", "", ToolCallDelta(1, "", "call_2", "g"), ToolCallDelta(1, "{")),
        parsed(8, "", "", ToolCallDelta(1, "}")),
        parsed(9, "done", ""),
    ]
    found = chunks_of(
        CHAT,
        entry(TokenChunk(0, 0, [1] * 5, "<think>I think</think>", 0, parsed=opening)),
        entry(TokenChunk(0, 5, [1] * 3, "<tool_call>", 22, parsed=rest), result=end(CHAT, Choice(0, "", "tool_calls"))),
    )
    first, second = ({"type": "function", "id": name} for name in ("call_1", "call_2"))
    assert deltas_in(found[1:]) == [
        {"reasoning": "I think", "reasoning_content": "I think"},
        {"content": "Let me see. "},
        {"tool_calls": [{"index": 0, **first, "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {"tool_calls": [{"index": 1, **second, "function": {"name": "g", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {"content": "done"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in found] == [None] * 9 + ["tool_calls"]


def test_text_that_a_parser_holds_back_is_not_shown_but_its_logprobs_are() -> None:
    held = TokenChunk(0, 0, [1], "<tool", 0, [position(b"<tool")], parsed=[])
    deltas = [parsed(2, "", "a"), parsed(3, "b")]
    shown = TokenChunk(0, 1, [1, 1], "x", 5, [position(b"x"), position(b"y")], parsed=deltas)
    found = chunks_of(CHAT, entry(held), entry(shown), logprobs=True, top_logprobs=1)
    assert deltas_in(found[1:]) == [{}, {"reasoning": "a", "reasoning_content": "a"}, {"content": "b"}]
    contents = [(chunk["choices"][0]["logprobs"] or {}).get("content") or [] for chunk in found[1:]]
    assert [[token.token for token in content] for content in contents] == [["<tool"], ["x", "y"], []]
    assert deltas_in(chunks_of(CHAT, entry(TokenChunk(0, 0, [1], "<tool", 0, parsed=[])))[1:]) == []


def test_token_ids_come_with_each_chunk_and_the_prompts_with_the_first() -> None:
    first = TokenChunk(0, 0, [7, 8], "", 0, prompt_tokens=3, prompt_token_ids=[4, 5, 6])
    second = TokenChunk(0, 2, [9], "abc", 0)
    both = TokenChunk(0, 3, [10], "x", 3, parsed=[parsed(4, "b", "a")])
    found = chunks_of(CHAT, entry(first), entry(second), entry(both), return_token_ids=True)
    assert [chunk["choices"][0].get("token_ids") for chunk in found] == [None, [7, 8], [9], [10], None]
    assert [chunk.get("prompt_token_ids") for chunk in found] == [None, [4, 5, 6], None, None, None]
    found = chunks_of(COMPLETIONS, entry(first), entry(second), return_token_ids=True)
    assert [chunk["choices"][0].get("token_ids") for chunk in found] == [[7, 8], [9]]
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in found] == [[4, 5, 6], None]
    assert len(chunks_of(COMPLETIONS, entry(first), entry(second))) == 1


def test_tokens_of_log_probabilities_may_be_ids() -> None:
    chunk = entry(TokenChunk(0, 0, [1], "ab", 0, [position(b"ab")]))
    [found] = chunks_of(COMPLETIONS, chunk, logprobs=1, return_tokens_as_token_ids=True)
    assert found["choices"][0]["logprobs"]["tokens"] == ["token_id:1"]
    found = chunks_of(CHAT, chunk, logprobs=True, return_tokens_as_token_ids=True)[1]
    assert found["choices"][0]["logprobs"]["content"][0].token == "token_id:1"


def test_each_chunk_may_have_the_usage_so_far() -> None:
    entries = [
        entry(
            TokenChunk(0, 0, [1], "a", 0, prompt_tokens=3, cached_tokens=2),
            TokenChunk(1, 0, [3], "", 0, prompt_tokens=3),
        ),
        entry(TokenChunk(0, 1, [2, 2], "b", 1), TokenChunk(1, 1, [4], "c", 0)),
        entry(result=end(CHAT, Choice(0, "ab", "stop"), Choice(1, "c", "length"))),
    ]
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks_of(CHAT, *entries, n=2, stream_options=options)
    usages = [chunk["usage"] or {} for chunk in found]
    counts = [(usage.get("prompt_tokens"), usage.get("completion_tokens")) for usage in usages]
    assert counts == [(None, None), (None, None), (3, 1), (3, 3), (3, 2), (3, 3), (3, 2), (3, 4)]
    assert usages[2]["prompt_tokens_details"]["cached_tokens"] == 2
    assert found[-1]["choices"] == []
    alone = chunks_of(CHAT, *entries, n=2, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in alone)


def test_an_echo_comes_first_with_its_logprobs_and_offsets_go_on() -> None:
    start = PositionLogprobs(TokenLogprob(1, b"x", None, 0), [])
    chunk = TokenChunk(1, 0, [1], "xab", 0, [position(b"ab")], [start])
    found = chunks_of(
        COMPLETIONS,
        entry(chunk),
        entry(TokenChunk(1, 1, [1], "c", 3, [position(b"c")])),
        prompt=["y", "x"],
        echo=True,
        logprobs=1,
    )
    assert [(one["choices"][0]["index"], one["choices"][0]["text"]) for one in found] == [(1, "xab"), (1, "c")]
    logprobs = [one["choices"][0]["logprobs"] for one in found]
    assert [one["tokens"] for one in logprobs] == [["x", "ab"], ["c"]]
    assert [one["token_logprobs"] for one in logprobs] == [[None, -0.5], [-0.5]]
    assert [one["text_offset"] for one in logprobs] == [[0, 1], [3]]


def test_a_failure_in_the_midst_is_the_last_chunk() -> None:
    failed = Result(500, b'{"error":{"message":"x","type":"server_error","param":null,"code":null}}', USAGE, "req_1")
    found = chunks_of(
        COMPLETIONS, entry(TokenChunk(0, 0, [1], "a", 0)), entry(result=failed), stream_options={"include_usage": True}
    )
    assert found[-1] == {"error": {"message": "x", "type": "server_error", "param": None, "code": None}}


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}, {"logprobs": 0}])
def test_text_of_any_kind_is_escaped_as_in_any_other_chunk(endpoint: str, options: dict[str, Any]) -> None:
    """Its choices come in any order, and some of their chunks have nothing to show."""
    if endpoint == CHAT and "logprobs" in options:
        options = {"logprobs": True, "top_logprobs": 0}
    texts = ['"quoted" \\ back', "line\n\r\t\0\x7f", "h\u00e9 \u2028 \U0001f600", "half \ud83d of one", "data: x", ""]
    entries = [entry(TokenChunk(number % 2, number, [number], text, 0)) for number, text in enumerate(texts)]
    found = chunks_of(endpoint, *entries, entry(), n=2, model='m"\\', **options)
    shown = [choice.get("text", choice.get("delta", {}).get("content")) for one in found for choice in one["choices"]]
    assert [text for text in shown if text] == texts[:-1]
