"""Free text with tags whose contents have a form, in both shapes that clients send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jobs.protocol.output_format import OutputFormat
from tests.support.grammars import BYTES, accepts
from workers.grammars.compiler import compile_format
from workers.text.errors import FormatError

OLDER = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "integer"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def tag(name: str, content: Any = None) -> dict[str, Any]:
    inside = content or {"type": "json_schema", "json_schema": {"type": "integer"}}
    return {"type": "tag", "begin": f"<{name}>", "content": inside, "end": f"</{name}>"}


def wanted(tree: Any) -> OutputFormat:
    whole = tree if "structures" in tree else {"type": "structural_tag", "format": tree}
    return OutputFormat("structural_tag", json.dumps(whole))


A, B = tag("a"), tag("b")
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": [A, B]}
SEPARATED = {"type": "tags_with_separator", "tags": [A, B], "separator": "\n"}
STRING = {"type": "const_string", "value": "hi "}
DIGITS = {"type": "regex", "pattern": "[0-9]+"}
RULE = {"type": "grammar", "grammar": 'root ::= "z"'}


@pytest.mark.parametrize(
    ("tree", "good", "bad"),
    [
        (
            OLDER,
            ["", "hi <", 'hi <f=a>{"x": 1}</f> bye', '<f=b>12</f><f=a>{"x":1}</f>'],
            ["<f=c>", "<f=b>x</f>", "<f=b>1</f> <f=c"],
        ),
        (TRIGGERED, ["", "x", "x<a>1</a> tail", "<b>2</b>q<a>1</a>"], ["<a", "<b>x</b>"]),
        ({**TRIGGERED, "at_least_one": True}, ["x<a>1</a> tail"], ["", "x"]),
        ({**TRIGGERED, "stop_after_first": True}, ["x", "x<a>1</a>"], ["x<a>1</a> tail", "<a>1</a><b>1</b>"]),
        ({**TRIGGERED, "stop_after_first": True, "at_least_one": True}, ["x<a>1</a>"], ["x", "<a>1</a><b>1</b>"]),
        ({**TRIGGERED, "excludes": ["bad"]}, ["ba", "ba<a>1</a>"], ["a bad", "bad<a>1</a>"]),
        (SEPARATED, ["", "<a>1</a>", "<a>1</a>\n<b>2</b>"], ["<a>1</a><b>2</b>", "x", "<a>1</a>\n"]),
        ({**SEPARATED, "at_least_one": True, "separator": ""}, ["<a>1</a><b>1</b>"], [""]),
        ({**SEPARATED, "stop_after_first": True}, ["", "<a>1</a>"], ["<a>1</a>\n<b>2</b>"]),
        ({"type": "sequence", "elements": [STRING, DIGITS]}, ["hi 12"], ["hi ", "12"]),
        ({"type": "or", "elements": [DIGITS, RULE]}, ["12", "z"], ["12z", ""]),
        (tag("t", {"type": "any_text"}), ["<t>any\n<u></t>"], ["<t>x", "<t></t>x</t>"]),
        ({**tag("t", {"type": "any_text"}), "end": ["</t>", "!"]}, ["<t>x!", "<t>x</t>"], ["<t>x!y!"]),
        ({"type": "any_text", "excludes": ["no"]}, ["yes"], ["I know"]),
        ({"type": "any_text", "max_chars": 3}, ["é🙂x"], ["abcd"]),
        ({"type": "optional", "content": STRING}, ["", "hi "], ["hi hi "]),
        ({"type": "star", "content": STRING}, ["", "hi hi "], ["hi"]),
        ({"type": "plus", "content": STRING}, ["hi ", "hi hi "], [""]),
        ({"type": "json_schema", "json_schema": True}, ["[1]"], ["["]),
    ],
    ids=str,
)
def test_an_answer_has_its_tags(tree: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(wanted(tree), text)] == []
    assert [text for text in bad if accepts(wanted(tree), text)] == []


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "Structural tags of type 'qwen_xml_parameter' are not"),
        ({"type": "json_schema", "json_schema": {}, "style": "glm_xml"}, "Structural tags of style 'glm_xml' are not"),
        ({"type": "any_text", "max_tokens": 3}, "'max_tokens' of a structural tag is not supported"),
        ({"type": "sequence", "elements": []}, "'elements' must be a list of one format or more."),
        ({"type": "tag", "begin": "<a>", "end": "</a>"}, "Each tag must be an object with 'content'."),
        ({**A, "end": {"type": "token"}}, "'end' of a tag must be a text, or a list of texts."),
        ({**A, "begin": {"type": "token", "token": 1}}, "A structural tag needs 'begin', a text, at this place: "),
        ({**TRIGGERED, "triggers": ["<c"]}, "The tag that begins with '<a>' begins with none of the triggers."),
        ({**TRIGGERED, "triggers": []}, "'triggers' must be a list of one text or more"),
        ({**TRIGGERED, "at_least_one": 1}, "'at_least_one' of a structural tag must be true or false."),
        ({**OLDER, "structures": [{"begin": "<f="}]}, "structures[0] must be an object with 'schema'."),
        (
            tag("a", {"type": "json_schema", "json_schema": {"not": {}}}),
            "The schema uses 'not', which is not",
        ),
        ("text", "Each format of a structural tag must be an object with a 'type'."),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(tree: Any, sentence: str) -> None:
    with pytest.raises(FormatError) as caught:
        compile_format(wanted(tree), BYTES)
    assert str(caught.value).startswith(sentence)
