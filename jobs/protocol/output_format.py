"""The required format of an answer, and the values that set it (`format_parameters.py`).

Only the structure of a value is checked here. The worker checks whether a schema or a grammar is
valid.
"""

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec

from jobs.protocol import fields
from jobs.protocol.lines import decode_json
from jobs.protocol.value_types import Schema, Strings

NOT_NULL: Schema = {"not": {"type": "null"}}
MOST_SOURCE = 2**18
"""Most characters of a schema, a regular expression or a grammar."""

FormatKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]

_OBJECT_TEXT: Schema = {"type": "string", "pattern": r"^[ \t\n\r]*\{[\s\S]*\}[ \t\n\r]*$"}
_CHOICES = Strings(10_000, 10_000, least=1)


class OutputFormat(msgspec.Struct, frozen=True):
    """The format of an answer, independent of the parameter that set it.

    `source` is JSON text for `json_schema`, `choice` (a list of strings) and `structural_tag`, a
    regular expression for `regex`, a Lark or EBNF grammar for `grammar`, and empty for
    `json_object`. JSON is written in canonical form, in the order of the caller's properties, so
    that equal sources mean the same. `param` is the caller's parameter. `whitespace` is a regular
    expression for the text between the tokens of JSON; None for the default.
    """

    kind: FormatKind
    source: str = ""
    param: str = "response_format"
    whitespace: str | None = None


class JsonSchema:
    """A JSON Schema, as an object or as its text."""

    schema: ClassVar[Schema] = {"anyOf": [{"type": "object"}, _OBJECT_TEXT]}
    summary: ClassVar[str] = "a JSON Schema, or its text"

    def read(self, value: Any, param: str) -> OutputFormat:
        return format_of("json_schema", canonical_json(_object(value, param), param), param)


@dataclass(frozen=True)
class FormatText:
    """A regular expression or a grammar."""

    kind: Literal["regex", "grammar"]
    summary: str

    def read(self, value: Any, param: str) -> OutputFormat:
        return format_of(self.kind, fields.text(value, param, MOST_SOURCE, least=1), param)

    @property
    def schema(self) -> Schema:
        return {"type": "string", "minLength": 1, "maxLength": MOST_SOURCE}


class Choices:
    """The texts that an answer may be."""

    schema: ClassVar[Schema] = _CHOICES.schema
    summary: ClassVar[str] = _CHOICES.summary

    def read(self, value: Any, param: str) -> OutputFormat:
        return format_of("choice", canonical_json(_CHOICES.read(value, param), param), param)


_TAG: Schema = {
    "type": "object",
    "required": ["begin", "schema", "end"],
    "properties": {"begin": {"type": "string"}, "schema": {"type": "object"}, "end": {"type": "string"}},
}
_TAGS: Schema = {
    "required": ["structures", "triggers"],
    "properties": {
        "structures": {"type": "array", "minItems": 1, "items": _TAG},
        "triggers": {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
    },
}


class StructuralTag:
    """xgrammar's structural tag: text with pieces of a certain format, as an object or as its text.

    It has `format`, or in its older form `structures` and `triggers`.
    """

    schema: ClassVar[Schema] = {
        "anyOf": [
            {
                "type": "object",
                "properties": {"type": {"enum": ["structural_tag", None]}},
                "if": {"required": ["structures"], "properties": {"structures": NOT_NULL}},
                "then": _TAGS,
                "else": {"required": ["format"], "properties": {"format": {"type": "object"}}},
            },
            _OBJECT_TEXT,
        ]
    }
    summary: ClassVar[str] = "a structural tag, or its text"

    def read(self, value: Any, param: str) -> OutputFormat:
        tag = _object(value, param)
        fields.optional(tag, "type", _tag_type, None, f"{param}.")
        if tag.get("structures") is None:
            fields.mapping(fields.required(tag, "format", f"{param}."), f"{param}.format")
        else:
            _check_structures(tag, param)
        return format_of("structural_tag", canonical_json(tag, param), param)


def canonical_json(value: Any, param: str) -> str:
    """Return JSON text, always the same for the same value.

    Raise `ApiError` 400 for a value that JSON cannot represent.
    """
    try:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        fields.fail(f"Invalid '{param}': it cannot be written as JSON.", param, "invalid_value")
    return text


def format_of(kind: FormatKind, source: str, param: str) -> OutputFormat:
    """Return the format that a parameter, or a member of it, sets; `param` is its path."""
    return OutputFormat(kind, fields.text(source, param, MOST_SOURCE), param.partition(".")[0])


def _object(value: Any, param: str) -> dict[str, Any]:
    """Return an object that may be passed as its text."""
    if isinstance(value, str):
        try:
            value = decode_json(fields.text(value, param).encode())
        except ValueError as error:
            fields.fail(f"Invalid '{param}': the text is not JSON: {error}.", param, "invalid_value")
    return fields.mapping(value, param)


def _check_structures(tag: dict[str, Any], param: str) -> None:
    for i, structure in enumerate(fields.array(tag["structures"], f"{param}.structures", least=1)):
        path = f"{param}.structures[{i}]"
        given = fields.mapping(structure, path)
        for name in ("begin", "end"):
            fields.text(fields.required(given, name, f"{path}."), f"{path}.{name}")
        fields.mapping(fields.required(given, "schema", f"{path}."), f"{path}.schema")
    triggers = fields.array(fields.required(tag, "triggers", f"{param}."), f"{param}.triggers", least=1)
    for i, trigger in enumerate(triggers):
        fields.text(trigger, f"{param}.triggers[{i}]", least=1)


def _tag_type(value: Any, param: str) -> str:
    return fields.choice(value, param, ("structural_tag",))
