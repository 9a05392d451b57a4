"""What a fleet is asked, and which answers are right.

Questions of the pool have one right answer. Some have a pattern which that answer has, and which a
grammar in another state would keep it from. Others ask for an answer of a form that the model would
not give by itself.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema

from tests.pipeline.test_pool import pool

MOST_TOKENS = 400  # of an answer of a form, with the whitespace that it may have
_DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


@dataclass(frozen=True)
class AskedQuestion:
    """A request's body, and which answers are right; of numbers these are JSON."""

    id: str
    body: dict[str, Any]
    fits: Callable[[str], bool]
    answer: str | None = None  # the only right one
    url: str = "/v1/chat/completions"

    def may_begin(self, text: str) -> bool:
        """Whether a right answer may begin like this, as far as that is known."""
        return self.answer is None or self.answer.startswith(text)


class Questions:
    """An endless supply."""

    def __init__(self) -> None:
        self._pool: list[dict[str, Any]] = pool()

    def draw(self, rng: random.Random) -> AskedQuestion:
        """One question; two in three ask for no form."""
        kind = rng.choices([plain, with_pattern, with_schema, with_choice, with_tool], [12, 2, 2, 1, 1])[0]
        return kind(rng.choice(self._pool), rng)


def text_of(message: dict[str, Any]) -> str:
    """What the model wrote in a message, or in a delta of a stream: its content, or the arguments
    of calls.
    """
    calls = message.get("tool_calls") or ()
    return (message.get("content") or "") + "".join(call["function"]["arguments"] for call in calls)


def plain(row: dict[str, Any], rng: random.Random) -> AskedQuestion:
    return AskedQuestion(row["id"], _body(row), row["answer"].__eq__, row["answer"])


def with_pattern(row: dict[str, Any], rng: random.Random) -> AskedQuestion:
    body = _body(row) | {"structured_outputs": {"regex": "".join(_pattern(row["answer"]))}}
    return AskedQuestion(f"pattern-{row['id']}", body, row["answer"].__eq__, row["answer"])


def with_schema(row: dict[str, Any], rng: random.Random) -> AskedQuestion:
    count = rng.randint(5, 60)
    digits = {"type": "array", "items": _DIGIT, "minItems": count, "maxItems": count}
    schema = _object(label={"enum": ["sum", "difference"]}, digits=digits, sure={"type": ["boolean", "null"]})
    form = {"json": schema | {"title": str(rng.random())}, "disable_any_whitespace": True}
    return AskedQuestion(f"schema-{row['id']}", _long(row) | {"structured_outputs": form}, _fits(schema))


def with_choice(row: dict[str, Any], rng: random.Random) -> AskedQuestion:
    choices = [f"{word}, number {rng.randrange(1000)}" for word in ("a sum", "a list", "a word")]
    return AskedQuestion(
        f"choice-{row['id']}", _long(row) | {"structured_outputs": {"choice": choices}}, choices.__contains__
    )


def with_tool(row: dict[str, Any], rng: random.Random) -> AskedQuestion:
    schema = _object(label={"enum": ["sum", "list", f"number {rng.randrange(1000)}"]})
    tool = {"type": "function", "function": {"name": "sort", "parameters": schema}}
    choice = {"type": "function", "function": {"name": "sort"}}
    return AskedQuestion(f"tool-{row['id']}", _long(row) | {"tools": [tool], "tool_choice": choice}, _fits(schema))


def _body(row: dict[str, Any]) -> dict[str, Any]:
    return {"model": "demo", "messages": row["messages"], "max_tokens": row["max_tokens"], "temperature": 0}


def _long(row: dict[str, Any]) -> dict[str, Any]:
    return _body(row) | {"max_tokens": MOST_TOKENS}


def _object(**properties: Any) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _pattern(answer: str) -> Iterator[str]:
    """The pieces of a pattern: what is no number and no word of small letters is as it is."""
    for piece in re.findall(r"[0-9]+|[a-z]+|[^0-9a-z]", answer):
        yield "[0-9]+" if piece.isdigit() else "[a-z]+" if piece.isalpha() and piece.islower() else _escaped(piece)


def _escaped(character: str) -> str:
    return f"\\{character}" if character in r".+*?()[]{}|^$\-/" else character


def _fits(schema: dict[str, Any]) -> Callable[[str], bool]:
    validator = jsonschema.Draft202012Validator(schema)

    def fits(text: str) -> bool:
        try:
            return validator.is_valid(json.loads(text))
        except ValueError:
            return False

    return fits
