"""Define the messages between the worker process and its grammar compiler process.

The worker process sends a `SetVocabulary` first, answered by an empty `Compiled`; then each
`Compile` is answered by a `Compiled`, in any order.
"""

from __future__ import annotations

import msgspec

from jobs.protocol.output_format import OutputFormat

THREADS = 4
"""Grammars compiled at the same time, so that a slow one does not delay all others."""


class Compile(msgspec.Struct, array_like=True):
    """Compile a form; `number` is chosen by the sender."""

    number: int
    wanted: OutputFormat


class Compiled(msgspec.Struct, array_like=True):
    """The grammar of the form with that number, or a sentence with the error.

    `unfinished`: a thread still compiles it, and has used up its processor time.
    """

    number: int = 0
    grammar: str = ""
    error: str = ""
    unfinished: bool = False
