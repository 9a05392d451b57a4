"""Reading server-sent events in a thread, as they come."""

import contextlib
import json
import socket
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import httpx

from tests.support.waiting import wait_until


class Event(NamedTuple):
    """One event: its own id, None where it has none, and its value; None for the end mark."""

    id: str | None
    value: Any


class EventReader:
    """Follows an address to its end, or until `close`."""

    def __init__(self, url: str, last_event_id: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        self.events: list[Event] = []
        self.ended = False
        own = {} if last_event_id is None else {"last-event-id": last_event_id}
        self._client = httpx.Client(timeout=60)
        self._answer = self._client.send(
            self._client.build_request("GET", url, headers={**own, **(headers or {})}), stream=True
        )
        assert self._answer.status_code == 200, self._answer.read()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> "EventReader":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cuts the connection."""
        with contextlib.suppress(OSError):  # the server has closed it
            self._answer.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._thread.join(60)
        self._client.close()

    def wait(self, count: int) -> list[Event]:
        """The first `count` events."""
        return (
            wait_until(lambda: self.events[:count] if len(self.events) >= count else None, 60, f"{count} events") or []
        )

    def wait_for_id(self, count: int, timeout: float = 60) -> list[Event]:
        """At least `count` events, up to one with an id, after which another reader can go on.

        Of a snapshot's events, however many they are, only the last has one.
        """
        wait_until(lambda: any(event.id for event in self.events[count - 1 :]), timeout, f"an id after {count} events")
        seen = [*self.events]
        while seen[-1].id is None:
            seen.pop()
        return seen

    def wait_ended(self) -> list[Event]:
        """All events, after the server ended the stream."""
        wait_until(lambda: self.ended, 60, "the end of the stream")
        return self.events

    @property
    def is_cut(self) -> bool:
        """Whether the connection was lost before the server ended the stream."""
        # In this order: it sets the one and then ends
        return not self._thread.is_alive() and not self.ended

    def _read(self) -> None:
        try:
            for event in parse_events(self._answer.iter_lines()):
                self.events.append(event)
            self.ended = True
        except httpx.HTTPError:  # cut
            pass


def parse_events(lines: Iterator[str]) -> Iterator[Event]:
    """Events out of the lines of a body."""
    event_id: str | None = None
    for line in lines:
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            yield Event(event_id, None if line == "data: [DONE]" else json.loads(line[6:]))
            event_id = None


def batch_texts(events: Iterable[Event]) -> dict[str, str]:
    """What the stream says that each request generated; fails where something is missing, or comes
    twice but for a new beginning.
    """
    pieces: defaultdict[str, list[str]] = defaultdict(list)
    lengths: defaultdict[str, int] = defaultdict(int)
    for _, value in events:
        for choice in value["choices"] if value and "choices" in value else []:
            name = value["custom_id"]
            if choice["text_offset"] == 0:
                pieces[name], lengths[name] = [], 0
            assert choice["text_offset"] == lengths[name], value
            pieces[name].append(choice["text"])
            lengths[name] += len(choice["text"])
    return {name: "".join(found) for name, found in pieces.items()}
