"""Calls of tools are found in what models write, and what is no call is content."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.workers.text.parsers.cuts import calls, parse_pieces, parse_whole
from tests.workers.text.parsers.tool_call_texts import TOOLS
from workers.text.parsers.base import Parsed, ToolCallPiece
from workers.text.parsers.enforced import NamedCallParser, RequiredCallsParser
from workers.text.parsers.registry import TOOL_PARSERS, find_tool_parser

_HERMES = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def read(name: str, text: str, tools: list[dict[str, Any]] | None = None) -> tuple[str, list[tuple[str, str]]]:
    answer = parse_whole(find_tool_parser(name)(tools or []), text)
    assert parse_pieces(find_tool_parser(name)(tools or []), text) == answer
    return answer.content, calls(answer)


@pytest.mark.parametrize(
    ("name", "text", "content", "expected"),
    [
        ("hermes", f"So:\n{_HERMES}\n", "So:", [("f", '{"a": 1}')]),
        ("hermes", f" \n{_HERMES}", "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool', "", [("f", '{"a": "</tool')]),
        ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}', None, []),
        ("hermes", '<tool_call>{"name": "", "arguments": {"a": 1}}', "", [("", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": 1}</tool_call>', "", [("f", "1")]),
        ("hermes", f"<tool_call>{{{_HERMES}", None, []),
        ("llama3_json", '{"name": "f", "parameters": {"a": "}"}} ', "", [("f", '{"a": "}"}')]),
        ("llama3_json", 'In {a, b}: {"c": 1}', None, []),
        ("llama3_json", 'a <|python_tag|>b {"name": "f", "parameters": {}}', "a <|python_tag|>b", [("f", "{}")]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]abc", "", [("f", "{}")]),
        ("mistral", '[TOOL_CALLS]f{"a": 1[TOOL_CALLS]g{}', "", [("f", '{"a": 1'), ("g", "{}")]),
        ("mistral", '[TOOL_CALLS]f{"a": "[TOOL"}', "", [("f", '{"a": "[TOOL"}')]),
        ("mistral", "a [TOOL_CALLS] [ 1, 2]", "a [ 1, 2]", []),
        ("mistral", "[TOOL_CALLS] [", "[", []),
        ("mistral", "[ARGS] [TOOL", None, []),
        ("qwen3_coder", "<function=f>\n</function>", "", [("f", "{}")]),
        ("qwen3_coder", "<function=f>\n<parameter=a", "", [("f", "{}")]),
        ("qwen3_coder", "<function=f><parameter=a>\nb\n", "", [("f", '{"a": "b')]),
        ("qwen3_coder", "<function=f><parameter=a></parameter>", "", [("f", '{"a": ""}')]),
        ("qwen3_coder", "<function=f><function=g></function>", "", [("f", "{}"), ("g", "{}")]),
        ("qwen3_coder", "<function=f<function=g></function>", "<function=f", [("g", "{}")]),
        ("qwen3_coder", "a < b, <tool_call> <tool_call>", None, []),
        ("pythonic", " [f()]", "", [("f", "{}")]),
        ("pythonic", '[f(a="""b"c""", d="")]', "", [("f", '{"a": "b\\"c", "d": ""}')]),
        ("pythonic", "[f(a=')]', b=[')'], ),]", "", [("f", '{"a": ")]", "b": [")"]}')]),
        ("pythonic", "[f(from=1, a_b=None)]", "", [("f", '{"from": 1, "a_b": null}')]),
        ("pythonic", "[f(a='\\ud83d')]", "", [("f", '{"a": "\\ud83d"}')]),
        ("pythonic", "[f(a=f'{b}')]", None, []),
        ("pythonic", "[f(a=1e999)]", None, []),
        ("pythonic", f"[f(a=0x{'f' * 5000})]", None, []),
        ("pythonic", "[f(a='\\UFFFFFFFF')]", None, []),
        ("pythonic", "[f(**{'a': 1})]", None, []),
        ("pythonic", f"[f(a={'[' * 60}1{']' * 60})]", None, []),
        ("pythonic", "[f", None, []),
        ("pythonic", f"[{'f' * 300}()]", None, []),
        ("pythonic", "[f(", None, []),
    ],
)
def test_reads_calls_and_content(name: str, text: str, content: str | None, expected: list[tuple[str, str]]) -> None:
    """None is for a text that is all content."""
    assert read(name, text) == (text if content is None else content, expected)


def test_passes_on_arguments_as_they_come() -> None:
    parser = find_tool_parser("hermes")()
    parts = ['I <tool_call>{"na', 'me": "f", "argu', 'ments": {"a', '": "b', 'c"}', "}</tool_call>", "<to"]
    assert [parser.feed(part) for part in parts] == [
        Parsed("I"),
        Parsed(),
        Parsed(tool_calls=(ToolCallPiece(0, '{"a', "f"),)),
        Parsed(tool_calls=(ToolCallPiece(0, '": "b'),)),
        Parsed(tool_calls=(ToolCallPiece(0, 'c"}'),)),
        Parsed(),
        Parsed(),
    ]


def test_passes_on_text_parameters_as_they_come() -> None:
    parser = find_tool_parser("qwen3_coder")()
    parts = ["<tool_call>\n<function=f>\n<para", "meter=a>\n", "x\n", "é</", "b></parameter></function>"]
    assert [parser.feed(part).tool_calls for part in parts] == [
        (ToolCallPiece(0, "", "f"),),
        (ToolCallPiece(0, '{"a": "'),),
        (ToolCallPiece(0, "x"),),
        (ToolCallPiece(0, "\\né"),),
        (ToolCallPiece(0, '</b>"}'),),
    ]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "integer"}, " 12 ", 12),
        ({"type": "integer"}, "1.5", 1.5),
        ({"type": "number"}, "2.50", 2.5),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "maybe", "maybe"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x", "x"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["a", None]}, "null", None),
        ({"type": "array"}, '["a", {"b": 1}]', ["a", {"b": 1}]),
        ({"type": "object"}, "{a}", "{a}"),
        ({"type": "object"}, "[" * 20_000, "[" * 20_000),
        ({"type": "array"}, '["\\ud800"]', ["\ud800"]),
        ({}, "1", "1"),
        (True, "1", "1"),
        ({"type": 3, "anyOf": 3, "enum": 3}, "1", "1"),
    ],
)
def test_reads_parameters_by_their_types(schema: Any, text: str, value: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    content, [(_, arguments)] = read(
        "qwen3_coder", f"<function=f><parameter=a>\n{text}\n</parameter></function>", tools
    )
    assert (content, json.loads(arguments)) == ("", {"a": value})
    arguments.encode()


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (
            '[{"name": "f", "parameters": {"a": [1]}}, {"name": "g", "parameters": {}}]',
            "",
            [("f", '{"a": [1]}'), ("g", "{}")],
        ),
        ('\n[ {"name": "f", "parameters": {"a": ', "", [("f", '{"a": ')]),
        ("[]", "[]", []),
        ("Sorry. [1]", "Sorry. [1]", []),
        (" ", " ", []),
    ],
)
def test_reads_required_calls(text: str, content: str, expected: list[tuple[str, str]]) -> None:
    answer = parse_whole(RequiredCallsParser(TOOLS), text)
    assert parse_pieces(RequiredCallsParser(TOOLS), text) == answer
    assert (answer.content, calls(answer)) == (content, expected)


_FIRST = '[{"name": "get_weather", "parameters": {"city": "Rome"}}'
_WHOLE_FIRST = ("get_weather", '{"city": "Rome"}')
_BEGUN_FIRST = ("get_weather", "")


@pytest.mark.parametrize(
    ("text", "of_one_tool", "of_all_tools"),
    [
        ("[", [_BEGUN_FIRST], []),
        ("[ ", [_BEGUN_FIRST], []),
        ('[{"na', [_BEGUN_FIRST], []),
        ('[{"name": "get', [_BEGUN_FIRST], [_BEGUN_FIRST]),
        ('[{"name": "get_weather", "para', [_BEGUN_FIRST], [_BEGUN_FIRST]),
        (_FIRST[:-4], [("get_weather", '{"city": "Rom')], [("get_weather", '{"city": "Rom')]),
        (_FIRST + ",", [_WHOLE_FIRST], [_WHOLE_FIRST]),
        (_FIRST + ', {"name": "boo', [_WHOLE_FIRST], [_WHOLE_FIRST, ("book_table", "")]),
        (_FIRST + ', {"', [_WHOLE_FIRST, _BEGUN_FIRST], [_WHOLE_FIRST]),
    ],
)
def test_a_required_call_that_is_cut_has_its_function_as_soon_as_that_is_clear(
    text: str, of_one_tool: list[tuple[str, str]], of_all_tools: list[tuple[str, str]]
) -> None:
    for tools, expected in ((TOOLS[:1], of_one_tool), (TOOLS, of_all_tools)):
        answer = parse_whole(RequiredCallsParser(tools), text)
        assert parse_pieces(RequiredCallsParser(tools), text) == answer
        assert (answer.content, calls(answer)) == ("", expected)


def test_the_name_of_a_required_call_that_is_cut_may_begin_another_one() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("get", "get_all")]
    for text, names in (('[{"name": "get', []), ('[{"name": "get"', ["get"]), ('[{"name": "get_', ["get_all"])):
        answer = parse_whole(RequiredCallsParser(tools), text)
        assert ([call.name for call in answer.calls], answer.content) == (names, "")


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        ('{"a": {"b": "}"}}', "", [("f", '{"a": {"b": "}"}}')]),
        (' {"a": 1} ', "", [("f", '{"a": 1}')]),
        ('{"a"', "", [("f", '{"a"')]),
        ("Sorry.", "Sorry.", []),
        ("", "", []),
    ],
)
def test_reads_the_arguments_of_a_named_function(text: str, content: str, expected: list[tuple[str, str]]) -> None:
    answer = parse_whole(NamedCallParser("f"), text)
    assert parse_pieces(NamedCallParser("f"), text) == answer
    assert (answer.content, calls(answer)) == (content, expected)


@pytest.mark.parametrize("name", [name for name in TOOL_PARSERS if find_tool_parser(name).call_syntax])
def test_reads_what_its_syntax_writes(name: str) -> None:
    syntax = find_tool_parser(name).call_syntax
    assert syntax is not None
    written = [
        f"{syntax.begin(function)}{arguments}{syntax.end}" for function, arguments in (("f", "{}"), ("g", '{"a": 1}'))
    ]
    assert all(each.startswith(syntax.trigger) for each in written)
    assert read(name, syntax.separator.join(written)) == ("", [("f", "{}"), ("g", '{"a": 1}')])


def test_a_long_text_takes_no_longer_for_its_markers() -> None:
    """It took minutes when the rest of the text was copied for each."""
    text, before = "<function=f>" * 100_000, time.process_time()
    parse_whole(find_tool_parser("qwen3_coder")(), text)
    assert time.process_time() - before < 30
