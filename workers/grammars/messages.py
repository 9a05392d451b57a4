"""Messages between the worker process and the process that compiles its grammars.

The worker process' first frame is a `SetVocabulary`, which the other answers with an empty
`Compiled`; from then on each `Compile` gets its `Compiled`, in any order.
"""

from __future__ import annotations

import msgspec

from jobs.protocol.output_format import OutputFormat

THREADS = 4
"""Grammars compiled at the same time, so that one that takes long does not hold up all others."""


class Compile(msgspec.Struct, array_like=True):
    """Compile a form; `number` is the caller's own."""

    number: int
    wanted: OutputFormat


class Compiled(msgspec.Struct, array_like=True):
    """The grammar of the form of that number, or a sentence that says why there is none."""

    number: int = 0
    grammar: str = ""
    error: str = ""
