"""Print the tokens that a server streams for a batch, as lines under the names of the requests.

A stream that was cut is resumed.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from batch_inference_pipeline.event_stream import EventParser, ServerSentEvent
from batch_inference_pipeline.passing import is_passing
from pipeline.errors import Unfinished, one_line

if TYPE_CHECKING:
    import openai

_SILENCE_SECONDS = 60.0  # the server sends something at least every 15 s
_PATIENCE_SECONDS = 60.0
_PAUSE_SECONDS = 0.5


def tail(client: "openai.OpenAI", batch_id: str, as_json: bool) -> None:
    """Print events until the batch has ended."""
    show = _print_json if as_json else Printer().show
    last_id: str | None = None
    received = time.monotonic()
    while True:
        try:
            for event in _events(client, batch_id, last_id):
                if event.data == "[DONE]":
                    return
                value = json.loads(event.data)
                if "error" in value:  # the server cannot reach its queue at the moment
                    raise Unfinished(one_line(value["error"]["message"]))
                received, last_id = time.monotonic(), event.id or last_id
                show(value)
        except Exception as error:
            passing = isinstance(error, Unfinished) or is_passing(error)
            if not passing or time.monotonic() - received > _PATIENCE_SECONDS:
                raise
        time.sleep(_PAUSE_SECONDS)


class Printer:
    """Prints whole lines of every answer, each under its request's name.

    Text that arrives twice, such as after a reconnect, is printed once.
    """

    def __init__(self) -> None:
        # (line of the file, choice) -> unfinished line of text
        self._begun: dict[tuple[int, int], str] = {}
        self._seen: dict[tuple[int, int], int] = {}  # number of received characters

    def show(self, value: dict[str, Any]) -> None:
        """Print the new text of an event."""
        if value.get("object") == "batch":
            click.echo(f"{value['id']} is {value['status']}", err=True)
            return
        line, name = value["line"], value["custom_id"] or f"line {value['line']}"
        for choice in value["choices"]:
            self._add((line, choice["index"]), name, choice["text_offset"], choice["text"])
        if value["status"] is not None:
            self._end(line, name, value["status"])

    def _add(self, key: tuple[int, int], name: str, offset: int, text: str) -> None:
        seen = self._seen.get(key, 0)
        self._seen[key] = max(seen, offset + len(text))
        *whole, rest = (self._begun.get(key, "") + text[max(0, seen - offset) :]).split("\n")
        self._begun[key] = rest
        for one in whole:
            write(f"{_label(name, key[1])}: {one}\n")

    def _end(self, line: int, name: str, status: str) -> None:
        for key in sorted(key for key in self._seen if key[0] == line):
            del self._seen[key]
            if rest := self._begun.pop(key, ""):
                write(f"{_label(name, key[1])}: {rest}\n")
        if status == "failed":
            write(f"{name}: failed\n")


def parse_events(chunks: Iterable[bytes]) -> Iterator[ServerSentEvent]:
    """Yield the events of a stream."""
    parser = EventParser()
    for chunk in chunks:
        yield from parser.feed(chunk)


def _events(client: "openai.OpenAI", batch_id: str, last_id: str | None) -> Iterator[ServerSentEvent]:
    import openai

    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    stream = client.get(
        f"/batches/{quote(batch_id, safe='')}/stream",
        cast_to=object,
        stream=True,
        stream_cls=openai.Stream[object],
        options={"headers": headers, "timeout": _SILENCE_SECONDS, "max_retries": 0},
    )
    with closing(stream):
        yield from parse_events(stream.response.iter_bytes())


def _label(name: str, choice: int) -> str:
    return f"{name} ({choice})" if choice else name


def _print_json(value: dict[str, Any]) -> None:
    write(json.dumps(value) + "\n")


def write(text: str) -> None:
    """Print the text and flush it at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
