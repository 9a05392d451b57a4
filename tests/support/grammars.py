"""Texts against the forms that answers must have, without a model."""

from __future__ import annotations

import json
from typing import Any

from jobs.protocol.output_format import OutputFormat
from workers.engine.guides.vocabulary import Vocabulary
from workers.grammars.compiler import compile_format

BYTES = Vocabulary([bytes([byte]) for byte in range(256)], 256)
"""One token for each byte."""


def accepts(wanted: OutputFormat, text: str) -> bool:
    """Return whether an answer may be this text, and nothing less than all of it."""
    matcher = BYTES.compile(compile_format(wanted, BYTES))
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def of_schema(schema: Any, whitespace: str | None = None) -> OutputFormat:
    return OutputFormat("json_schema", json.dumps(schema), whitespace=whitespace)
