"""Which JSON texts meet a schema, as the grammar has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.grammars import BYTES, accepts, of_schema
from workers.grammars.compiler import compile_format
from workers.text.errors import FormatError

PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}, "required": ["a", "b"]}
LIST = {"$defs": {"n": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/n"}}]}}}
ENDLESS = {
    "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}},
}
DISCRIMINATED = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("cat", "dog")
    ]
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (True, [1, {"a": None}], []),
        (
            {"type": "string", "format": "date"},
            ["2024-02-29", "2000-02-29", "2021-12-31"],
            ["2023-02-29", "1900-02-29"],
        ),
        ({"type": "string", "format": "date"}, ["0001-01-01"], ["0000-01-01", "2021-04-31", "2021-13-01"]),
        ({"type": "string", "format": "time"}, ["10:00:00Z", "23:59:59.5+02:00"], ["24:00:00Z", "10:00:60Z"]),
        ({"type": "string", "format": "date-time"}, ["2024-02-29T10:00:00Z"], ["2024-02-29", "2023-02-29T10:00:00Z"]),
        ({"type": "string", "format": "date", "pattern": "^2"}, ["2024-01-01"], ["1999-01-01"]),
        ({"type": ["string", "null"], "format": "date", "pattern": "^2"}, [None, "2024-01-01"], ["1999-01-01"]),
        ({"type": "string", "format": "uri-reference"}, ["https://a.example/b"], ["not a uri"]),
        ({"type": "string", "format": "password"}, ["anything"], [1]),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, [[1, 1]], []),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1}, [[1]], [[1, 1]]),
        ({"type": "object", "propertyNames": {"enum": ["a"]}}, [{"a": 1}, {}], [{"b": 1}]),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, [{"xa": 1}], [{"b": 1}]),
        ({"type": "object", "propertyNames": {"type": "string"}}, [{"xa": 1}], []),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
        ({"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": False}, [[None]], [[None, 1]]),
        ({"type": "array", "items": [{"type": "null"}], "additionalItems": False}, [[None]], [[None, 1]]),
        ({"$ref": "#/parts/a", "parts": {"a": {"type": "string", "format": "date"}}}, ["2024-01-01"], ["x"]),
        ({"type": "number", "minimum": -4.9, "maximum": -3.9000000000000004}, [-4.9, -3.91], [-4.91, -3.9]),
        ({"type": "number", "minimum": 3.9000000000000004, "maximum": 4.9}, [4.9, 3.91], [4.91, 3.9]),
        ({"type": "number", "exclusiveMinimum": 0.1 + 0.2, "exclusiveMaximum": 8.9}, [0.31, 7.5], [0.3]),
        (DISCRIMINATED, [{"kind": "cat"}], [{"kind": "cow"}]),
        ({**LIST, "$ref": "#/$defs/n"}, [None, [], [None, [[]]]], [1]),
        ({"type": "array", "items": {"$ref": "#"}}, [[], [[], [[]]]], [[1]]),
    ],
    ids=str,
)
def test_values_meet_a_schema(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert [text for text in map(json.dumps, good) if not accepts(of_schema(schema), text)] == []
    assert [text for text in map(json.dumps, bad) if accepts(of_schema(schema), text)] == []


@pytest.mark.parametrize(
    ("whitespace", "good", "bad"),
    [
        (
            None,
            ['{"a":1,"b":[]}', '{"a": 1, "b": []}', '{\n  "a": 1,\n  "b": [\n  ]\n}', '{\n\t"a" : 1, "b": []}'],
            ['{"a":  1, "b": []}', '{\n\n"a": 1, "b": []}', ' {"a": 1, "b": []}', '{"a": 1, "b": []} '],
        ),
        ("", ['{"a":1,"b":[]}'], ['{"a": 1,"b":[]}']),
        ("~{2}", ['{~~"a":1,"b":[]}'], ['{ "a":1,"b":[]}', '{~~~~"a":1,"b":[]}']),
    ],
)
def test_whitespace_is_bounded(whitespace: str | None, good: list[str], bad: list[str]) -> None:
    wanted = of_schema(PAIR, whitespace)
    assert [text for text in good if not accepts(wanted, text)] == []
    assert [text for text in bad if accepts(wanted, text)] == []


def test_objects_that_name_their_properties_have_no_others() -> None:
    open_object = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert not accepts(of_schema(open_object), '{"a": 1, "b": 2}')
    assert accepts(of_schema({**open_object, "additionalProperties": True}), '{"a": 1, "b": 2}')
    assert accepts(of_schema({**open_object, "required": ["b"]}), '{"a": 1, "b": 2}')
    nested = {"type": "object", "properties": {"inner": open_object}}
    assert not accepts(of_schema(nested), '{"inner": {"a": 1, "b": 2}}')


@pytest.mark.parametrize(
    ("names", "pattern", "schema", "good", "bad"),
    [
        (["score"], "^score$", {"type": "integer"}, ['{"score":1}'], ['{"score":"1"}']),
        (["b", "a"], "^(a|b)$", {}, ['{"b":1}', '{"b":1,"a":"x"}'], ['{"b":1,"c":1}']),
        (["a"], "^[a-c]$", {"type": "null"}, ['{"a":null,"b":null}'], ['{"a":1}', '{"b":1}']),
        (["a"], "^[^\\s\\S]$", {}, ['{"a":1}'], ['{"b":1}']),
    ],
)
def test_a_comma_promises_a_property_that_a_name_is_left_for(
    names: list[str], pattern: str, schema: Any, good: list[str], bad: list[str]
) -> None:
    """Where the patterns match no further name."""
    form = of_schema(
        {"properties": {name: {} for name in names}, "required": names[:1], "patternProperties": {pattern: schema}}
        | {"type": "object", "additionalProperties": False},
        whitespace="",
    )
    assert [text for text in good if not accepts(form, text)] == []
    assert [text for text in bad if accepts(form, text)] == []
    matcher = BYTES.compile(compile_format(form, BYTES))
    whole = good[-1].removesuffix("}").encode()
    assert matcher.try_consume_tokens(list(whole)) == len(whole)
    left_over = matcher.try_consume_tokens(list(b","))
    assert left_over == (pattern == "^[a-c]$")


def test_objects_that_several_schemas_speak_of_stay_open() -> None:
    parts = [
        {"properties": {name: {"type": "object", "properties": {name: {}}}}, "required": [name]} for name in ("a", "b")
    ]
    assert accepts(of_schema({"type": "object", "allOf": parts}), '{"a": {"a": 1}, "b": {"b": 1}}')
    base = {"$defs": {"base": {"type": "object", **parts[0]}}, "$ref": "#/$defs/base"}
    assert accepts(of_schema({**base, **parts[1]}), '{"a": {"a": 1}, "b": {"b": 1}}')


@pytest.mark.parametrize(
    "schema",
    [
        {**ENDLESS, "$ref": "#/$defs/n"},
        {"$ref": "#"},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}]}}, "allOf": [{"$ref": "#/$defs/n"}]},
        {**ENDLESS, "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]},
        {
            "$defs": {"n": {"$anchor": "n", "type": "array", "prefixItems": [{"$ref": "#n"}], "minItems": 1}},
            "$ref": "#n",
        },
    ],
    ids=str,
)
def test_recursion_without_end_is_refused(schema: Any) -> None:
    with pytest.raises(FormatError, match="recursive without end"):
        compile_format(of_schema(schema), BYTES)


def test_a_way_in_from_which_there_is_no_end_is_closed() -> None:
    schema = {**ENDLESS, "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"type": "null"}}}
    assert accepts(of_schema(schema), '{"b": null}')
    matcher = BYTES.compile(compile_format(of_schema(schema), BYTES))
    assert matcher.try_consume_tokens(list(b'{"a')) == 2


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"properties": {"a": {"not": {}}}}, "The schema uses 'not' at $.properties.a, which is not supported"),
        ({"items": {"if": {}, "then": {}}}, "The schema uses 'if' at $.items, 'then' at $.items, which are not supp"),
        ({"uniqueItems": True}, "The schema uses 'uniqueItems' at $, which is not supported"),
        ({"anyOf": [{}, {"contains": {}}]}, "The schema uses 'contains' at $.anyOf.1, which is not supported"),
        (
            {"oneOf": [{"minimum": 1}, {"maximum": 2}]},
            "The schema's 'oneOf' at $ has options that may hold at the same",
        ),
    ],
    ids=str,
)
def test_unsupported_keywords_are_named(schema: Any, sentence: str) -> None:
    with pytest.raises(FormatError) as caught:
        compile_format(of_schema(schema), BYTES)
    assert str(caught.value).startswith(sentence)


def test_a_schema_cannot_be_made_lenient_from_inside() -> None:
    with pytest.raises(FormatError, match="'not'"):
        compile_format(of_schema({"not": {}, "x-guidance": {"lenient": True}}), BYTES)


def test_an_object_may_have_500_optional_properties() -> None:
    def of(count: int, required: int = 0) -> dict[str, Any]:
        names = [f"p{number}" for number in range(count)]
        return {
            "type": "object",
            "properties": {name: {"type": "null"} for name in names},
            "required": names[:required],
        }

    assert accepts(of_schema(of(500)), '{"p0":null,"p499":null}')
    assert accepts(of_schema(of(600, 100)), json.dumps(dict.fromkeys(f"p{number}" for number in range(100))))
    with pytest.raises(FormatError, match="has 6000 optional properties, 'p0' among them, and at most 500 are supp"):
        compile_format(of_schema({"items": of(6000)}), BYTES)
    halves = [{"type": "object", "properties": {f"{half}{at}": {} for at in range(300)}} for half in "ab"]
    with pytest.raises(FormatError, match=r"too large, or too much of it is nested: .*max is 2000"):
        compile_format(of_schema({"allOf": halves}), BYTES)


def test_a_schema_may_be_nested_up_to_a_depth() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(90):
        schema = {"type": "array", "items": schema}
    assert accepts(of_schema(schema), "[" * 90 + "null" + "]" * 90)
    for _ in range(20):
        schema = {"type": "array", "items": schema}
    with pytest.raises(FormatError, match="nested deeper than 100 levels"):
        compile_format(of_schema(schema), BYTES)
