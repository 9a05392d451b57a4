"""What form an answer must have, and the parameters that say so: OpenAI's `response_format`, vLLM's
`structured_outputs` and its older `guided_*`.

Only the structure of a value is checked here. Whether a schema or a grammar makes sense is found
out by the worker.
"""

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

import msgspec

from jobs.protocol import fields
from jobs.protocol.lines import decode_json
from jobs.protocol.value_types import Schema, Strings, Text, ValueType, or_null

MOST_SOURCE = 2**19
"""Characters of a schema, a regular expression or a grammar."""

FormatKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]

_JSON_KINDS = ("json_object", "json_schema")
_OBJECT_TEXT: Schema = {"type": "string", "pattern": r"^[ \t\n\r]*\{[\s\S]*\}[ \t\n\r]*$"}
_FLAG: Schema = {"type": ["boolean", "null"]}
_NOT_NULL: Schema = {"not": {"type": "null"}}
_CHOICES = Strings(10_000, 10_000, least=1)


class OutputFormat(msgspec.Struct, frozen=True):
    """The form of an answer, whichever parameter asked for it.

    `source` is JSON text for `json_schema`, `choice` (a list of strings) and `structural_tag`, a
    regular expression for `regex`, a Lark or EBNF grammar for `grammar`, and empty for
    `json_object`. JSON is written in one way, in the order of the caller's properties, so that
    equal sources mean the same. `param` is what the caller gave it as. `whitespace` is a regular
    expression for what may stand between the tokens of JSON; None for the default.
    """

    kind: FormatKind
    source: str = ""
    param: str = "response_format"
    whitespace: str | None = None


@dataclass(frozen=True)
class JsonSchema:
    """A JSON Schema, as an object or as its text."""

    schema: ClassVar[Schema] = {"anyOf": [{"type": "object"}, _OBJECT_TEXT]}
    summary: ClassVar[str] = "a JSON Schema, or its text"

    def read(self, value: Any, param: str) -> OutputFormat:
        return _format("json_schema", canonical_json(_object(value, param), param), param)


@dataclass(frozen=True)
class FormatText:
    """A regular expression or a grammar."""

    kind: Literal["regex", "grammar"]
    summary: str

    def read(self, value: Any, param: str) -> OutputFormat:
        return _format(self.kind, fields.text(value, param, MOST_SOURCE, least=1), param)

    @property
    def schema(self) -> Schema:
        return {"type": "string", "minLength": 1, "maxLength": MOST_SOURCE}


@dataclass(frozen=True)
class Choices:
    """The texts of which an answer is one."""

    schema: ClassVar[Schema] = _CHOICES.schema
    summary: ClassVar[str] = _CHOICES.summary

    def read(self, value: Any, param: str) -> OutputFormat:
        return _format("choice", canonical_json(_CHOICES.read(value, param), param), param)


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


@dataclass(frozen=True)
class StructuralTag:
    """Text with pieces of a certain form, as an object or as its text: what xgrammar calls a
    structural tag, with `format`, or in its older form with `structures` and `triggers`.
    """

    schema: ClassVar[Schema] = {
        "anyOf": [
            {
                "type": "object",
                "properties": {"type": {"enum": ["structural_tag", None]}},
                "if": {"required": ["structures"], "properties": {"structures": _NOT_NULL}},
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
        return _format("structural_tag", canonical_json(tag, param), param)


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


@dataclass(frozen=True)
class ResponseFormat:
    """OpenAI's form of an answer, with vLLM's `structural_tag`; plain text is no form."""

    summary: ClassVar[str] = "`type` text, json_object, json_schema or structural_tag"

    def read(self, value: Any, param: str) -> OutputFormat | None:
        given = fields.mapping(value, param)
        known = ("text", "json_object", "json_schema", "structural_tag")
        match fields.choice(fields.required(given, "type", f"{param}."), f"{param}.type", known):
            case "json_object":
                return _format("json_object", "", param)
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


@dataclass(frozen=True)
class StructuredOutputs:
    """The form of an answer as vLLM has it: one of several kinds."""

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
        given = [_given(name, _NOT_NULL) for name in _STRUCTURED]
        one = {"oneOf": [*given, _given("json_object", {"const": True})]}
        return {"anyOf": [{"type": "object", "properties": members, **one}]}

    @staticmethod
    def _whitespace(given: dict[str, Any], prefix: str) -> str | None:
        """Return the regular expression of what may be between tokens, where one is given."""
        if fields.optional(given, "disable_additional_properties", fields.boolean, False, prefix):
            why = "must be false: write 'additionalProperties': false in the schema."
            fields.unsupported(f"{prefix}disable_additional_properties", why)
        pattern = fields.optional(given, "whitespace_pattern", WHITESPACE.read, None, prefix)
        return "" if fields.optional(given, "disable_any_whitespace", fields.boolean, False, prefix) else pattern


WHITESPACE = Text(1000)
"""A regular expression of what may be between the tokens of JSON."""

FORMATS: dict[str, ValueType] = {
    "response_format": ResponseFormat(),
    "structured_outputs": StructuredOutputs(),
    "structural_tag": StructuralTag(),
    "guided_json": JsonSchema(),
    "guided_regex": _STRUCTURED["regex"],
    "guided_choice": Choices(),
    "guided_grammar": _STRUCTURED["grammar"],
}
"""The parameters of which one at most gives a form."""


def settle_format(values: dict[str, Any]) -> None:
    """Put the one form that a call's parameters ask for in place of them, as `output_format`.

    Raise `ApiError` 400 for two.
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


def canonical_json(value: Any, param: str) -> str:
    """Return JSON text, always the same for the same value.

    Raise `ApiError` 400 for a value that JSON cannot hold.
    """
    try:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        fields.fail(f"Invalid '{param}': it cannot be written as JSON.", param, "invalid_value")
    return text


def _format(kind: FormatKind, source: str, param: str) -> OutputFormat:
    return OutputFormat(kind, fields.text(source, param, MOST_SOURCE), param.partition(".")[0])


def _object(value: Any, param: str) -> dict[str, Any]:
    """Return an object that may be given as its text."""
    if isinstance(value, str):
        try:
            value = decode_json(fields.text(value, param).encode())
        except ValueError as error:
            fields.fail(f"Invalid '{param}': the text is not JSON: {error}.", param, "invalid_value")
    return fields.mapping(value, param)


def _member(given: dict[str, Any], name: str, param: str) -> OutputFormat:
    found: OutputFormat = _STRUCTURED[name].read(given[name], f"{param}.{name}")
    return found


def _named_schema(value: Any, param: str) -> OutputFormat:
    given, prefix = fields.mapping(value, param), f"{param}."
    fields.name(fields.required(given, "name", prefix), f"{prefix}name")
    fields.optional(given, "description", fields.text, None, prefix)
    fields.optional(given, "strict", fields.boolean, None, prefix)
    schema = fields.mapping(fields.required(given, "schema", prefix), f"{prefix}schema")
    return _format("json_schema", canonical_json(schema, f"{prefix}schema"), param)


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


def _not_one(named: list[str], param: str) -> NoReturn:
    known = ", ".join(f"'{name}'" for name in _ONE_OF)
    got = " and ".join(f"'{name}'" for name in named) or "none of them"
    fields.fail(f"Invalid '{param}': expected exactly one of {known}, but got {got}.", param, "invalid_value")


def _is_json(found: OutputFormat) -> bool:
    return found.kind in _JSON_KINDS


def _of_type(kind: Schema, **members: Schema) -> Schema:
    return {"type": "object", "required": ["type", *members], "properties": {"type": kind, **members}}


def _given(name: str, value: Schema) -> Schema:
    return {"required": [name], "properties": {name: value}}
