"""Types of values in a request's body.

Each type reads a value, with errors in OpenAI's words, and has an equivalent JSON Schema.
"""

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec

from jobs.protocol import fields

Schema = dict[str, Any]

_MOST_TOKEN_DIGITS = 9  # of a token id as a key


class ValueType(Protocol):
    """The type of a parameter, apart from null."""

    def read(self, value: Any, param: str) -> Any:
        """Return the value in the form that the call stores. Raise `ApiError` 400 for a wrong
        one.
        """

    @property
    def schema(self) -> Schema:
        """Return the JSON Schema of values that `read` accepts."""

    @property
    def summary(self) -> str:
        """Return a short description for a table."""


class Boolean:
    """True or false."""

    schema: ClassVar[Schema] = {"type": "boolean"}
    summary: ClassVar[str] = "boolean"

    def read(self, value: Any, param: str) -> bool:
        return fields.boolean(value, param)


@dataclass(frozen=True)
class Integer:
    """An integer in a range."""

    low: int
    high: int = fields.INT32

    def read(self, value: Any, param: str) -> int:
        return fields.integer(value, param, self.low, self.high)

    @property
    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    @property
    def summary(self) -> str:
        if self.low == -self.high - 1:
            return f"{self.high.bit_length() + 1} bits"
        return f"{self.low} and up" if self.high == fields.INT32 else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class TopK(Integer):
    """The number of most likely tokens to keep: 0 or -1 for all, stored as 0."""

    low: int = -1

    def read(self, value: Any, param: str) -> int:
        return max(0, super().read(value, param))


@dataclass(frozen=True)
class Truncation(Integer):
    """The number of a prompt's last tokens to keep; -1: as many as the model accepts."""

    low: int = -1

    def read(self, value: Any, param: str) -> int:
        kept = super().read(value, param)
        if kept == 0:
            why = "it must be at least 1, or -1 for as many tokens as the model can take."
            fields.fail(f"Invalid '{param}': {why}", param, "invalid_value")
        return kept

    @property
    def schema(self) -> Schema:
        return {**super().schema, "not": {"const": 0}}

    @property
    def summary(self) -> str:
        return "-1, or 1 and up"


class Budget:
    """A number of tokens; -1 for no limit, stored as None."""

    schema: ClassVar[Schema] = Integer(-1).schema
    summary: ClassVar[str] = Integer(-1).summary

    def read(self, value: Any, param: str) -> int | None:
        limit = fields.integer(value, param, -1, fields.INT32)
        return None if limit < 0 else limit


@dataclass(frozen=True)
class Number:
    """A finite number in a range."""

    low: float
    high: float

    def read(self, value: Any, param: str) -> float:
        return fields.number(value, param, self.low, self.high)

    @property
    def schema(self) -> Schema:
        return {"type": "number", "minimum": self.low, "maximum": self.high}

    @property
    def summary(self) -> str:
        return f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Text:
    """A string."""

    longest: int  # characters
    summary: ClassVar[str] = "a string"

    def read(self, value: Any, param: str) -> str:
        return fields.text(value, param, self.longest)

    @property
    def schema(self) -> Schema:
        return {"type": "string", "maxLength": self.longest}


@dataclass(frozen=True)
class OneOf:
    """One of a few strings."""

    known: tuple[str, ...]

    def read(self, value: Any, param: str) -> str:
        return fields.choice(value, param, self.known)

    @property
    def schema(self) -> Schema:
        return {"enum": list(self.known)}

    @property
    def summary(self) -> str:
        return ", ".join(self.known)


@dataclass(frozen=True)
class Strings:
    """Several strings of at least one character; with `or_one` also a single string."""

    most: int
    longest: int  # characters
    or_one: bool = False
    least: int = 0

    def read(self, value: Any, param: str) -> list[str]:
        if self.or_one and isinstance(value, str):
            return [fields.text(value, param, self.longest, least=1)]
        if self.or_one and not isinstance(value, list):
            fields.wrong_type(value, "one of a string or array of strings", param)
        items = fields.array(value, param, self.most, self.least)
        return [fields.text(item, f"{param}[{i}]", self.longest, least=1) for i, item in enumerate(items)]

    @property
    def schema(self) -> Schema:
        one = {"type": "string", "minLength": 1, "maxLength": self.longest}
        several = {"type": "array", "items": one, "minItems": self.least, "maxItems": self.most}
        return {"anyOf": [one, several]} if self.or_one else several

    @property
    def summary(self) -> str:
        count = f"{self.least} to" if self.least else "up to"
        return f"{'a string, or ' if self.or_one else ''}{count} {self.most:,} strings"


@dataclass(frozen=True)
class TokenIds:
    """Token ids; the model's vocabulary bounds them further."""

    most: int
    least: int = 0

    def read(self, value: Any, param: str) -> tuple[int, ...]:
        items = fields.array(value, param, self.most, self.least)
        return tuple(fields.integers(items, param, 0, fields.INT32))

    @property
    def schema(self) -> Schema:
        return {"type": "array", "items": Integer(0).schema, "minItems": self.least, "maxItems": self.most}

    @property
    def summary(self) -> str:
        return f"{self.least or 'up'} to {self.most:,} token ids"


@dataclass(frozen=True)
class BiasByToken:
    """Token ids, which JSON can only write as strings, with a number to add to their logits."""

    most: int
    bias: Number

    def read(self, value: Any, param: str) -> dict[int, float]:
        entries = fields.mapping(value, param, self.most)
        return {
            _token_id(key, param): self.bias.read(bias, f"{param}.{fields.shown(key)}") for key, bias in entries.items()
        }

    @property
    def schema(self) -> Schema:
        return {
            "type": "object",
            "propertyNames": {"pattern": f"^(0|[1-9][0-9]{{0,{_MOST_TOKEN_DIGITS - 1}}})$"},
            "additionalProperties": self.bias.schema,
            "maxProperties": self.most,
        }

    @property
    def summary(self) -> str:
        return f"up to {self.most:,} token ids, each with {self.bias.summary}"


class StreamDetails(msgspec.Struct, frozen=True):
    """Additional members in the chunks of a stream."""

    include_usage: bool = False  # a last chunk with the usage
    continuous_usage_stats: bool = False  # each chunk has the usage so far


class StreamOptions:
    """The type of `stream_options`."""

    schema: ClassVar[Schema] = {
        "type": "object",
        "properties": {name: {"type": ["boolean", "null"]} for name in StreamDetails.__struct_fields__},
    }
    summary: ClassVar[str] = ", ".join(f"`{name}`" for name in StreamDetails.__struct_fields__)

    def read(self, value: Any, param: str) -> StreamDetails:
        options = fields.mapping(value, param)
        names = StreamDetails.__struct_fields__
        return StreamDetails(*(fields.optional(options, name, fields.boolean, False, f"{param}.") for name in names))


@dataclass(frozen=True)
class Unsupported:
    """A parameter that is not supported: only values without effect are accepted."""

    neutral: tuple[Any, ...] = ("", [], {}, False)
    why: str = "must be left out: this cannot be done yet."
    elsewhere: ValueType | None = None  # its type at the other endpoint, whose errors come first

    def read(self, value: Any, param: str) -> Any:
        if self.elsewhere is not None:
            value = self.elsewhere.read(value, param)
        if not any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in self.neutral):
            fields.unsupported(param, self.why)
        return value

    @property
    def schema(self) -> Schema:
        return {"enum": list(self.neutral)} if self.neutral else {"not": {}}

    @property
    def summary(self) -> str:
        return " or ".join(f"`{json.dumps(value)}`" for value in self.neutral) or "none"


def must_be(neutral: bool | float | str | list[str]) -> Unsupported:
    """Return the type of a parameter with only one allowed value."""
    shown = str(neutral).lower() if isinstance(neutral, bool) else repr(neutral)
    return Unsupported((neutral,), f"must be {shown}.")


def or_null(schema: Schema) -> Schema:
    """Return the schema of the same value or null."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return {**schema, "type": [kind, "null"]}
    if "enum" in schema:
        return {"enum": [*schema["enum"], None]}
    return {"type": "null"} if schema == {"not": {}} else {"anyOf": [*schema.get("anyOf", [schema]), {"type": "null"}]}


def _token_id(key: str, param: str) -> int:
    if not (key.isascii() and key.isdigit()) or (key[0] == "0" and key != "0"):
        expected = "You should only be submitting non-negative integers, without leading zeros."
        fields.fail(f"Invalid key in '{param}': {fields.shown(key)}. {expected}", param, "invalid_value")
    if len(key) > _MOST_TOKEN_DIGITS:
        most = 10**_MOST_TOKEN_DIGITS - 1
        fields.fail(f"Invalid key in '{param}': {fields.shown(key)}. Maximum value is {most}.", param, "invalid_value")
    return int(key)
