"""Forms of answers, as the official client gives them and as vLLM's users add them, each with what
must hold of its answers.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import jsonschema
from openai import pydantic_function_tool
from pydantic import BaseModel, Field

SAY: Any = [{"role": "user", "content": "What is 23 + 45?"}]
BODY: dict[str, Any] = {"model": "demo", "messages": SAY, "max_tokens": 1500, "temperature": 0}


COMPACT = {"guided_whitespace_pattern": " ?"}  # the demo model indents as deeply as it may


class Color(StrEnum):
    """An enumeration, which pydantic puts among the definitions."""

    RED = "red"
    GREEN = "dark green"


class SparePart(BaseModel):
    """What a list holds."""

    kind: Literal["bolt", "nut", "gear"]
    count: int = Field(ge=1, le=99)


class Address(BaseModel):
    """What another model holds."""

    street: str = Field(max_length=10)
    number: int | None = Field(ge=1, le=999)


class Order(BaseModel):
    """What an answer is parsed as: nested models, enumerations, lists, optional values."""

    color: Color
    parts: list[SparePart] = Field(min_length=1, max_length=2)
    address: Address
    gift: bool
    note: str | None = Field(max_length=6)


class AddNumbers(BaseModel):
    """Add two numbers."""

    a: int = Field(ge=0, le=999)
    b: int = Field(ge=0, le=999)


class Paint(BaseModel):
    """Paint something."""

    color: Color
    coats: Literal[1, 2, 3]


ADD, PAINT = pydantic_function_tool(AddNumbers), pydantic_function_tool(Paint)


def named(tool: Any) -> Any:
    """The choice of one tool by its name."""
    return {"type": "function", "function": {"name": tool["function"]["name"]}}


@dataclass(frozen=True)
class Form:
    """Parameters that ask for a form, and a check of a text that has it."""

    body: dict[str, Any]
    check: Callable[[str], None]


def of_schema(schema: Any) -> Callable[[str], None]:
    """The check of JSON by its schema."""
    return lambda text: jsonschema.validate(json.loads(text), schema)


def of_pattern(pattern: str) -> Callable[[str], None]:
    """The check of a text by a regular expression."""

    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), f"{text!r} is not {pattern}"

    return check


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "label": {"enum": ["sum", "difference"]},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}, "maxItems": 3},
    },
    "required": ["label", "numbers"],
    "additionalProperties": False,
}
REGEX = r"[0-9]{4}\+[0-9]{4}\nAnswer: [0-9]{1,4}"
CHOICE = ["a sum", "a difference"]
LARK = 'start: "it is " ("a sum" | "a difference")'
EBNF = 'root ::= "it is " kind\nkind ::= "a sum" | "a difference"'
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<label>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</label>",
    },
}
OLDER_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<label>", "schema": SCHEMA, "end": "</label>"}],
    "triggers": ["<label>"],
}
EITHER = of_pattern("a sum|a difference")
SENTENCE = of_pattern("it is a (sum|difference)")
END_OF_OBJECT = {"95": 100}  # the token of a closing brace, where it is allowed: the smallest object


def check_tag(text: str) -> None:
    """A tag around JSON of the schema."""
    found = re.fullmatch(r"<label>(.*)</label>", text, re.DOTALL)
    assert found is not None, text
    of_schema(SCHEMA)(found[1])


def _structured(check: Callable[[str], None], **member: Any) -> Form:
    return Form({"structured_outputs": member}, check)


FORMS = {
    "json_schema": Form(
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "label", "strict": True, "schema": SCHEMA},
            }
        },
        of_schema(SCHEMA),
    ),
    "json_object": Form(
        {"response_format": {"type": "json_object"}, "logit_bias": END_OF_OBJECT}, of_schema({"type": "object"})
    ),
    "structural_tag": Form({"response_format": TAG}, check_tag),
    "older structural_tag": Form({"response_format": OLDER_TAG}, of_pattern("[^<]+")),
    "structured json": _structured(of_schema(SCHEMA), json=SCHEMA),
    "structured json as text": _structured(of_schema(SCHEMA), json=json.dumps(SCHEMA), disable_any_whitespace=True),
    "structured regex": _structured(of_pattern(REGEX), regex=REGEX),
    "structured choice": _structured(EITHER, choice=CHOICE),
    "structured Lark": _structured(SENTENCE, grammar=LARK),
    "structured EBNF": _structured(SENTENCE, grammar=EBNF),
    "structured structural_tag": _structured(check_tag, structural_tag=json.dumps(TAG)),
    "guided_json": Form({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, of_schema(SCHEMA)),
    "guided_regex": Form({"guided_regex": REGEX}, of_pattern(REGEX)),
    "guided_choice": Form({"guided_choice": CHOICE}, EITHER),
    "guided_grammar": Form({"guided_grammar": LARK}, SENTENCE),
}
"""The plain ways to ask for a form, by name."""
