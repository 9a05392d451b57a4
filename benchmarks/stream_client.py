"""Many concurrent streamed completions from one process, which records the arrival time of each
piece and parses the answers after all have ended.

    python -m benchmarks.stream_client --url http://127.0.0.1:8000 --model NAME --streams 64

It prints one JSON object: processor seconds, and for each stream the time of the request, the
arrival time of each event (monotonic clock) with the number of characters so far, and its end.
"""

import argparse
import json
import re
import resource
import selectors
import socket
import sys
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from jobs.process import die_with_parent

FIRST_PROMPT_TOKEN = 100
"""The prompt of stream i begins with the token of this id and i."""

_EVENT = re.compile(rb"data: (.*?)\n\n", re.DOTALL)
_PROMPT_TOKENS = 32
_READ = 1 << 16


@dataclass(slots=True)
class Stream:
    """One call and its answer: the bytes, and their number over time."""

    connection: socket.socket
    asked: float
    raw: bytearray = field(default_factory=bytearray)
    sizes: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def read(self) -> bool:
        """Read the available data; return whether the stream continues."""
        data = self.connection.recv(_READ)
        self.times.append(time.monotonic())
        self.raw += data
        self.sizes.append(len(self.raw))
        return bool(data)

    def report(self) -> dict[str, Any]:
        """Return the answer and the arrival times of its events."""
        arrivals: list[tuple[float, int]] = []
        characters, reason, done = 0, None, False
        for match in _EVENT.finditer(bytes(self.raw)):
            if match[1] == b"[DONE]":
                done = True
                continue
            for choice in json.loads(match[1]).get("choices", ()):
                characters += len(choice["text"])
                reason = choice["finish_reason"] or reason
            arrivals.append((self.times[bisect_left(self.sizes, match.end())], characters))
        status = int(self.raw.split(b" ", 2)[1]) if self.raw else 0
        return {"asked": self.asked, "arrivals": arrivals, "status": status, "reason": reason, "done": done}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of the API")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    args = parser.parse_args()
    die_with_parent()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    streams = run(args.url, args.model, args.streams, args.tokens)
    used = resource.getrusage(resource.RUSAGE_SELF)
    report = {"processor_seconds": used.ru_utime + used.ru_stime, "streams": [one.report() for one in streams]}
    json.dump(report, sys.stdout)


def run(url: str, model: str, streams: int, tokens: int) -> list[Stream]:
    """Send all requests at once and read until each stream has ended."""
    address = urlsplit(url)
    waiting = selectors.DefaultSelector()
    opened = []
    for number in range(streams):
        connection = socket.create_connection((address.hostname, address.port))
        opened.append(Stream(connection, time.monotonic()))
        connection.sendall(request(address.netloc, model, number, tokens))
        waiting.register(connection, selectors.EVENT_READ, opened[-1])
    left = streams
    while left:
        for key, _ in waiting.select():
            if not key.data.read():
                waiting.unregister(key.fileobj)
                key.data.connection.close()
                left -= 1
    return opened


def request(host: str, model: str, number: int, tokens: int, stream: bool = True) -> bytes:
    """Return the HTTP request of one call."""
    body = {
        "model": model,
        "prompt": [FIRST_PROMPT_TOKEN + number] * _PROMPT_TOKENS,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + content


if __name__ == "__main__":
    main()
