"""The end of one rank ends the whole engine core, promptly and with the right verdict; no rank
outlives its core. Real processes.
"""

import asyncio
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.processes import command_line, is_running, send_all
from tests.support.waiting import wait_until
from tests.workers.engine.models.tiny_models import folder
from workers.engine.client.async_engine import AsyncEngine, EngineDeadError, EngineStartError
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, SamplingParams

START_SECONDS = 100.0
# Less than the watchdog of a silent core ever waits, or a sum over ranks of which one has gone
PROMPT_SECONDS = 15.0
ENDLESS = SamplingParams(200, temperature=0.0, ignore_eos=True)


@asynccontextmanager
async def started(step_timeout: float | None = None) -> AsyncIterator[tuple[AsyncEngine, int]]:
    """An engine of two ranks, and the process id of the second."""
    model = str(folder("llama"))
    config = EngineConfig(
        model=model, device="cpu", dtype="float32", threads=1, tensor_parallel_size=2, step_timeout=step_timeout
    )
    engine = AsyncEngine(config)
    await engine.start(START_SECONDS)
    try:
        yield engine, ranks_of(engine.pid)[0]
    finally:
        await engine.stop()


def ranks_of(core: int) -> list[int]:
    return [child.pid for child in psutil.Process(core).children() if "rank_process" in command_line(child.pid)]


async def death_at_work(engine: AsyncEngine, rank: int, harm: Callable[[], None]) -> EngineDeadError:
    """What ends requests that are under way when `harm` comes.

    The rank is stopped before, so that the last of them has not ended.
    """
    engine.add([EngineRequest(number, [number], [], ENDLESS) for number in range(8)])
    begun: set[int] = set()
    async for output in engine.steps():
        begun.update(output.request_ids)
        if len(begun) == 8:
            break
    os.kill(rank, signal.SIGSTOP)
    engine.add([EngineRequest(8, [8], [], ENDLESS)])
    waiting = asyncio.create_task(exhaust(engine.steps()))
    await asyncio.sleep(0)
    began = time.monotonic()
    harm()
    with pytest.raises(EngineDeadError) as death:
        await waiting
    assert time.monotonic() - began < PROMPT_SECONDS
    return death.value


def signaled(pid: int, number: signal.Signals) -> None:
    """Signal a process and let it go on: a stopped one handles most signals only then."""
    send_all([pid], number)
    send_all([pid], signal.SIGCONT)


def starve(pid: int) -> None:
    """Nothing that a process asks for is given any more."""
    resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
    send_all([pid], signal.SIGCONT)


def end_core(core: int, rank: int, number: signal.Signals) -> None:
    os.kill(core, number)
    send_all([rank], signal.SIGCONT)


async def exhaust(items: AsyncIterator[object]) -> None:
    async for _ in items:
        pass


async def gone(pid: int) -> None:
    await asyncio.to_thread(wait_until, lambda: not is_running(pid), PROMPT_SECONDS, f"the end of process {pid}")


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 2 * START_SECONDS)

    asyncio.run(bounded())


@pytest.mark.parametrize(
    ("number", "by_itself"),
    [
        (signal.SIGKILL, False),
        (signal.SIGSEGV, True),
        (signal.SIGABRT, True),
    ],
)
@pytest.mark.proof
def test_a_rank_that_is_ended_by_a_signal_ends_the_core_by_the_same(number: signal.Signals, by_itself: bool) -> None:
    async def scenario() -> None:
        async with started() as (engine, rank):
            death = await death_at_work(engine, rank, lambda: signaled(rank, number))
            assert (death.returncode, death.by_itself) == (-number, by_itself)
            assert death.reason == f"the engine core was ended by {number.name}"
            assert f"rank 1 (process {rank}) was ended by {number.name}" in str(death)
            assert not is_running(engine.pid)

    run(scenario)


@pytest.mark.proof
def test_a_rank_that_runs_out_of_memory_ends_the_core_and_says_why() -> None:
    async def scenario() -> None:
        async with started() as (engine, rank):
            death = await death_at_work(engine, rank, lambda: starve(rank))
            assert death.by_itself
            assert "rank 1: " in death.reason
            await gone(rank)

    run(scenario)


@pytest.mark.proof
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_no_rank_outlives_its_core(number: signal.Signals) -> None:
    async def scenario() -> None:
        async with started() as (engine, rank):
            await death_at_work(engine, rank, lambda: end_core(engine.pid, rank, number))
            await gone(rank)

    run(scenario)


@pytest.mark.proof
def test_a_rank_that_hangs_is_a_core_that_hangs() -> None:
    async def scenario() -> None:
        async with started(step_timeout=5.0) as (engine, rank):
            # The rank is stopped, and stays stopped
            death = await death_at_work(engine, rank, lambda: None)
            assert death.by_itself
            assert "its step hung" in death.reason
            await gone(rank)

    run(scenario)


@pytest.mark.proof
def test_a_stop_leaves_no_rank() -> None:
    async def scenario() -> None:
        async with started() as (engine, rank):
            await engine.stop()
            await gone(rank)

    run(scenario)


@pytest.mark.proof
def test_a_rank_that_dies_while_it_loads_is_noticed(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(EngineConfig(model=str(folder("llama")), device="cpu", threads=1, tensor_parallel_size=2))
        starting = asyncio.create_task(engine.start(START_SECONDS))
        while not (ranks := ranks_of(engine.pid) if starting.done() or _has_core(engine) else []):
            await asyncio.sleep(0.01)
        os.kill(ranks[0], signal.SIGKILL)
        with pytest.raises(EngineStartError, match=r"rank 1 .* was ended by SIGKILL"):
            await starting
        await gone(engine.pid)

    run(scenario)


def _has_core(engine: AsyncEngine) -> bool:
    try:
        return engine.pid > 0
    except RuntimeError:
        return False
