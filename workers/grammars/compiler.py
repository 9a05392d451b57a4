"""Compile an output format as the engine core does, to find out whether it compiles."""

from __future__ import annotations

from jobs.protocol.output_format import OutputFormat
from workers.engine.guides.vocabulary import Vocabulary
from workers.grammars.explanation import explain
from workers.grammars.formats import grammar_of
from workers.text.errors import FormatError


def compile_format(wanted: OutputFormat, vocabulary: Vocabulary) -> str:
    """Return the grammar of a form, checked to compile and to have a first token, and a second one
    if an object may begin.

    Raises FormatError.
    """
    grammar = grammar_of(wanted)
    matcher = vocabulary.compile(grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()
    brace = vocabulary.spell(b"{")
    if brace and not matcher.is_error() and matcher.try_consume_tokens(brace) and not matcher.is_stopped():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise FormatError(explain(wanted, matcher.get_error()))
    return grammar
