"""Build pieces of grammars in llguidance's variant of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from workers.grammars.json_schema import whitespace_options
from workers.text.errors import FormatError

_WHITESPACE_OPTIONS = {"whitespace_flexible", "whitespace_pattern"}
_JSON = json.JSONDecoder()
_UNWRITABLE = re.compile(r"([\x00-\x08\x0b\x0c\x0e-\x1f\x7f]+)")  # not allowed in a Lark string
_GBNF_RULE = re.compile(r"(?m)^\s*[\w-]+\s*::=")
_JSON_PART = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|(?://|#).*|(%json\s*)(?={)')
"""A string, a regular expression, a comment or, as a group, the beginning of a JSON Schema."""


def literal(text: str) -> str:
    """Return a Lark expression for a nonempty text, for rules and for terminals.

    Raises FormatError for a text that cannot be encoded in UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FormatError("A text holds half a character (a lone surrogate), which no answer can have.") from None
    return " ".join(_piece(part) for part in _UNWRITABLE.split(text) if part)


def _piece(part: str) -> str:
    if _UNWRITABLE.match(part):
        return "/" + "".join(f"\\x{{{ord(character):x}}}" for character in part) + "/"
    return json.dumps(part, ensure_ascii=False)


def choice(texts: Iterable[str]) -> str:
    """Return the grammar of a choice between texts, in llguidance's JSON form.

    The choice is one terminal: a rule with as many alternatives takes ten times as long to compile.
    """
    distinct = list(dict.fromkeys(texts))
    alternatives = " | ".join(f"({literal(text)})" for text in distinct if text)
    if not alternatives:
        return grammar_text('start: ""')
    start = "start: CHOICE?" if "" in distinct else "start: CHOICE"
    return grammar_text(f"{start}\nCHOICE: {alternatives}")


def grammar_text(lark: str) -> str:
    """Return a Lark grammar in llguidance's JSON form."""
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def to_lark(grammar: str) -> str:
    """Return a caller's grammar as Lark.

    The input may also be GBNF, which vLLM calls EBNF, with `root ::=` as its start. Raises
    FormatError.
    """
    if not _GBNF_RULE.search(grammar):
        return _bound_whitespace(grammar)
    try:
        return str(gbnf_to_lark(grammar))
    except RecursionError:
        raise FormatError("The grammar is nested too deeply.") from None
    except Exception as error:  # the converter raises plain Exception
        raise FormatError(f"The grammar cannot be read as EBNF: {' '.join(str(error).split())}.") from None


def _bound_whitespace(grammar: str) -> str:
    """Bound the whitespace of the JSON Schemas inside a grammar, unless their options say more."""
    parts, done = [], 0
    for match in _JSON_PART.finditer(grammar):
        if match[1] is None or match.end() < done:
            continue
        try:
            schema, end = _JSON.raw_decode(grammar, match.end())
        except (ValueError, RecursionError):  # the compiler says what is wrong
            continue
        options = schema.get("x-guidance", {})
        if isinstance(options, dict) and not _WHITESPACE_OPTIONS & options.keys():
            schema["x-guidance"] = whitespace_options(None) | options
            parts += [grammar[done : match.end()], json.dumps(schema)]
            done = end
    return "".join([*parts, grammar[done:]])


def regex_terminal(pattern: str) -> str:
    """Return a regular expression as a terminal: between slashes, with inner slashes escaped."""
    start: str = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    return start.removeprefix("start: ")
