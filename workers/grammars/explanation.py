"""Translate errors of the grammar library into a sentence for the caller."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from jobs.protocol.output_format import FormatKind, OutputFormat
from workers.grammars.schema_walk import children

_NAMES: dict[FormatKind, str] = {
    "json_object": "JSON object",
    "json_schema": "schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "grammar": "grammar",
    "structural_tag": "structural tag",
}
_UNSUPPORTED = re.compile(r"Unimplemented keys: (\[.*\])")
_UNSATISFIABLE = re.compile(r"Unsatisfiable schema: (.*)")
_REGEX = re.compile(r"regex parse error:\n\s*(.*)\n(?:.*\n)*?error: (.*)")
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): ")
_EXCESS = re.compile("panic|too complex|too large|limit|fuel exhausted|current row has", re.IGNORECASE)
_LONGEST = 300  # characters quoted from the library's error


def explain(wanted: OutputFormat, error: str) -> str:
    """Return one sentence that names the error and, if known, its position."""
    if match := _UNSUPPORTED.search(error):
        return _unsupported(wanted, json.loads(match[1]))
    if match := _UNSATISFIABLE.search(error):
        return f"No JSON text can meet the schema: {match[1]}."
    if "NoExtension" in error:
        return "No token of the model's vocabulary can begin an answer of this form."
    if "oneOf constraints are not supported" in error:
        return (
            f"The schema's 'oneOf'{_place(wanted, 'oneOf')} has options that may hold at the same time, which is not"
            " supported: use 'anyOf', or let each option require a property with a 'const' of its own."
        )
    if match := _REGEX.search(error):
        return f"The regular expression {_shortened(match[1].strip())} cannot be used: {match[2].strip()}."
    if _EXCESS.search(error):
        return f"The {_NAMES[wanted.kind]} is too large, or too much of it is nested: {_first_line(error)}."
    return f"The {_NAMES[wanted.kind]} cannot be used: {_first_line(error)}."


def _unsupported(wanted: OutputFormat, keywords: list[str]) -> str:
    named = ", ".join(f"'{keyword}'{_place(wanted, keyword)}" for keyword in keywords)
    return f"The schema uses {named}, which {'is' if len(keywords) == 1 else 'are'} not supported; leave it out."


def _place(wanted: OutputFormat, keyword: str) -> str:
    """Return the first position of a keyword in a schema, as text for the sentence."""
    if wanted.kind == "json_schema":
        with contextlib.suppress(ValueError, RecursionError):
            path = _find(json.loads(wanted.source), keyword, "$")
            return f" at {path}" if path else ""
    return ""


def _find(schema: Any, keyword: str, path: str) -> str:
    if not isinstance(schema, dict):
        return ""
    if keyword in schema:
        return path
    for container, key, child in children(schema):
        name = next((name for name, value in schema.items() if value is container), "")
        below = ".".join(filter(None, (path, name, str(key))))
        if found := _find(child, keyword, below):
            return found
    return ""


def _first_line(error: str) -> str:
    lines = (line.strip() for line in error.splitlines())
    first = next(filter(None, lines), "it does not compile")
    return _shortened(_PLACE.sub("", first)).rstrip(".")


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
