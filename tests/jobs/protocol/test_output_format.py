"""Whichever parameter asks for a form of the answer, a call has it in one field."""

import json
from typing import Any

import pytest

from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.output_format import OutputFormat
from jobs.protocol.validation import Call, parse_call

SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"const": "ü\u2028"}}, "required": ["z"]}
SOURCE = '{"type":"object","properties":{"z":{"type":"string"},"a":{"const":"ü\u2028"}},"required":["z"]}'
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
NEW_TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}


def call_of(endpoint: str, **changes: Any) -> Call:
    body = {"messages": [{"role": "user", "content": "x"}]} if endpoint == CHAT else {"prompt": "x"}
    return parse_call(endpoint, {"model": "m", **body, **changes})


def as_text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


GOOD: list[tuple[dict[str, Any], OutputFormat | None]] = [
    ({}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, OutputFormat("json_object")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a-B_9", "schema": SCHEMA}}},
        OutputFormat("json_schema", SOURCE),
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n" * 64, "schema": SCHEMA, "strict": True, "description": "d"},
            }
        },
        OutputFormat("json_schema", SOURCE),
    ),
    (
        {"response_format": {"type": "structural_tag", **TAG}},
        OutputFormat("structural_tag", as_text({"type": "structural_tag", **TAG})),
    ),
    ({"response_format": NEW_TAG}, OutputFormat("structural_tag", as_text(NEW_TAG))),
    ({"structured_outputs": {"json": SCHEMA}}, OutputFormat("json_schema", SOURCE, "structured_outputs")),
    (
        {"structured_outputs": {"json": json.dumps(SCHEMA, indent=2), "regex": None}},
        OutputFormat("json_schema", SOURCE, "structured_outputs"),
    ),
    ({"structured_outputs": {"regex": "a|[0]"}}, OutputFormat("regex", "a|[0]", "structured_outputs")),
    ({"structured_outputs": {"choice": ["b", "ä"]}}, OutputFormat("choice", '["b","ä"]', "structured_outputs")),
    (
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        OutputFormat("grammar", 'root ::= "a"', "structured_outputs"),
    ),
    ({"structured_outputs": {"json_object": True}}, OutputFormat("json_object", "", "structured_outputs")),
    (
        {"structured_outputs": {"structural_tag": json.dumps(NEW_TAG)}},
        OutputFormat("structural_tag", as_text(NEW_TAG), "structured_outputs"),
    ),
    (
        {"structured_outputs": {"json": {}, "json_object": False, "whitespace_pattern": "[ ]?"}},
        OutputFormat("json_schema", "{}", "structured_outputs", "[ ]?"),
    ),
    (
        {"structured_outputs": {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True}},
        OutputFormat("json_object", "", "structured_outputs", ""),
    ),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        OutputFormat("regex", "a", "structured_outputs"),
    ),
    ({"guided_json": SCHEMA}, OutputFormat("json_schema", SOURCE, "guided_json")),
    ({"guided_json": as_text(SCHEMA)}, OutputFormat("json_schema", SOURCE, "guided_json")),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": "\n", "guided_decoding_backend": "outlines"},
        OutputFormat("json_schema", SOURCE, "guided_json", "\n"),
    ),
    (
        {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": ""},
        OutputFormat("json_object", whitespace=""),
    ),
    ({"guided_regex": "[0]", "guided_whitespace_pattern": " "}, OutputFormat("regex", "[0]", "guided_regex")),
    ({"guided_choice": ["a"]}, OutputFormat("choice", '["a"]', "guided_choice")),
    ({"guided_grammar": "start: /a/"}, OutputFormat("grammar", "start: /a/", "guided_grammar")),
    (
        {"guided_grammar": "start: /a/", "response_format": {"type": "text"}},
        OutputFormat("grammar", "start: /a/", "guided_grammar"),
    ),
    ({"structural_tag": TAG}, OutputFormat("structural_tag", as_text(TAG), "structural_tag")),
]


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("changes", "expected"), GOOD, ids=lambda value: str(value)[:60])
def test_forms(endpoint: str, changes: dict[str, Any], expected: OutputFormat | None) -> None:
    assert call_of(endpoint, **changes).output_format == expected


def test_equal_schemas_have_equal_sources_however_they_are_written() -> None:
    ways: list[Any] = [SCHEMA, as_text(SCHEMA), json.dumps(SCHEMA), json.dumps(SCHEMA, indent=4)]
    assert {call_of(CHAT, guided_json=way).output_format for way in ways} == {
        OutputFormat("json_schema", SOURCE, "guided_json")
    }


def test_a_schema_may_be_as_long_as_its_limit() -> None:
    longest = {"const": "x" * (2**18 - len('{"const":""}'))}
    found = call_of(CHAT, guided_json=longest).output_format
    assert found is not None
    assert len(found.source) == 2**18
