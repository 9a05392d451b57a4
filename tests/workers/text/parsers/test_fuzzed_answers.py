"""Whatever a model writes, parsers do not raise, do not mind cuts, and lose nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.text.parsers.cuts import WholeAnswer, calls, parse_pieces, parse_whole, pieces
from tests.workers.text.parsers.tool_call_texts import TOOLS, tool_call_texts
from workers.text.parsers.answer import AnswerParser
from workers.text.parsers.base import OutputParser
from workers.text.parsers.enforced import NamedCallParser, RequiredCallsParser
from workers.text.parsers.python_literal import read_call
from workers.text.parsers.reasoning import ReasoningParser
from workers.text.parsers.registry import find_reasoning_format, find_tool_parser

_FAMILIES = ["hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"]
_PARSERS: dict[str, Callable[[], OutputParser]] = {
    **{name: lambda name=name: find_tool_parser(name)(TOOLS) for name in _FAMILIES},  # type: ignore[misc]
    "required": lambda: RequiredCallsParser(TOOLS[:1]),
    "named": lambda: NamedCallParser("f"),
    **{
        f"{name} {inside}": lambda name=name, inside=inside: AnswerParser(  # type: ignore[misc]
            ReasoningParser(find_reasoning_format(name), inside), find_tool_parser("hermes")()
        )
        for name in ("deepseek_r1", "qwen3")
        for inside in (True, False, None)
    },
}
_TOKENS = [
    *["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>"],
    *["<function=", "</function>", "<parameter=", "</parameter>", ">", "<", "</", "\n", " ", "; ", "a", "f", "é", "🌧"],
    *['{"name": "f", "arguments": {', '"parameters": ', '"name"', '"arguments"', ": ", '"a"', "{", "}", "[", "]", ","],
    *[
        "[f(",
        "a=",
        "1",
        "-",
        "'",
        '"',
        '"""',
        "\\",
        "\\u",
        "d83d",
        "(",
        ")",
        "null",
        "None",
        ".",
        "get_weather",
        "days",
    ],
]
_texts = st.lists(st.sampled_from(_TOKENS) | st.text(max_size=3), max_size=25).map("".join)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=8,
)


@pytest.mark.proof
@pytest.mark.parametrize("name", _PARSERS)
@given(text=_texts, data=st.data())
def test_cuts_do_not_matter_and_nothing_is_lost(name: str, text: str, data: st.DataObject) -> None:
    check(_PARSERS[name], text, data.draw(st.sets(st.integers(0, len(text)))))


@pytest.mark.proof
@pytest.mark.parametrize("name", _PARSERS)
@given(text=_texts, data=st.data())
@settings(max_examples=600, deadline=None)
def test_cuts_do_not_matter_in_many_texts(name: str, text: str, data: st.DataObject) -> None:
    check(_PARSERS[name], text, data.draw(st.sets(st.integers(0, len(text)))))


@pytest.mark.proof
@given(st.sampled_from(tool_call_texts()), st.data())
@settings(max_examples=600, deadline=None)
def test_changed_texts_are_read_however_they_are_cut(text: Any, data: st.DataObject) -> None:
    """Texts with calls, of which a part was replaced."""
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text.text))] * 2)))
    changed = text.text[:start] + data.draw(_texts) + text.text[end:]
    check(_PARSERS[text.family.removesuffix("_v11")], changed, data.draw(st.sets(st.integers(0, len(changed)))))


def check(make: Callable[[], OutputParser], text: str, cuts: set[int]) -> None:
    whole = parse_whole(make(), text)
    assert parse_pieces(make(), pieces(text, cuts)) == whole
    assert parse_pieces(make(), text) == whole
    json.dumps([whole.content, whole.reasoning, calls(whole)], ensure_ascii=False).encode()
    if not whole.calls:
        assert without_markers(whole.reasoning + whole.content) == without_markers(text)


def without_markers(text: str) -> str:
    """Without what may be dropped where there is no call."""
    return re.sub(r"\s|\[TOOL_CALLS\]|</?think>", "", text)


@given(st.dictionaries(st.text(), _json), _json, st.data())
def test_reads_all_json(arguments: dict[str, Any], other: Any, data: st.DataObject) -> None:
    """With any layout, and beside any other key."""
    layout = data.draw(st.fixed_dictionaries({"indent": st.sampled_from([None, 1]), "ensure_ascii": st.booleans()}))
    keys = [("name", "f"), ("arguments", arguments), ("x", other)]
    call = json.dumps(dict(data.draw(st.permutations(keys))), **layout)
    for name, text in (("llama3_json", call), ("mistral", f"[TOOL_CALLS] [{call}, {call}]")):
        answer = parse_pieces(find_tool_parser(name)(), text)
        assert [(each.name, json.loads(each.arguments)) for each in answer.calls][:1] == [("f", arguments)]
        assert not answer.content
    if "tool_call>" not in call:
        answer = parse_whole(find_tool_parser("hermes")(), f"<tool_call>{call}</tool_call>")
        assert [(each.name, json.loads(each.arguments)) for each in answer.calls] == [("f", arguments)]


@given(st.dictionaries(st.from_regex(r"[a-z_]\w*", fullmatch=True), _json))
def test_reads_all_literals(arguments: dict[str, Any]) -> None:
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    answer = parse_pieces(find_tool_parser("pythonic")(), f"[f({written})]")
    assert [(each.name, json.loads(each.arguments)) for each in answer.calls] == [("f", arguments)]


@given(st.lists(st.sampled_from([*_TOKENS, "0x", "1e5", "_", "r'", 'f"', "\\x4", "\\777", "{1: 2}"])).map("".join))
def test_reads_literals_or_says_that_they_are_none(text: str) -> None:
    try:
        name, _ = read_call(f"f({text})")
    except ValueError:
        return
    assert name == "f"


@given(st.dictionaries(st.sampled_from(["city", "x"]), st.text(), min_size=1))
def test_reads_all_text_between_tags(parameters: dict[str, str]) -> None:
    """But for tags of the format and line breaks at the ends."""
    values = {name: re.sub(r"</?(function|parameter)", "", text) for name, text in parameters.items()}
    tags = "".join(f"<parameter={name}>\n{text}\n</parameter>" for name, text in values.items())
    answer: WholeAnswer = parse_pieces(
        find_tool_parser("qwen3_coder")(TOOLS), f"<function=get_weather>{tags}</function>"
    )
    assert [(each.name, json.loads(each.arguments)) for each in answer.calls] == [("get_weather", values)]
