"""Server-sent events whose data are single lines."""

from typing import NamedTuple


class ServerSentEvent(NamedTuple):
    """One server-sent event."""

    id: str | None
    data: str


class EventParser:
    """Parses the chunks of a stream whose data are single lines, and skips comments.

    Only a line feed ends a line.
    """

    def __init__(self) -> None:
        self._id: str | None = None
        self._begun = b""

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Return the events that a chunk completes."""
        events = list[ServerSentEvent]()
        *lines, self._begun = (self._begun + chunk).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"id":
                self._id = value.decode().strip()
            elif name == b"data":
                events.append(ServerSentEvent(self._id, value.decode().strip()))
                self._id = None
        return events
