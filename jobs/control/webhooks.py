"""Webhooks: notify the operator's server that API batches ended, as OpenAI's service does.

Runs in a thread of the leading ticker, with an event loop of its own, so that a slow or missing
receiver delays nothing else. Each delivery is signed as in Standard Webhooks. Every attempt for one
event has the same `webhook-id`, so that a receiver can drop duplicates.
"""

import asyncio
import base64
import hashlib
import hmac
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import httpx2
import msgspec
import redis

from jobs.batch.deleted import is_deleted
from jobs.batch.webhook_notes import WebhookNote, list_webhooks
from jobs.protocol.states import END_STATES
from jobs.queue.request_queue import Queue, WebhookResult
from jobs.queue.scripts import QueueUnavailable
from jobs.store.marker import BATCHES_FOLDER, WEBHOOKS_FOLDER, check_store
from jobs.store.storage import StoreError, delete, exists, join, path_of, read_bytes, sweep, write_bytes

DELAYS = (5.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0)
"""Seconds between the attempts for one event, three days in total, as Standard Webhooks advises."""

TIMEOUT_SECONDS = 15.0
_AT_ONCE = 16
_LOOK_SECONDS = 1.0
_RESTART_SECONDS = 30.0
_GONE = 410
_Due = tuple["WebhookNote", "_Attempts", "_Event"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _Attempts(msgspec.Struct):
    """The failed attempts in a note."""

    count: int = 0
    due_at: float = 0.0  # unix seconds


_decode = msgspec.json.Decoder(_Attempts).decode


class _Event(msgspec.Struct, frozen=True):
    """The body of a delivery, like OpenAI's."""

    id: str
    created_at: int
    type: str
    data: dict[str, str]
    object: str = "event"


class Webhooks:
    """Delivers the events noted in the file store to one URL, while it `leads`."""

    def __init__(self, queue: Queue, file_store: str, url: str, key: bytes, delays: tuple[float, ...] = DELAYS) -> None:
        self._queue = queue
        self._store = file_store
        self._url = url
        self._key = key
        self._delays = delays
        self._attempts: dict[WebhookNote, _Attempts] = {}
        self._is_swept = False
        self._under_way: dict[WebhookNote, asyncio.Task[None]] = {}
        # One thread, so that no note is read while it is settled.
        self._notes = ThreadPoolExecutor(1, "webhook-notes")

    def run(self, leads: Callable[[], bool], stopping: threading.Event) -> None:
        """Deliver until the process is ordered to end, whatever fails meanwhile."""
        while not stopping.is_set():
            try:
                asyncio.run(self._run(leads, stopping))
            except Exception:  # from the client's settings in the environment, such as proxies
                logger.exception("webhook delivery failed; restarting it in %.0f s", _RESTART_SECONDS)
                stopping.wait(_RESTART_SECONDS)

    async def _run(self, leads: Callable[[], bool], stopping: threading.Event) -> None:
        self._under_way.clear()  # tasks of a loop that ended
        async with httpx2.AsyncClient(timeout=TIMEOUT_SECONDS, follow_redirects=False) as client:
            while not stopping.is_set():
                if leads():
                    await self._start_due(client)
                else:
                    self._attempts.clear()  # another ticker's are in the notes
                    self._is_swept = False
                await asyncio.sleep(_LOOK_SECONDS)

    async def _start_due(self, client: httpx2.AsyncClient) -> None:
        try:
            due = await self._on_disk(self._find_due, _AT_ONCE - len(self._under_way))
        except (StoreError, redis.RedisError, QueueUnavailable) as error:
            logger.warning("webhook delivery paused until the file store and Redis answer: %s", error)
            return
        except Exception:
            logger.exception("internal error of webhook delivery; retrying")
            return
        for note, attempts, event in due:
            self._under_way[note] = asyncio.create_task(self._deliver(client, note, attempts, event))

    async def _on_disk(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._notes, call, *arguments)

    def _find_due(self, most: int) -> list[_Due]:
        """Return up to `most` events to send now; drop notes of events that will never be sent."""
        notes = list_webhooks(self._store)
        if notes:
            check_store(self._queue, path_of(self._store))  # in a checked store, a missing file is gone
        if not self._is_swept:
            self._is_swept = True
            # A former leader may be writing: it keeps the note, and sends the event again.
            try:
                sweep(join(self._store, WEBHOOKS_FOLDER))
            except StoreError as error:
                logger.warning("failed to remove half-written webhook notes: %s", error)
        known = {note: self._attempts.get(note) or self._read(note) for note in notes}
        self._attempts = {note: attempts for note, attempts in known.items() if attempts is not None}
        now = time.time()
        waiting = [
            note for note in self._attempts if self._attempts[note].due_at <= now and note not in self._under_way
        ]
        found: list[_Due] = []
        for note in sorted(waiting, key=lambda note: self._attempts[note].due_at):
            if len(found) >= most:
                break
            if event := self._event(note):
                found.append((note, self._attempts[note], event))
        return found

    def _event(self, note: WebhookNote) -> _Event | None:
        """Return the event of an end that clients can see; None if it is not visible yet, or never
        will be.
        """
        root = join(self._store, BATCHES_FOLDER, note.batch)
        fields = self._queue.batch_fields(note.batch)
        ended_otherwise = fields.state in END_STATES and fields.state != note.state
        if is_deleted(root) or ended_otherwise or not (fields.exists or exists(root)):
            delete(self._location(note))
            return None
        if fields.state != note.state or note.state not in fields.timestamps:
            return None
        digest = hashlib.sha256(note.name.encode()).hexdigest()
        return _Event(
            f"evt_{digest[:32]}", int(fields.timestamps[note.state]), f"batch.{note.state}", {"id": note.batch}
        )

    async def _deliver(self, client: httpx2.AsyncClient, note: WebhookNote, attempts: _Attempts, event: _Event) -> None:
        status, outcome = 0, ""
        try:
            status = await self._post(client, event)
            outcome = f"status {status}"
        except Exception as error:  # its text may name the URL
            outcome = f"no answer ({type(error).__name__})"
        try:
            result = await self._on_disk(self._settle, note, attempts, status, outcome)
            if result is not None:
                await asyncio.to_thread(self._queue.count_webhook, result)
        except StoreError as error:
            logger.warning("the webhook of batch %s may be sent again: %s", note.batch, error)
        except (redis.RedisError, QueueUnavailable) as error:
            logger.warning("failed to count the webhook of batch %s: %s", note.batch, error)
        finally:
            del self._under_way[note]

    async def _post(self, client: httpx2.AsyncClient, event: _Event) -> int:
        """Send an event and return the status; the body is not read."""
        body, now = msgspec.json.encode(event), int(time.time())
        headers = {
            "content-type": "application/json",
            "user-agent": "batch-inference-pipeline",
            "webhook-id": event.id,
            "webhook-timestamp": str(now),
            "webhook-signature": sign(self._key, event.id, now, body),
        }
        async with (
            asyncio.timeout(TIMEOUT_SECONDS),
            client.stream("POST", self._url, content=body, headers=headers) as answer,
        ):
            client.cookies.clear()  # a receiver's cookies would be kept as long as the process runs
            return answer.status_code

    def _settle(self, note: WebhookNote, attempts: _Attempts, status: int, outcome: str) -> WebhookResult | None:
        """Record the result of an attempt, and the time of the next one.

        Return None if another process has settled the note since.
        """
        if not exists(self._location(note)):
            return None
        self._attempts[note] = attempts  # read again if the lead was lost meanwhile
        delay = self._delays[attempts.count] if attempts.count < len(self._delays) else self._delays[-1]
        is_last = attempts.count >= len(self._delays) or status == _GONE
        attempts.count, attempts.due_at = attempts.count + 1, time.time() + delay
        result: WebhookResult = "delivered" if 200 <= status < 300 else "abandoned" if is_last else "failed"
        if result == "failed":
            logger.warning("the webhook of batch %s failed: %s; retrying in %.0f s", note.batch, outcome, delay)
            write_bytes(self._location(note), msgspec.json.encode(attempts))
        else:
            if result == "abandoned":
                logger.error("the webhook of batch %s failed; no further attempts: %s", note.batch, outcome)
            delete(self._location(note))
        return result

    def _read(self, note: WebhookNote) -> _Attempts | None:
        """Return the attempts in a note; None for an unreadable one, which delays no other."""
        try:
            return _decode(read_bytes(self._location(note)))
        except msgspec.DecodeError:  # new, and therefore empty
            return _Attempts()
        except StoreError as error:
            logger.warning("the webhook of batch %s is paused: %s", note.batch, error)
            return None

    def _location(self, note: WebhookNote) -> str:
        return join(self._store, WEBHOOKS_FOLDER, note.name)


def sign(key: bytes, event_id: str, timestamp: int, body: bytes) -> str:
    """Return the header `webhook-signature` of Standard Webhooks."""
    digest = hmac.digest(key, f"{event_id}.{timestamp}.".encode() + body, "sha256")
    return f"v1,{base64.b64encode(digest).decode()}"
