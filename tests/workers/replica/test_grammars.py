"""Grammars are compiled once per form and kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from jobs.protocol.output_format import OutputFormat
from jobs.protocol.results import ApiError
from workers.replica import grammars as grammars_module
from workers.replica.grammars import Grammar, Grammars
from workers.text.errors import FormatError, GrammarCompilerError


class CountingCompiler:
    """Says of each form that it is one, unless it is to fail."""

    def __init__(self) -> None:
        self.asked: list[OutputFormat] = []
        self.failing: dict[str, Exception] = {}

    async def compile(self, wanted: OutputFormat) -> str:
        self.asked.append(wanted)
        await asyncio.sleep(0)
        if wanted.source in self.failing:
            raise self.failing[wanted.source]
        return f"grammar of {wanted.source}"


def run(work: Callable[[Grammars, CountingCompiler], Awaitable[None]]) -> None:
    async def whole() -> None:
        compiler = CountingCompiler()
        await work(Grammars(compiler), compiler)

    asyncio.run(whole())


async def compiled(grammars: Grammars, wanted: OutputFormat) -> Grammar:
    future: asyncio.Future[Grammar] = asyncio.get_running_loop().create_future()
    grammars.compile(wanted, future.set_result)
    return await future


def test_equal_forms_are_compiled_once_and_kept() -> None:
    async def work(grammars: Grammars, compiler: CountingCompiler) -> None:
        same = [OutputFormat("regex", "a", param=f"p{number}") for number in range(3)]
        others = [OutputFormat("regex", "b"), OutputFormat("regex", "a", whitespace=" "), OutputFormat("grammar", "a")]
        assert grammars.lookup(same[0]) is None
        assert await asyncio.gather(*(compiled(grammars, wanted) for wanted in same)) == ["grammar of a"] * 3
        assert len(compiler.asked) == 1
        assert grammars.lookup(same[2]) == "grammar of a"
        assert [grammars.lookup(wanted) for wanted in others] == [None] * 3

    run(work)


def test_an_error_is_kept_and_names_the_parameter_of_each_request() -> None:
    async def work(grammars: Grammars, compiler: CountingCompiler) -> None:
        compiler.failing["a"] = FormatError("It is wrong.")
        wanted = [OutputFormat("regex", "a", param=name) for name in ("one", "two")]
        for error, name in ((await compiled(grammars, wanted[0]), "one"), (grammars.lookup(wanted[1]), "two")):
            assert isinstance(error, ApiError)
            assert (error.status, error.param, error.message) == (400, name, f"Invalid '{name}': It is wrong.")
        assert len(compiler.asked) == 1

    run(work)


def test_a_compiler_that_fails_by_itself_is_asked_again() -> None:
    async def work(grammars: Grammars, compiler: CountingCompiler) -> None:
        compiler.failing["a"] = GrammarCompilerError("the grammar compiler cannot be started")
        error = await compiled(grammars, OutputFormat("regex", "a"))
        assert isinstance(error, ApiError)
        assert (error.status, error.type) == (500, "server_error")
        assert grammars.lookup(OutputFormat("regex", "a")) is None
        compiler.failing.clear()
        assert await compiled(grammars, OutputFormat("regex", "a")) == "grammar of a"

    run(work)


def test_a_source_of_a_megabyte_is_refused_at_once() -> None:
    async def work(grammars: Grammars, compiler: CountingCompiler) -> None:
        error = grammars.lookup(OutputFormat("json_schema", "x" * (1 << 20), param="structured_outputs.json"))
        assert isinstance(error, ApiError)
        assert (error.status, error.param) == (400, "structured_outputs.json")
        assert "1048576 characters" in error.message

    run(work)


def test_what_was_not_used_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_KEPT", 3)

    async def work(grammars: Grammars, compiler: CountingCompiler) -> None:
        forms = [OutputFormat("regex", str(number)) for number in range(4)]
        for wanted in forms[:3]:
            await compiled(grammars, wanted)
        grammars.lookup(forms[0])
        await compiled(grammars, forms[3])
        assert [grammars.lookup(wanted) is not None for wanted in forms] == [True, False, True, True]
        monkeypatch.setattr(grammars_module, "MAX_KEPT_CHARACTERS", 40)
        await compiled(grammars, OutputFormat("regex", "x" * 10))
        assert [grammars.lookup(wanted) is not None for wanted in forms] == [False] * 4
        assert grammars.lookup(OutputFormat("regex", "x" * 10)) is not None

    run(work)


def test_closing_tells_nobody_any_more() -> None:
    async def work(grammars: Grammars, compiler: CountingCompiler) -> None:
        compiled_later: list[Grammar] = []
        grammars.compile(OutputFormat("regex", "a"), compiled_later.append)
        await grammars.close()
        assert compiled_later == []

    run(work)
