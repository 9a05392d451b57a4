"""Which texts an answer may be, by the form that is asked for, and what is refused."""

from __future__ import annotations

import json

import pytest

from jobs.protocol.output_format import FormatKind, OutputFormat
from tests.support.grammars import BYTES, accepts
from workers.grammars.compiler import compile_format
from workers.text.errors import FormatError

CHOICES = ["yes", "yes, but", "", 'say "no"', "a\\b", "line\nfeed", "tab\t", "é🙂", "/x/", "\x01\x7f", " ", "<a>"]
GBNF = """
root ::= item ("," item)*
item ::= [0-9]+ | "x-" name
name ::= [a-z]{2,3}
"""


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("json_object", "", ["{}", '{"a": [1, {}]}', '{\n  "a": "é"\n}'], ["[]", "{", '{"a":1} ', '{"a":1,}']),
        ("regex", r"[a-z]/\d{2}\"", ['a/12"'], ["a/1", 'xa/12"', "a/123"]),
        ("regex", "^(ab|c)$", ["ab", "c"], ["^ab", "abc"]),
        ("choice", json.dumps(CHOICES), CHOICES, ["no", "yes,", "line"]),
        ("choice", '[""]', [""], ["x"]),
        ("grammar", 'start: a+\na: "x" | "(" a ")"', ["x", "x((x))"], ["", "(x"]),
        ("grammar", "?start: /[a-c]+/", ["abc"], ["d"]),
        ("grammar", 'start: "%json {" /[%]/ j\nj: %json {"type": "array"}', ["%json {%[\n  1]"], ["%json {%[  1]"]),
        ("grammar", 'start: %json {"x-guidance": {"whitespace_flexible": false}}', ["[1]"], ["[ 1]"]),
        ("grammar", GBNF, ["1", "12,x-ab", "x-abc,7"], ["x-a", "1,", "x-abcd"]),
    ],
)
def test_an_answer_has_the_form(kind: FormatKind, source: str, good: list[str], bad: list[str]) -> None:
    wanted = OutputFormat(kind, source)
    assert [text for text in good if not accepts(wanted, text)] == []
    assert [text for text in bad if accepts(wanted, text)] == []


@pytest.mark.parametrize(
    ("kind", "source", "before"),
    [
        ("json_object", "", '{"a": {'),
        ("json_schema", '{"properties": {"a": {"type": "object"}}}', '{"a": {'),
        ("grammar", 'start: "x" /y/ j\nj: %json {"type": "object"}', "xy{"),
        (
            "structural_tag",
            '{"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f>"]}',
            "<f>{",
        ),
        (
            "structural_tag",
            '{"format": {"type": "grammar", "grammar": "start: %json {\\"type\\": \\"object\\"}"}}',
            "{",
        ),
    ],
)
def test_whitespace_between_the_tokens_of_json_is_bounded(kind: FormatKind, source: str, before: str) -> None:
    matcher = BYTES.compile(compile_format(OutputFormat(kind, source), BYTES))
    assert matcher.try_consume_tokens(list(before.encode())) == len(before)
    for blanks in (" " * 20, "\n" * 20, "\t" * 20, "\n" + " " * 20, " \n" * 20):
        assert matcher.deep_copy().try_consume_tokens(list(blanks.encode())) <= 17


def test_as_many_choices_as_fit_are_taken() -> None:
    wanted = OutputFormat("choice", json.dumps([f"choice {number}" for number in range(15000)]))
    assert accepts(wanted, "choice 14999")
    assert not accepts(wanted, "choice 15000")


@pytest.mark.parametrize(
    ("kind", "source", "sentence"),
    [
        ("json_schema", "{", "The schema is not valid JSON: Expecting property name"),
        ("json_schema", '{"minimum": NaN}', "The schema is not valid JSON: NaN is not a JSON number."),
        ("json_schema", "[" * 5000, "The schema is nested deeper than 100 levels."),
        ("json_schema", "3", "The schema must be a JSON object or a boolean."),
        ("json_schema", "false", "The schema is false, which no JSON value can meet."),
        ("json_schema", '{"type": "strin"}', "The schema cannot be used: Invalid type: strin."),
        ("json_schema", '{"properties": {"a": 3}}', "The schema cannot be used: schema must be an object or boolean."),
        ("json_schema", '{"$ref": "#/$defs/x"}', "The schema cannot be used: Pointer '/$defs/x' does not exist."),
        ("json_schema", '{"$ref": "https://a.example/b"}', "The schema cannot be used: Resource 'https://a.example/b'"),
        ("json_schema", '{"type": "integer", "minimum": 2, "maximum": 1}', "No JSON text can meet the schema: minimum"),
        ("json_schema", '{"enum": []}', "No JSON text can meet the schema: "),
        ("json_schema", '{"pattern": "(?=a)b"}', "The regular expression (?=a)b cannot be used: look-around"),
        ("json_schema", '{"pattern": "[a"}', "The regular expression [a cannot be used: unclosed character class."),
        ("regex", "[a", "The regular expression [a cannot be used: unclosed character class."),
        ("regex", r"(a)\1", r"The regular expression (a)\1 cannot be used: backreferences are not supported."),
        ("regex", r"\bfoo", "The regular expression cannot be used: "),
        ("choice", "[]", "The choices must be a list of one string or more."),
        ("choice", '["a", 1]', "The choices must be a list of one string or more."),
        ("choice", '["\\ud800"]', "A text holds half a character"),
        ("grammar", "", "The grammar is empty."),
        ("grammar", "start: foo", 'The grammar cannot be used: unknown name: "foo".'),
        ("grammar", "no grammar @@", "The grammar cannot be used: "),
        ("grammar", "root ::= foo", "The grammar cannot be read as EBNF: Rule 'foo' not found."),
        ("grammar", 'root ::= "a', "The grammar cannot be read as EBNF: "),
        ("grammar", "root ::= " + "(" * 5000, "The grammar is nested too deeply."),
        ("structural_tag", "[]", "The structural tag must be a JSON object."),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(kind: FormatKind, source: str, sentence: str) -> None:
    with pytest.raises(FormatError) as caught:
        compile_format(OutputFormat(kind, source), BYTES)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_form_that_the_vocabulary_cannot_write_is_refused() -> None:
    from workers.engine.guides.vocabulary import Vocabulary

    letters = Vocabulary([b"a", b"b"], 2)
    assert compile_format(OutputFormat("regex", "[ab]+"), letters)
    with pytest.raises(FormatError, match="No token of the model's vocabulary can begin"):
        compile_format(OutputFormat("json_object"), letters)
