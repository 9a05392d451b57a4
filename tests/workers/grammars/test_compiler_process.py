"""The process that compiles grammars: its limits, and what becomes of others when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from jobs.protocol.output_format import OutputFormat
from tests.support.grammars import of_schema
from workers.grammars.grammar_compiler import GrammarCompiler
from workers.text.errors import FormatError, GrammarCompilerError

TOKENS = [bytes([byte]) for byte in range(256)]
TOO_DEEP = OutputFormat("grammar", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(30000)) + '\nr30000: "b"')
TOO_LONG = of_schema({"type": "integer", "multipleOf": 9999991})
FINE = [of_schema({"enum": [f"value {number}"]}) for number in range(8)]


async def tokens() -> list[bytes]:
    return TOKENS


def run(work: Callable[[GrammarCompiler], Awaitable[None]], seconds: float = 60.0) -> None:
    async def whole() -> None:
        compiler = GrammarCompiler(tokens, seconds)
        try:
            await work(compiler)
        finally:
            await compiler.close()
        assert compiler.pid is None

    asyncio.run(whole())


async def outcome(compiler: GrammarCompiler, wanted: OutputFormat) -> str:
    """The error's sentence, "" without one."""
    try:
        assert json.loads(await compiler.compile(wanted))["grammars"]
    except FormatError as error:
        return str(error)
    return ""


def test_it_compiles_and_says_what_is_wrong() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        assert compiler.pid is None
        assert await outcome(compiler, FINE[0]) == ""
        assert "'not' at $" in await outcome(compiler, of_schema({"not": {}}))

    run(work)


def test_a_chain_of_five_thousand_rules_is_compiled() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        rules = "\n".join(f'r{number}: "a" r{number + 1}' for number in range(5000))
        assert await outcome(compiler, OutputFormat("grammar", f'start: r0\n{rules}\nr5000: "b"')) == ""

    run(work)


def test_a_grammar_that_takes_too_long_is_given_up_and_the_others_are_compiled() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        await compiler.compile(FINE[0])
        pid = compiler.pid
        culprit, *others = await asyncio.gather(*(outcome(compiler, wanted) for wanted in (TOO_LONG, *FINE)))
        assert culprit == "It takes longer than 5 s of a processor to compile; make it smaller."
        assert others == [""] * len(FINE)
        assert await outcome(compiler, FINE[0]) == ""
        assert compiler.pid != pid

    run(work, seconds=5.0)


def test_time_without_a_processor_does_not_count() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        await compiler.compile(FINE[0])
        assert compiler.pid is not None
        os.kill(compiler.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(outcome(compiler, FINE[1]))
        assert not (await asyncio.wait({waiting}, timeout=1.5))[0]
        os.kill(compiler.pid, signal.SIGCONT)
        assert await waiting == ""

    run(work, seconds=1.0)


def test_a_process_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.grammars.grammar_compiler._WATCH_SECONDS", 0.5)

    async def work(compiler: GrammarCompiler) -> None:
        await compiler.compile(FINE[0])
        pid = compiler.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert await outcome(compiler, FINE[1]) == ""
        assert compiler.pid != pid

    run(work)


def test_another_process_is_ready_when_a_grammar_has_ended_one() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        assert await outcome(compiler, TOO_DEEP)
        async with asyncio.timeout(60):
            while compiler.pid is None:
                await asyncio.sleep(0.01)

    run(work)


def test_a_grammar_that_overflows_the_stack_is_given_up_and_the_others_are_compiled() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        wanted = [*FINE[:3], TOO_DEEP, *FINE[3:]]
        outcomes = await asyncio.gather(*(outcome(compiler, item) for item in wanted))
        assert outcomes.pop(3) == "It needs too much memory, or is too deeply nested, to compile; make it smaller."
        assert outcomes == [""] * len(FINE)

    run(work)


@pytest.mark.proof
@pytest.mark.parametrize(
    "wanted",
    [
        of_schema({"allOf": [{"type": "integer", "multipleOf": number} for number in (997, 991, 983)]}),
        of_schema({"type": "string", "pattern": "^(((a{1,900}){1,900}){1,900}|b.{1,900}){1,900}$"}),
        OutputFormat("regex", "((((x{1,99}y?){1,99}z?){1,99}){1,99}|.*a.{5000}){1,99}"),
        OutputFormat("grammar", "start: A\n" + "\n".join(f"A: B{i} | B{i}" for i in range(2000))),
        of_schema({"enum": [f"a value of many, {number}" for number in range(8000)]}),
        of_schema({"properties": {f"p{number}": {"pattern": f"^.*{number}.*$"} for number in range(2000)}}),
        OutputFormat("choice", json.dumps(["x" * number for number in range(700)])),
    ],
    ids=["coprime", "pattern", "regex", "rules", "enum", "properties", "choices"],
)
def test_what_explodes_is_compiled_or_refused_in_time(wanted: OutputFormat) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        await compiler.compile(FINE[0])
        before = time.monotonic()
        print(await outcome(compiler, wanted))
        assert time.monotonic() - before < 60
        assert await outcome(compiler, FINE[1]) == ""

    run(work, seconds=5.0)


def test_what_was_compiled_when_the_process_was_killed_is_compiled_again() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        await compiler.compile(FINE[0])
        assert compiler.pid is not None
        os.kill(compiler.pid, signal.SIGSTOP)
        waiting = [asyncio.create_task(outcome(compiler, wanted)) for wanted in FINE]
        await asyncio.sleep(0)
        os.kill(compiler.pid, signal.SIGKILL)
        assert await asyncio.gather(*waiting) == [""] * len(FINE)

    run(work)


def test_a_process_that_cannot_start_is_an_error_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        with monkeypatch.context() as changed:
            changed.setattr("sys.executable", "/nowhere/python")
            with pytest.raises(GrammarCompilerError, match=r"cannot be started: .*nowhere"):
                await compiler.compile(FINE[0])
            changed.setattr("sys.executable", "/bin/false")
            with pytest.raises(GrammarCompilerError, match="ended with status 1 when it started"):
                await compiler.compile(FINE[0])
        assert await outcome(compiler, FINE[0]) == ""

    run(work)


def test_a_process_that_says_nothing_when_it_starts_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o700)

    async def work(compiler: GrammarCompiler) -> None:
        with monkeypatch.context() as changed:
            changed.setattr("sys.executable", str(silent))
            changed.setattr("workers.grammars.grammar_compiler._START_SECONDS", 0.2)
            with pytest.raises(GrammarCompilerError, match=r"not ready after 0.2 s"):
                await compiler.compile(FINE[0])
        assert compiler.pid is None
        assert await outcome(compiler, FINE[0]) == ""

    run(work)


def test_a_vocabulary_without_bytes_is_an_error_of_each_request() -> None:
    async def refuse() -> list[bytes]:
        raise FormatError("The tokens have no bytes.")

    async def whole() -> None:
        compiler = GrammarCompiler(refuse)
        for wanted in FINE[:2]:
            with pytest.raises(FormatError, match="no bytes"):
                await compiler.compile(wanted)

    asyncio.run(whole())
