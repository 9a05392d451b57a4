"""Compile the grammars of answers in another process, once each, and cache them."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from jobs.protocol.output_format import MOST_SOURCE, OutputFormat
from jobs.protocol.results import ApiError
from workers.text.errors import FormatError

logger = logging.getLogger(__name__)

MAX_KEPT = 1024
"""Most compiled forms in the cache."""

MAX_KEPT_CHARACTERS = 1 << 25
"""Largest total size of the cache, grammars included."""

_Key = tuple[str, str, str | None]
Grammar = str | ApiError
"""A compiled grammar, or the error of one that does not compile."""


class Compiler(Protocol):
    """A grammar compiler."""

    async def compile(self, wanted: OutputFormat) -> str:
        """Return a form's grammar. Raises FormatError."""
        ...


class Grammars:
    """Cache the grammars of output formats by their content.

    Use from the event loop only.
    """

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._kept: OrderedDict[_Key, str | FormatError] = OrderedDict()
        self._kept_characters = 0
        self._compiling: dict[_Key, asyncio.Task[str | Exception]] = {}

    def lookup(self, wanted: OutputFormat) -> Grammar | None:
        """Return the grammar or error of a form, or None if it must be compiled first."""
        if len(wanted.source) > MOST_SOURCE:
            message = f"Invalid '{wanted.param}': it has {len(wanted.source)} characters, more than {MOST_SOURCE}."
            return ApiError(400, message, param=wanted.param, code="invalid_value")
        key = _key(wanted)
        known = self._kept.get(key)
        if known is None:
            return None
        self._kept.move_to_end(key)
        return _answer(wanted, known)

    def compile(self, wanted: OutputFormat, then: Callable[[Grammar], None]) -> None:
        """Compile a form; `then` is called later, from the event loop. Equal forms are compiled
        once.
        """
        key = _key(wanted)
        task = self._compiling.get(key)
        if task is None:
            task = self._compiling[key] = asyncio.create_task(self._compile(key, wanted), name="grammar")

        def finished(task: asyncio.Task[str | Exception]) -> None:
            if not task.cancelled():
                then(_answer(wanted, task.result()))

        task.add_done_callback(finished)

    async def close(self) -> None:
        """Stop compiling; pending callbacks are never called."""
        tasks = list(self._compiling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _compile(self, key: _Key, wanted: OutputFormat) -> str | Exception:
        try:
            try:
                made: str | FormatError = await self._compiler.compile(wanted)
            except FormatError as error:
                made = error
            self._keep(key, made)
            return made
        except Exception as error:
            logger.error("failed to compile a grammar: %s", error)
            return error
        finally:
            del self._compiling[key]

    def _keep(self, key: _Key, made: str | FormatError) -> None:
        self._kept[key] = made
        self._kept_characters += _length(key, made)
        while len(self._kept) > MAX_KEPT or self._kept_characters > MAX_KEPT_CHARACTERS:
            self._kept_characters -= _length(*self._kept.popitem(last=False))


def _key(wanted: OutputFormat) -> _Key:
    return wanted.kind, wanted.source, wanted.whitespace


def _length(key: _Key, made: str | FormatError) -> int:
    return len(key[1]) + len(str(made))


def _answer(wanted: OutputFormat, made: str | Exception) -> Grammar:
    if isinstance(made, str):
        return made
    if isinstance(made, FormatError):
        return ApiError(400, f"Invalid '{wanted.param}': {made}", param=wanted.param, code="invalid_value")
    message = f"The grammar of the answer cannot be compiled here: {made}."
    return ApiError(500, message, "server_error", code="internal_error")
