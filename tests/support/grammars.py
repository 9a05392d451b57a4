"""Texts against the forms that answers must have, without a model."""

from __future__ import annotations

import json
import random
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


def write_answer(grammar: str, vocabulary: Vocabulary, chance: random.Random, most: int = 1500) -> bytes | None:
    """Return what a model writes that takes any token that is allowed, and likes to end; None where
    it does not end within `most` tokens.
    """
    matcher, text = vocabulary.compile(grammar), b""
    for _ in range(most):
        if matcher.is_stopped() or (matcher.is_accepting() and chance.random() < 0.5):
            break
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        tokens = [token for token in range(vocabulary.vocab_size) if allowed >> token & 1]
        token = chance.choice(tokens)
        matcher.consume_token(token)
        text += vocabulary.tokens[token]
    assert not matcher.is_error(), matcher.get_error()
    return text if matcher.is_accepting() else None
