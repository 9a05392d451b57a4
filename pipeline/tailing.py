"""Print tokens from the queue as they are generated.

The first choice of a request is plain text. A batch is printed as by `pipeline batches tail`, under
the names of its requests.
"""

import time

import msgspec

from jobs.protocol.requests import LIVE_PREFIX, BatchEntry, RequestKey, StreamEntry
from jobs.protocol.states import END_STATES
from jobs.queue.connection import check_server, connect
from jobs.queue.following import StreamSnapshot, Watch, traces
from jobs.queue.request_queue import Queue
from jobs.queue.streams import FIRST_ID
from pipeline.errors import Refused
from pipeline.remote_tail import Printer, write

_WATCH_SECONDS = 30
_READ_SECONDS = 1.0
_PAUSE_SECONDS = 0.1
_UNKNOWN = "no request {} is waiting or running, and no stream of it is kept"


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
    last_id, watch = FIRST_ID, Watch(queue, key, _WATCH_SECONDS)
    if not key.live and not queue.batch_fields(key.batch).shows_lines:
        raise Refused(_UNKNOWN.format(key))
    while True:
        if watch.due:
            watch.begin()
        entries = queue.read_tokens({key: last_id}, _READ_SECONDS)
        for entry in entries:
            last_id = entry.entry_id
            write("".join(chunk.text for chunk in entry.chunks if chunk.choice == 0))
            if entry.result is not None:
                write("\n" + _failure(entry))
                return
        if not entries and not any(queue.commands(traces(key))):
            if last_id == FIRST_ID:
                raise Refused(_UNKNOWN.format(key))
            write("\n")
            return


def _tail_batch(queue: Queue, batch: str) -> None:
    watch, printer = Watch(queue, batch, _WATCH_SECONDS), Printer()
    first_id: str | None = None
    last_id: str | None = None
    while True:
        fields = queue.batch_fields(batch)
        state = fields.state
        if not state and last_id is None:
            raise Refused(f"there is no batch {batch} in the queue")
        if fields.exists and not fields.shows_lines and state not in END_STATES:
            if watch.due:
                begun = watch.begin()
                first_id = first_id or begun
            time.sleep(_PAUSE_SECONDS)
            continue
        entries = None if last_id is None or not fields.shows_lines else queue.read_batch(batch, last_id)
        if entries:
            _show(printer, entries)
            last_id = entries[-1].id
        elif state in {"", *END_STATES}:
            printer.show({"object": "batch", "id": batch, "status": state or "gone"})
            return
        elif entries is None:
            snapshot = StreamSnapshot(queue, batch, first_id or watch.begin())
            first_id = None
            for group in snapshot:
                _show(printer, group)
            last_id = snapshot.last_id
        else:
            if watch.due:
                watch.begin()
            time.sleep(_PAUSE_SECONDS)


def _show(printer: Printer, entries: list[BatchEntry]) -> None:
    for entry in entries:
        if entry.key is not None:
            printer.show(entry.event(entry.key, str(entry.key)))


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
