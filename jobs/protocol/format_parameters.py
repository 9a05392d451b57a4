"""The parameters that set the format of an answer; a call may use one of them.

They are OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`.
"""

from typing import Any, ClassVar, NoReturn

import msgspec

from jobs.protocol import fields
from jobs.protocol.output_format import (
    NOT_NULL,
    Choices,
    FormatText,
    JsonSchema,
    OutputFormat,
    StructuralTag,
    canonical_json,
    format_of,
)
from jobs.protocol.value_types import Schema, Text, ValueType, or_null

_FLAG: Schema = {"type": ["boolean", "null"]}
_NAMED_SCHEMA: Schema = {
    "type": "object",
    "required": ["name", "schema"],
    "properties": {
        "name": fields.NAME,
        "description": {"type": ["string", "null"]},
        "schema": {"type": "object"},
        "strict": _FLAG,
    },
}


class ResponseFormat:
    """OpenAI's format of an answer, with vLLM's `structural_tag`; plain text is no format."""

    summary: ClassVar[str] = "`type` text, json_object, json_schema or structural_tag"

    def read(self, value: Any, param: str) -> OutputFormat | None:
        given = fields.mapping(value, param)
        known = ("text", "json_object", "json_schema", "structural_tag")
        match fields.choice(fields.required(given, "type", f"{param}."), f"{param}.type", known):
            case "json_object":
                return format_of("json_object", "", param)
            case "json_schema":
                return _named_schema(fields.required(given, "json_schema", f"{param}."), f"{param}.json_schema")
            case "structural_tag":
                return StructuralTag().read(given, param)
        return None

    @property
    def schema(self) -> Schema:
        tag = StructuralTag.schema["anyOf"][0]
        return {
            "anyOf": [
                _of_type({"enum": ["text", "json_object"]}),
                _of_type({"const": "json_schema"}, json_schema=_NAMED_SCHEMA),
                {"allOf": [_of_type({"const": "structural_tag"}), tag]},
            ]
        }


_STRUCTURED: dict[str, ValueType] = {
    "json": JsonSchema(),
    "regex": FormatText("regex", "a regular expression"),
    "choice": Choices(),
    "grammar": FormatText("grammar", "a Lark or EBNF grammar"),
    "structural_tag": StructuralTag(),
}
_ONE_OF = (*_STRUCTURED, "json_object")


class StructuredOutputs:
    """vLLM's format of an answer: one of several kinds."""

    summary: ClassVar[str] = "one of " + ", ".join(f"`{name}`" for name in _ONE_OF)

    def read(self, value: Any, param: str) -> OutputFormat:
        given = fields.mapping(value, param)
        named = [name for name in _STRUCTURED if given.get(name) is not None]
        if fields.optional(given, "json_object", fields.boolean, False, f"{param}."):
            named.append("json_object")
        whitespace = self._whitespace(given, f"{param}.")
        if len(named) != 1:
            _not_one(named, param)
        name = named[0]
        found = OutputFormat("json_object") if name == "json_object" else _member(given, name, param)
        return msgspec.structs.replace(found, param=param, whitespace=whitespace if _is_json(found) else None)

    @property
    def schema(self) -> Schema:
        members: Schema = {name: or_null(kind.schema) for name, kind in _STRUCTURED.items()}
        members |= {
            "json_object": _FLAG,
            "whitespace_pattern": or_null(WHITESPACE.schema),
            "disable_any_whitespace": _FLAG,
            "disable_additional_properties": {"enum": [False, None]},
        }
        given = [_given(name, NOT_NULL) for name in _STRUCTURED]
        one = {"oneOf": [*given, _given("json_object", {"const": True})]}
        return {"anyOf": [{"type": "object", "properties": members, **one}]}

    @staticmethod
    def _whitespace(given: dict[str, Any], prefix: str) -> str | None:
        """Return the regular expression for whitespace between tokens, or None."""
        if fields.optional(given, "disable_additional_properties", fields.boolean, False, prefix):
            why = "must be false: write 'additionalProperties': false in the schema."
            fields.unsupported(f"{prefix}disable_additional_properties", why)
        pattern = fields.optional(given, "whitespace_pattern", WHITESPACE.read, None, prefix)
        return "" if fields.optional(given, "disable_any_whitespace", fields.boolean, False, prefix) else pattern


WHITESPACE = Text(1000)
"""A regular expression for whitespace between the tokens of JSON."""

FORMATS: dict[str, ValueType] = {
    "response_format": ResponseFormat(),
    "structured_outputs": StructuredOutputs(),
    "structural_tag": StructuralTag(),
    "guided_json": JsonSchema(),
    "guided_regex": _STRUCTURED["regex"],
    "guided_choice": Choices(),
    "guided_grammar": _STRUCTURED["grammar"],
}
"""The parameters that set a format; a call may use one of them."""


def settle_format(values: dict[str, Any]) -> None:
    """Replace the parameters that set a format with `output_format`.

    Raise `ApiError` 400 if two of them are set.
    """
    whitespace = values.pop("guided_whitespace_pattern", None)
    found = [one for name in FORMATS if (one := values.pop(name, None)) is not None]
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        message = f"Invalid '{second}': '{first}' gives the form of the answer too. Leave one of them out."
        fields.fail(message, second, "invalid_value")
    for one in found:
        if one.whitespace is None and _is_json(one):
            one = msgspec.structs.replace(one, whitespace=whitespace)
        values["output_format"] = one


def _member(given: dict[str, Any], name: str, param: str) -> OutputFormat:
    found: OutputFormat = _STRUCTURED[name].read(given[name], f"{param}.{name}")
    return found


def _named_schema(value: Any, param: str) -> OutputFormat:
    given, prefix = fields.mapping(value, param), f"{param}."
    fields.name(fields.required(given, "name", prefix), f"{prefix}name")
    fields.optional(given, "description", fields.text, None, prefix)
    fields.optional(given, "strict", fields.boolean, None, prefix)
    schema = fields.mapping(fields.required(given, "schema", prefix), f"{prefix}schema")
    return format_of("json_schema", canonical_json(schema, f"{prefix}schema"), param)


def _not_one(named: list[str], param: str) -> NoReturn:
    known = ", ".join(f"'{name}'" for name in _ONE_OF)
    got = " and ".join(f"'{name}'" for name in named) or "none of them"
    fields.fail(f"Invalid '{param}': expected exactly one of {known}, but got {got}.", param, "invalid_value")


def _is_json(found: OutputFormat) -> bool:
    return found.kind in ("json_object", "json_schema")


def _of_type(kind: Schema, **members: Schema) -> Schema:
    return {"type": "object", "required": ["type", *members], "properties": {"type": kind, **members}}


def _given(name: str, value: Schema) -> Schema:
    return {"required": [name], "properties": {name: value}}
