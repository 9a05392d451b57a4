"""Print tokens as they are generated: one request as plain text (its first choice), a batch line by
line under the names of its requests.
"""

import sys
import time

import msgspec

from jobs.protocol.requests import LIVE_PREFIX, RequestKey, StreamEntry
from jobs.protocol.states import END_STATES
from jobs.queue import keys
from jobs.queue.connection import check_server, connect
from jobs.queue.request_queue import Queue
from jobs.queue.streams import FIRST_ID
from pipeline.errors import Refused

_WATCH_SECONDS = 30
_READ_SECONDS = 1.0


def tail_target(target: str, redis_url: str) -> None:
    """Follow a request (`batch_x/17`, `live_x`) or every running request of a batch, to its end.

    Raises `Refused`.
    """
    with connect(redis_url) as client:
        check_server(client)
        queue = Queue(client)
        if target.startswith(LIVE_PREFIX) or "/" in target:
            _tail_request(queue, _parse(target))
        else:
            _tail_batch(queue, target)


def _tail_request(queue: Queue, key: RequestKey) -> None:
    last_id, watch = FIRST_ID, _Watch(queue, key)
    while True:
        watch.renew()
        entries = queue.read_tokens({key: last_id}, _READ_SECONDS)
        for entry in entries:
            last_id = entry.entry_id
            _write(entry.text())
            if entry.result is not None:
                _write("\n" + _failure(entry))
                return
        if not entries and not _is_known(queue, key):
            if last_id == FIRST_ID:
                raise Refused(f"no request {key} is waiting or running, and no stream of it is kept")
            _write("\n")
            return


def _tail_batch(queue: Queue, batch: str) -> None:
    if not queue.batch_fields(batch).state:
        raise Refused(f"there is no batch {batch} in the queue")
    watch = _Watch(queue, batch)
    positions: dict[RequestKey, str] = {}
    lines: dict[RequestKey, dict[int, str]] = {}  # what is begun of a line of each choice
    while True:
        watch.renew()
        for key in queue.running(batch):
            positions.setdefault(key, FIRST_ID)
        for entry in queue.read_tokens(positions, _READ_SECONDS):
            positions[entry.key] = entry.entry_id
            begun = lines.setdefault(entry.key, {0: ""})
            _write_whole_lines(entry, begun)
            if entry.result is not None:
                del positions[entry.key], lines[entry.key]
                _write_end(entry, begun)
        if not positions:
            if queue.batch_fields(batch).state in {"", *END_STATES}:
                return
            time.sleep(0.1)


def _write_whole_lines(entry: StreamEntry, begun: dict[int, str]) -> None:
    """Print the lines that the entry completes; `begun` keeps the rest of each choice."""
    for chunk in entry.chunks:
        *whole, begun[chunk.choice] = (begun.get(chunk.choice, "") + chunk.text).split("\n")
        for line in whole:
            _write(f"{_label(entry.key, chunk.choice)}: {line}\n")


def _write_end(entry: StreamEntry, begun: dict[int, str]) -> None:
    """Print the last line of each choice, and the error of a request that failed."""
    for choice, line in begun.items():
        _write(f"{_label(entry.key, choice)}: {line}\n")
    _write(_failure(entry))


def _label(key: RequestKey, choice: int) -> str:
    return f"{key} ({choice})" if choice else str(key)


class _Watch:
    """Mark the target as watched again and again while it is read."""

    def __init__(self, queue: Queue, target: RequestKey | str) -> None:
        self._queue = queue
        self._target = target
        self._until = 0.0

    def renew(self) -> None:
        if time.monotonic() > self._until:
            self._queue.watch(self._target, _WATCH_SECONDS)
            self._until = time.monotonic() + _WATCH_SECONDS / 2


def _is_known(queue: Queue, key: RequestKey) -> bool:
    """Return whether the request waits, runs, or left a stream."""
    return bool(queue.redis.exists(keys.tokens(str(key)))) or bool(
        queue.redis.hexists(keys.bodies(key.batch), str(key.line))
    )


def _parse(target: str) -> RequestKey:
    if "/" not in target:
        return RequestKey(target, 0)
    try:
        return RequestKey.parse(target)
    except ValueError:
        raise Refused(
            f"{target} names no request: it is a batch id, a slash and a line number, such as batch_x/17"
        ) from None


def _failure(entry: StreamEntry) -> str:
    if entry.result is None or entry.result.succeeded:
        return ""
    error = msgspec.json.decode(entry.result.body).get("error", {})
    return f"{entry.key}: error {entry.result.status}: {error.get('message')}\n"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
