"""A load generator of streamed completions, in a process of its own: when each call was sent and
when each of its chunks came.

    python -m benchmarks.live_load < plan.json

The plan is one JSON object: `host`, `port`, `key` (an API key; "" for none), `concurrency` (most
calls at once; null: no limit) and `calls`, each with `at` (seconds after the start at which it is
sent) and `body`. One JSON object is printed: `calls` in the order of the plan and `cpu_seconds`,
the processor time of this process while it sent and read. To leave the processors to the server, it
only stores what it reads, and parses it after the last call has ended.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import uvloop

_EVENT = "data: "
_SECONDS_TO_CONNECT = 60.0


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """A stream as measured by its client; times are in unix seconds."""

    sent: float
    arrivals: list[float]  # of the chunks with tokens
    prompt_tokens: int
    output_tokens: int

    @property
    def first_token_seconds(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]


@dataclass(frozen=True, slots=True)
class LiveLoad:
    """The result of one run of the generator."""

    calls: list[MeasuredCall]
    cpu_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds from the first call to the last chunk."""
        return max(call.arrivals[-1] for call in self.calls) - min(call.sent for call in self.calls)

    @property
    def output_tokens(self) -> int:
        return sum(call.output_tokens for call in self.calls)


def main() -> None:
    json.dump(uvloop.run(_run(json.load(sys.stdin))), sys.stdout)


def start_load(
    host: str, port: int, calls: Sequence[dict[str, Any]], concurrency: int | None = None, key: str = ""
) -> subprocess.Popen:
    """Start the generator's process with its plan; `wait_for_load` returns its result."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.live_load"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    plan = {"host": host, "port": port, "key": key, "calls": list(calls), "concurrency": concurrency}
    json.dump(plan, process.stdin)
    process.stdin.close()
    return process


def wait_for_load(process: subprocess.Popen) -> LiveLoad:
    """Wait for the last call. Raise RuntimeError with the server's error if a call failed."""
    assert process.stdout is not None
    output = process.stdout.read()
    if process.wait():
        raise RuntimeError(f"the load generator ended with status {process.returncode}")
    found = json.loads(output)
    return LiveLoad([_call(one) for one in found["calls"]], found["cpu_seconds"])


def _call(found: dict[str, Any]) -> MeasuredCall:
    events = [(when, json.loads(event)) for when, event in found["events"] if event != "[DONE]"]
    usage = next((event["usage"] for _, event in events if event.get("usage")), None)
    arrivals = [when for when, event in events if event.get("choices")]
    if usage is None or not arrivals:
        raise RuntimeError(f"a call failed: {found['refusal'] or [event for _, event in events][-1:]}")
    return MeasuredCall(found["sent"], arrivals, usage["prompt_tokens"], usage["completion_tokens"])


async def _run(plan: dict[str, Any]) -> dict[str, Any]:
    limit = asyncio.Semaphore(plan["concurrency"]) if plan["concurrency"] else nullcontext()
    began, used = time.perf_counter(), time.process_time()

    async def send(call: dict[str, Any]) -> "_Stream":
        await asyncio.sleep(call["at"] - (time.perf_counter() - began))
        async with limit:
            return await _stream(plan["host"], plan["port"], plan["key"], call["body"])

    streams = await asyncio.gather(*map(send, plan["calls"]))
    used = time.process_time() - used
    return {"calls": [_events(stream) for stream in streams], "cpu_seconds": round(used, 3)}


async def _stream(host: str, port: int, key: str, body: dict[str, Any]) -> "_Stream":
    """POST a body and read to the end."""
    content = json.dumps(body).encode()
    stream = _Stream(_head(host, port, key, len(content)) + content)
    connecting = asyncio.get_running_loop().create_connection(lambda: stream, host, port)
    await asyncio.wait_for(connecting, _SECONDS_TO_CONNECT)
    await stream.ended
    return stream


class _Stream(asyncio.Protocol):
    """The pieces of one answer, with the times at which they were read."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.sent = time.time()
        self.pieces: list[tuple[float, bytes]] = []
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.time(), data))

    def connection_lost(self, _: Exception | None) -> None:
        self.ended.set_result(None)

    def lines(self) -> Iterator[tuple[float, bytes]]:
        """Yield each line with the arrival time of its end."""
        when, rest = self.sent, b""
        for when, piece in self.pieces:
            *lines, rest = (rest + piece).split(b"\n")
            yield from ((when, line) for line in lines)
        yield when, rest


def _events(stream: _Stream) -> dict[str, Any]:
    lines = [(when, line.decode(errors="replace").strip()) for when, line in stream.lines()]
    events = [(when, line.removeprefix(_EVENT)) for when, line in lines if line.startswith(_EVENT)]
    accepted = " 200 " in lines[0][1]
    refusal = [] if accepted else [line for _, line in lines if line]
    return {"sent": stream.sent, "events": events, "refusal": refusal[-1:]}


def _head(host: str, port: int, key: str, length: int) -> bytes:
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"{authorization}Content-Length: {length}\r\nConnection: close\r\n\r\n"
    ).encode()


if __name__ == "__main__":
    main()
