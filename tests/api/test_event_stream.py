"""Event streams without a server around them: what is sent when, and what ends them."""

import asyncio
from collections.abc import AsyncIterator

from starlette.types import Message

from api.http.event_stream import EventStream


class EventTaker:
    """Takes what is sent; `leave` is its end."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self._left = asyncio.Event()

    def leave(self) -> None:
        self._left.set()

    async def receive(self) -> Message:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.bodies.append(message.get("body", b""))

    async def get(self, stream: EventStream) -> None:
        await stream({"type": "http"}, self.receive, self.send)


def test_a_silent_stream_is_pinged_and_one_with_events_is_not() -> None:
    async def run() -> list[bytes]:
        async def events() -> AsyncIterator[bytes]:
            for number in range(40):
                await asyncio.sleep(0.01)
                yield b"%d " % number
            while client.bodies[client.bodies.index(b"39 ") :].count(b": ping\n\n") < 2:
                await asyncio.sleep(0.01)
            yield b"end"

        client = EventTaker()
        await client.get(EventStream(events(), 0.3))
        return client.bodies

    bodies = asyncio.run(asyncio.wait_for(run(), 60))
    quiet = bodies.index(b"39 ") + 1
    assert b"".join(bodies[:quiet]).replace(b": ping\n\n", b"") == b"".join(b"%d " % number for number in range(40))
    assert bodies[quiet:] == [b": ping\n\n"] * 2 + [b"end", b""]


def test_a_client_that_does_not_read_gets_no_pings_and_its_leaving_ends_the_stream() -> None:
    closed: list[bool] = []

    async def run() -> list[bytes]:
        async def events() -> AsyncIterator[bytes]:
            yield b"first"
            client.reads.clear()
            yield b"second"
            raise AssertionError("nobody reads on")

        async def close() -> None:
            closed.append(True)

        client = EventTaker()
        task = asyncio.create_task(client.get(EventStream(events(), 0.02, close)))
        await asyncio.sleep(0.2)
        client.leave()
        await task
        return client.bodies

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [b"", b"first"]
    assert closed == [True]


def test_a_client_that_reads_on_after_a_pause_is_pinged_again() -> None:
    async def run() -> list[bytes]:
        async def events() -> AsyncIterator[bytes]:
            client.reads.clear()
            yield b"first"
            while b": ping\n\n" not in client.bodies:
                await asyncio.sleep(0.01)

        client = EventTaker()
        task = asyncio.create_task(client.get(EventStream(events(), 0.05)))
        await asyncio.sleep(0.2)  # several times as long as until a ping
        client.reads.set()
        await task
        return client.bodies

    assert asyncio.run(asyncio.wait_for(run(), 60))[:3] == [b"", b"first", b": ping\n\n"]
