"""The client's thread: who waits for it, drops what it gave, interrupts it, or forks."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future
from typing import Any

import openai
import pytest

from batch_inference_pipeline import ClientError, Pipeline
from batch_inference_pipeline.loop_thread import EventLoopThread, LoopIterator
from tests.batch_inference_pipeline.conftest import ClientServer
from tests.support.commands import REPOSITORY
from tests.support.relay import Relay
from tests.support.waiting import wait_for_end, wait_until

FORKS = """
import os, sys
from batch_inference_pipeline import ClientError, Pipeline
p = Pipeline(base_url=sys.argv[1])
found = p.map(["Count from 2 to 4.", "Count from 2 to 4."], temperature=0)
next(found)
child = os.fork()
if not child:
    try:
        p.model
    except ClientError as error:
        print(error, flush=True)
    del found
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), next(found).text, flush=True)
"""


BLOCKED = """
import sys, threading
from batch_inference_pipeline import Pipeline
blocks = threading.Event()
def endless():
    yield "Count from 2 to 4."
    blocks.set()
    threading.Event().wait()
p = Pipeline(base_url=sys.argv[1])
threading.Thread(target=p.submit, args=[endless()], daemon=True).start()
blocks.wait()
"""

LEFT = """
import sys
from batch_inference_pipeline import Pipeline
p = Pipeline(base_url=sys.argv[1])
found = p.map([f"Count {n}" for n in range(200)], max_tokens=1500, ignore_eos=True)
print(flush=True)
sys.stdin.readline()
"""


class Generated:
    """A generator that waits for ever behind its first group, and notes its end."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self.has_ended = threading.Event()
        self.on_wait = lambda: None

    async def groups(self) -> AsyncGenerator[list[int], None]:
        try:
            yield [1, 2]
            self.waits.set()
            self.on_wait()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.has_ended.set()


async def nothing() -> None:
    """The end of a thread that has nothing to end."""


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    made = EventLoopThread(nothing)
    yield made
    made.close()


def client_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "pipeline-client"]


def test_an_iterator_is_dropped_in_the_thread_that_serves_it(loop: EventLoopThread) -> None:
    generated = Generated()
    held = [LoopIterator(loop, generated.groups())]
    assert next(held[0]) == 1

    async def drop() -> None:
        held.clear()

    wait_for_end(lambda: loop.run(drop()), 60, "the drop of the iterator")
    assert generated.has_ended.wait(60)


def test_an_iterator_that_is_dropped_unread_is_ended(loop: EventLoopThread) -> None:
    ended = threading.Event()

    async def end() -> None:
        ended.set()

    LoopIterator(loop, Generated().groups(), end)
    assert ended.wait(60)


def test_ctrl_c_in_a_wait_is_a_keyboard_interrupt(loop: EventLoopThread) -> None:
    generated = Generated()
    generated.on_wait = lambda: os.kill(os.getpid(), signal.SIGINT)
    items = LoopIterator(loop, generated.groups())
    with pytest.raises(KeyboardInterrupt):
        list(items)
    assert generated.has_ended.wait(60)
    assert list(items) == []


def test_an_iterable_of_the_caller_that_exits_ends_its_own_call_alone(loop: EventLoopThread) -> None:
    async def leave() -> None:
        sys.exit(3)

    async def stay() -> int:
        return 1

    async def wait() -> None:
        await asyncio.Event().wait()

    other = loop.start(wait())
    for _ in range(2):
        with pytest.raises(SystemExit):
            loop.run(leave())
        assert loop.run(stay()) == 1
    assert not other.done()
    loop.close()
    assert other.cancelled()


def test_an_iterable_of_the_caller_that_exits_at_its_end_keeps_nothing_from_ending() -> None:
    has_ended = threading.Event()

    async def end() -> None:
        await asyncio.sleep(0.1)  # what is cancelled ends meanwhile
        has_ended.set()

    async def leave_at_the_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            sys.exit(3)

    loop = EventLoopThread(end)
    loop.start(leave_at_the_end())
    assert loop.run(asyncio.sleep(0, 1)) == 1
    loop.close()
    assert has_ended.is_set()


def test_closing_wakes_who_waits(loop: EventLoopThread) -> None:
    generated = Generated()
    items = LoopIterator(loop, generated.groups())
    errors: list[BaseException] = []

    def read() -> None:
        try:
            list(items)
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert generated.waits.wait(60)
    wait_for_end(loop.close, 60, "the end of the thread")
    wait_until(lambda: errors, 60, "the reader's error")
    assert isinstance(errors[0], ClientError)
    assert str(errors[0]) == "the client is closed"
    assert generated.has_ended.is_set()


def test_a_callback_in_the_own_thread_gets_an_error_and_waits_for_nothing(loop: EventLoopThread) -> None:
    found: Future[BaseException | None] = Future()
    released = asyncio.Event()

    def call(_: Any) -> None:
        try:
            loop.run(nothing())
        except ClientError as error:
            found.set_result(error)

    async def release() -> None:
        released.set()

    async def wait() -> None:
        await released.wait()

    loop.start(wait()).add_done_callback(call)
    loop.run(release())
    assert "own thread" in str(found.result(60))


def test_a_client_that_is_dropped_ends(client_server: ClientServer) -> None:
    before = set(client_threads())
    pipeline = Pipeline(base_url=client_server.base_url)
    found = pipeline.map(["Count from 2 to 4."], temperature=0)
    assert set(client_threads()) - before
    del pipeline
    assert next(found).text == "Count: 2, 3, 4"  # which holds what it needs
    del found
    wait_until(lambda: set(client_threads()) <= before, 60, "the end of the client's thread")


def test_an_iterator_that_blocks_does_not_hold_the_end_of_the_program(client_server: ClientServer) -> None:
    subprocess.run([sys.executable, "-c", BLOCKED, client_server.base_url], timeout=200, cwd=REPOSITORY, check=True)


def test_the_end_of_the_program_cancels_a_map_of_a_server_that_has_a_name(client_server: ClientServer) -> None:
    client = openai.OpenAI(base_url=client_server.base_url, api_key="none")
    with Relay(client_server.base_url) as relay:
        program = [sys.executable, "-c", LEFT, relay.url.replace("127.0.0.1", "localhost")]
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as running:
            assert running.stdin is not None
            assert running.stdout is not None
            running.stdout.readline()
            [batch] = client.batches.list(limit=1).data
            relay.cut()  # so that the name is asked for again at the end
            running.stdin.close()
            assert running.wait(200) == 0
    wait_until(lambda: client.batches.retrieve(batch.id).status == "cancelled", 60, "its end")


def test_a_fork_may_exit_and_its_parent_goes_on(client_server: ClientServer) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FORKS, client_server.base_url],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=REPOSITORY,
        check=True,
    )
    first, second = ran.stdout.splitlines()
    assert first == "the client belongs to the process that created it: create another after a fork"
    assert second == "7 Count: 2, 3, 4"
    assert ran.stderr == ""
