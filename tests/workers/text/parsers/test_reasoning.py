"""Reasoning is split from the answer, whatever the prompt said and however the text is cut."""

from __future__ import annotations

import pytest

from tests.workers.text.parsers.cuts import parse_pieces, parse_whole
from workers.text.errors import ParserError
from workers.text.parsers.answer import AnswerParser
from workers.text.parsers.hermes import HermesParser
from workers.text.parsers.reasoning import ReasoningParser
from workers.text.parsers.registry import find_reasoning_format


@pytest.mark.parametrize(
    ("name", "inside", "text", "reasoning", "content"),
    [
        ("deepseek_r1", True, "why</think>so", "why", "so"),
        ("deepseek_r1", None, "why</think>so", "why", "so"),
        ("deepseek_r1", None, "<think>\nwhy\n</think>\n\nso", "\nwhy\n", "\n\nso"),
        ("deepseek_r1", True, " \n<think>why</think>so", "why", "so"),
        ("deepseek_r1", True, "why <b> and no end", "why <b> and no end", ""),
        ("deepseek_r1", True, "why</think>so</think> <think>x", "why", "so</think> <think>x"),
        ("deepseek_r1", False, "so", "", "so"),
        ("qwen3", True, "why</think>so", "why", "so"),
        ("qwen3", None, "<think>why</think>so", "why", "so"),
        ("qwen3", None, "so", "", "so"),
        ("qwen3", None, "so <think>", "", "so <think>"),
        ("qwen3", False, "<think>so", "", "<think>so"),
        ("qwen3", True, "why <tool_call>call", "why ", "<tool_call>call"),
        ("qwen3", None, " <thin", "", " <thin"),
        ("tags:[THINK],[/THINK]", None, "[THINK]why[/THINK]so", "why", "so"),
        ("tags:[THINK],[/THINK]", None, "[so]", "", "[so]"),
    ],
)
def test_splits_at_the_end_tag(name: str, inside: bool | None, text: str, reasoning: str, content: str) -> None:
    for parts in ([text], list(text)):
        answer = parse_pieces(ReasoningParser(find_reasoning_format(name), inside), parts)
        assert (answer.reasoning, answer.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|assistant|>\n<think>\n", True),
        ("<|assistant|>\n<think>\n\n</think>\n\n", False),
        ("<|assistant|>\n", None),
        ("<|user|>what is <think>?<|assistant|>\n", None),
        ("", None),
    ],
)
def test_tells_from_the_prompt_where_the_answer_begins(prompt: str, inside: bool | None) -> None:
    assert find_reasoning_format("qwen3").in_reasoning(prompt) is inside


@pytest.mark.parametrize(
    ("answer", "inside"),
    [("<think>why", True), ("<think>why</think>so", False), ("why</think>", False), ("so", None), ("", None)],
)
def test_tells_from_a_continued_answer_where_it_goes_on(answer: str, inside: bool | None) -> None:
    assert find_reasoning_format("deepseek_r1").in_continued(answer) is inside


def test_says_after_each_piece_whether_it_is_inside() -> None:
    parser = AnswerParser(ReasoningParser(find_reasoning_format("qwen3")), HermesParser())
    states = []
    for part in ("<think>", "why", "</thi", "nk>", "so"):
        parser.feed(part)
        states.append(parser.reasoning)
    assert states == [True, True, True, False, False]


def test_calls_inside_reasoning_are_none() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    format = find_reasoning_format("deepseek_r1")
    answer = parse_whole(AnswerParser(ReasoningParser(format), HermesParser()), f"why {call}</think>{call}")
    assert answer.reasoning == f"why {call}"
    assert [(each.name, each.arguments) for each in answer.calls] == [("f", "{}")]


def test_one_call_alone_where_parallel_ones_are_not_allowed() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'
    answer = parse_whole(AnswerParser(None, HermesParser(), parallel=False), call + call)
    assert [(each.name, each.arguments) for each in answer.calls] == [("f", '{"n": 1}')]


@pytest.mark.parametrize("name", ["r1", "tags:", "tags:<a>", "tags:<a>,<a>", ""])
def test_refuses_unknown_names(name: str) -> None:
    with pytest.raises(ParserError, match="Choose one of deepseek_r1, qwen3, or give the tags"):
        find_reasoning_format(name)
