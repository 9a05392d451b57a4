"""Convert output formats to grammars."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher

from jobs.protocol.output_format import FormatKind, OutputFormat
from workers.grammars import lark
from workers.grammars.json_schema import parse_json, prepare_parsed, prepare_schema
from workers.grammars.structural_tags import structural_tag
from workers.text.errors import FormatError


def grammar_of(wanted: OutputFormat) -> str:
    """Return the grammar of a form, in llguidance's JSON form; it may not compile.

    Raises FormatError.
    """
    return _MAKERS[wanted.kind](wanted)


def _json_object(wanted: OutputFormat) -> str:
    return _of_schema(prepare_parsed({"type": "object"}, wanted.whitespace))


def _json_schema(wanted: OutputFormat) -> str:
    return _of_schema(prepare_schema(wanted.source, wanted.whitespace))


def _of_schema(schema: dict[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _regex(wanted: OutputFormat) -> str:
    return LLMatcher.grammar_from_regex(wanted.source)


def _choice(wanted: OutputFormat) -> str:
    texts = parse_json(wanted.source, "The list of choices")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise FormatError("The choices must be a list of one string or more.")
    return lark.choice(texts)


def _grammar(wanted: OutputFormat) -> str:
    if not wanted.source.strip():
        raise FormatError("The grammar is empty.")
    return lark.grammar_text(lark.to_lark(wanted.source))


def _structural_tag(wanted: OutputFormat) -> str:
    return structural_tag(parse_json(wanted.source, "The structural tag"), wanted.whitespace)


_MAKERS: dict[FormatKind, Callable[[OutputFormat], str]] = {
    "json_object": _json_object,
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
