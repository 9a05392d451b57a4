"""The queue: clients submit requests, workers claim them under leases and publish results.

Synchronous and thread-safe. Every change is one Lua script (`jobs/queue/lua`) that may be repeated;
its header has its rules. Batches are in `batch_records.py`, streams in `streams.py`, workers and
models in `registry.py` and `on_demand.py`, limits in `limits.py`.
"""

from collections.abc import Collection, Iterable
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import redis

from jobs.protocol.requests import (
    ChoiceCheckpoint,
    Claim,
    Delta,
    Finished,
    Request,
    RequestCheckpoint,
    RequestKey,
    pack,
    unpack_chunks,
    unpack_request,
)
from jobs.protocol.results import ApiError, Result
from jobs.queue import keys
from jobs.queue.base import chunks, flat
from jobs.queue.batch_records import BatchQueue
from jobs.queue.gauges import Gauges
from jobs.queue.limits import ModelOverloaded, RateLimits, TooManyCalls
from jobs.queue.on_demand import OnDemand
from jobs.queue.registry import Registry
from jobs.queue.scripts import MAX_ITEMS, QueueFull, QueueUnavailable
from jobs.queue.settings import QueueSettings
from jobs.queue.streams import API_ALIVE_SECONDS, Streams

__all__ = ["Queue", "QueueFull", "QueueUnavailable"]

Held = tuple[RequestKey, int]
"""A request and the fence of the lease on it."""

KeyUsage = dict[str, dict[str, int]]
"""Counts by API key id and name: `prompt_tokens`, `completion_tokens`, `device_microseconds`."""

_TENANT_FULL, _MODEL_FULL = -1, -2  # replies of submit.lua

WORKER_LOST = ApiError(
    500, "The request was aborted: too many workers were lost while running it.", "server_error", code="worker_lost"
)


CLAIM_BYTES = 16 * 1024 * 1024
"""Limit in bytes of the requests that one claim returns; the request that reaches it is the last.

As many bytes are reserved for batches beside live calls.
"""


WebhookResult = Literal["delivered", "failed", "abandoned"]
"""Result of an attempt to deliver a webhook; a failed one is retried."""


class TokenTotals(NamedTuple):
    """Output tokens, generated and delivered.

    The difference is in flight, was cancelled, or was recomputed. A worker reports its count with
    every publish and commit, so each published token has been counted. A kill loses only the tokens
    since the last publish: `generated` lacks at most one publish interval's for each kill.
    """

    generated: int
    delivered: int


class Queue(BatchQueue, Streams, Registry, OnDemand, Gauges, RateLimits):
    """The queue in Redis, for API, workers and control plane.

    All methods raise `QueueUnavailable`.
    """

    def __init__(self, client: redis.Redis, settings: QueueSettings | None = None) -> None:
        super().__init__(client, settings)
        self._publishes: dict[str, int] = {}  # by worker: the number of its last one
        self._answered: dict[str, int] = {}  # by worker: the number of the last one that was answered

    def submit(self, live_id: str, request: Request, key_id: str = "") -> int:
        """Submit a live call with the key `RequestKey(live_id, 0)`, and its API key, if any.

        Return the number of the tenant's live calls with this one. A repeated call changes nothing
        and returns 0.

        Raise `TooManyCalls` at the tenant's limit, and `ModelOverloaded` at the model's.

        A call with a `reply_to` ends when no API process of that id is alive and no client watches
        it.
        """
        if not RequestKey(live_id, 0).live:
            raise ValueError(f"a live id starts with live_: {live_id!r}")
        of = self.settings
        tenant = of.live_calls_per_tenant, of.live_bytes_per_tenant
        model = of.live_calls_per_model, of.live_bytes_per_model
        call = [live_id, request.model, pack(request), request.reply_to or ""]
        answer = self._scripts.call("submit", [*call, *tenant, *model, API_ALIVE_SECONDS, key_id])
        if answer == _TENANT_FULL:
            raise TooManyCalls("The tenant has {} live calls or {} bytes of them at once.".format(*tenant))
        if answer == _MODEL_FULL:
            raise ModelOverloaded("The model has {} live calls or {} bytes of them at once.".format(*model))
        return int(answer)

    def claim(
        self,
        worker: str,
        seq: int,
        limit: int,
        *,
        models: list[str],
        live_limit: int | None = None,
        beyond: int = 0,
        served: Collection[str] = (),
    ) -> list[Claim]:
        """Claim up to `limit` requests for one of `models`, live ones first.

        `live_limit` (default `limit`) allows more live calls, and `beyond` further ones, one for
        each tenant whose mark is not in `served`. A claim that stops at `CLAIM_BYTES` wakes the
        worker again.

        A worker that holds nothing may get quarantined requests (`Claim.engine_crashes` above 0),
        and then no others until it holds none of them.

        `seq` rises with every call of a worker. The same number returns the same requests again,
        without those lost since. A smaller number is a late duplicate and returns none.
        """
        if limit <= 0 and not live_limit and not beyond:
            return []
        room = min(limit, MAX_ITEMS)
        live_room = room if live_limit is None else min(max(live_limit, room), MAX_ITEMS)
        settings = [self._lease_ms, self.settings.undrained_bytes, CLAIM_BYTES]
        others = [beyond, " ".join(served)]
        rows = self._scripts.call("claim", [worker, seq, room, live_room, *settings, *others, *models])
        return [_read_claim(row) for row in rows]

    def publish(self, worker: str, deltas: list[Delta], generated: int = 0) -> list[RequestKey]:
        """Append tokens to the requests' streams and to those of the API processes.

        Return the requests that the worker no longer holds: their lease is lost, or they were
        requeued because Redis lost tokens of their stream.

        `generated` is the number of tokens that the worker has generated in its life, here and
        below; the totals count each of them once.
        """
        lost: list[RequestKey] = []
        for group in chunks(map(_delta_row, deltas)):
            arguments = self._publish_arguments(worker, generated, group)
            lost += self.take_publish_reply(worker, self._scripts.call("publish", arguments))
        return lost

    def publish_command(self, worker: str, deltas: list[Delta], generated: int) -> list[Any]:
        """Return the Redis command that publishes a few tokens, for `Publisher`."""
        arguments = self._publish_arguments(worker, generated, map(_delta_row, deltas))
        return self._scripts.command("publish", arguments)

    def take_publish_reply(self, worker: str, reply: Any) -> list[RequestKey]:
        """Return the requests that the worker no longer holds, from the reply to that command."""
        number, lost, missing = reply
        self._answered[worker] = max(self._answered.get(worker, 0), number)
        if missing:
            self._scripts.call("requeue", [worker, 0, *missing])
        return [RequestKey.parse(name) for name in lost]

    def renew(self, worker: str, held: list[Held], generated: int = 0) -> list[RequestKey]:
        """Extend the leases and the worker's registration.

        Return the requests whose lease is lost.
        """
        lost: list[bytes] = []
        for group in list(chunks([str(key), fence] for key, fence in held)) or [[]]:
            known, *more = self._scripts.call(
                "renew", [worker, self._lease_ms, generated, self._digests.get(worker, ""), *flat(group)]
            )
            lost += more
            if not known or worker in self._unwritten:
                self._register_again(worker)
        return [RequestKey.parse(name) for name in lost]

    def commit(self, worker: str, finished: list[Finished], generated: int = 0) -> list[RequestKey]:
        """Store results and end the leases.

        Return the requests that were lost or committed before; nothing changed for them.
        """
        head = [worker, generated, *self._keep]
        return self._each("commit", head, (_finished_arguments(item) for item in finished))

    def requeue(self, worker: str, held: list[Held], cleared: bool = False) -> list[RequestKey]:
        """Put requests back at the head of the queue, without counting an attempt.

        Return those whose lease was lost.

        Quarantined requests go back to quarantine, unless they are `cleared`: they ran in isolation
        without a crash.
        """
        return self._each("requeue", [worker, int(cleared)], ([str(key), fence] for key, fence in reversed(held)))

    def quarantine(self, worker: str, held: list[Held], dead_letter: Result) -> list[RequestKey]:
        """Quarantine the requests that were in flight when the worker's engine core crashed.

        Return those whose lease was lost.

        They run again in groups of 16, then alone, on a worker that runs nothing else; one that
        ran alone ends with the result `dead_letter`.
        """
        head = [worker, pack(dead_letter), *self._keep]
        return self._each("quarantine", head, ([str(key), fence] for key, fence in held))

    def reap(self, worker: str | None = None) -> int:
        """Requeue requests of a dead worker, or of all workers whose leases expired.

        The ticker calls it without a worker once a second. Return the number of requests.

        Without a worker it also stores the time, reaps nothing for one lease after the server was
        down, and orders a worker to requeue its requests if quarantined ones found no idle worker.
        """
        lost = pack(WORKER_LOST.result(""))
        settings = [self._lease_ms, self.settings.worker_deaths, lost, *self._keep, MAX_ITEMS]
        total = 0
        while True:
            count = int(self._scripts.call("reap", [worker or "", *settings]))
            total += count
            if count < MAX_ITEMS:
                return total

    def remove_worker(self, worker: str) -> None:
        """Remove an ended worker from the registry; the requests it still held count as lost."""
        self._forget_record(worker)
        self.reap(worker)

    def cancel(self, requests: list[RequestKey]) -> None:
        """End requests without a result, waiting or running, and notify their workers.

        For live calls; `remove_unfinished` is for batches.
        """
        for group in chunks([str(key)] for key in requests):
            self._scripts.call("cancel", ["requests", 0, *flat(group)])

    def forget_streams(self, calls: list[RequestKey]) -> None:
        """Remove the streams of live calls that ended."""
        for group in chunks([str(key)] for key in calls):
            self._scripts.call("forget", flat(group))

    def token_totals(self) -> TokenTotals:
        """Return the tokens that all workers generated and delivered since Redis was empty."""
        generated, delivered = self._command("HMGET", keys.TOTALS, "generated", "delivered")
        return TokenTotals(int(generated or 0), int(delivered or 0))

    def requests_ended(self) -> int:
        """Return how many live calls and lines ended with a result since Redis was empty."""
        return int(self._command("HGET", keys.TOTALS, "ended") or 0)

    def key_usage(self) -> KeyUsage:
        """Return the usage of API keys."""
        found: KeyUsage = {}
        for field, count in self._command("HGETALL", keys.KEY_USAGE).items():
            key_id, _, name = field.decode().partition(" ")
            found.setdefault(key_id, {})[name] = int(count)
        return found

    def raise_key_usage(self, saved: KeyUsage) -> None:
        """Raise the usage of API keys to the saved values, where it is lower."""
        rows = ([f"{key_id} {name}", count] for key_id, counts in saved.items() for name, count in counts.items())
        for group in chunks(rows):
            self._scripts.call("raise_key_usage", flat(group))

    def count_webhook(self, result: WebhookResult) -> None:
        """Count an attempt to deliver a webhook."""
        self._command("HINCRBY", keys.TOTALS, f"webhooks_{result}", 1)

    def webhook_attempts(self) -> dict[WebhookResult, int]:
        """Return the number of webhook delivery attempts by result, since Redis was empty."""
        results: tuple[WebhookResult, ...] = get_args(WebhookResult)
        counts = self._command("HMGET", keys.TOTALS, *(f"webhooks_{result}" for result in results))
        return {result: int(count or 0) for result, count in zip(results, counts, strict=True)}

    def tokens_in_flight(self) -> int:
        """Return the number of output tokens that unfinished requests have published.

        The next worker of such a request resumes after them.
        """
        with self.redis.pipeline(transaction=False) as pipeline:
            for name in {*self._command("HKEYS", keys.LEASE), *self._command("HKEYS", keys.TRIES)}:
                pipeline.xrevrange(keys.tokens(name.decode()), count=1)
            return sum(int(entry_id.split(b"-")[0]) for entries in pipeline.execute() for entry_id, _ in entries)

    @property
    def _keep(self) -> list[int]:
        return [self.settings.stream_keep_seconds, self.settings.stream_keep_bytes]

    def _publish_arguments(self, worker: str, generated: int, rows: Iterable[list[Any]]) -> list[Any]:
        number = self._publishes[worker] = self._publishes.get(worker, 0) + 1
        # Few arguments: redis-py spends more time on one argument than msgspec on one value.
        *columns, tokens = zip(*rows, strict=True)
        head = [worker, generated, number, self._answered.get(worker, 0)]
        return [*head, msgspec.msgpack.encode(columns), b"".join(tokens)]

    def _each(self, script: str, head: list[Any], rows: Iterable[list[Any]]) -> list[RequestKey]:
        """Call a script that takes one row per request and returns keys, in groups within the size
        limits.
        """
        answers = [self._scripts.call(script, [*head, *flat(group)]) for group in chunks(rows)]
        return [RequestKey.parse(name) for name in flat(answers)]


def _delta_row(delta: Delta) -> list[Any]:
    accepted = delta.system_fingerprint or "1" if delta.accepted else "0"
    before, total, chunks = _tokens(delta)
    # A live call's first message checks that the tokens of earlier workers are there.
    own = before == 0 or delta.continues or (delta.key.live and not delta.accepted)
    return [str(delta.key), str(delta.fence), before, total, len(chunks), delta.reply_to or "", accepted, own, chunks]


def _tokens(delta: Delta) -> list[Any]:
    before = delta.total - sum([len(chunk.token_ids) for chunk in delta.chunks])
    return [before, delta.total, pack(delta.chunks)]


def _finished_arguments(finished: Finished) -> list[Any]:
    tokens = ["", "", ""] if finished.delta is None else _tokens(finished.delta)
    result, usage = finished.result, finished.result.usage
    counts = [usage.prompt_tokens, usage.completion_tokens, usage.device_microseconds]
    end = [int(result.succeeded), *counts, pack(result)]
    return [str(finished.key), finished.fence, *tokens, finished.reply_to or "", *end]


def _read_claim(row: list[Any]) -> Claim:
    name, fence, attempt, body, watched, engine_crashes, published, weight = row
    key = RequestKey.parse(name)
    return Claim(
        key=key,
        fence=fence,
        request=unpack_request(body),
        checkpoint=_read_checkpoint(published),
        attempt=attempt,
        live=key.live,
        watched=bool(watched),
        engine_crashes=engine_crashes,
        weight=float(weight),
    )


def _read_checkpoint(published: list[bytes]) -> RequestCheckpoint | None:
    """Read the checkpoint from the chunks of every entry of the token stream."""
    choices: dict[int, ChoiceCheckpoint] = {}
    for chunk in (chunk for entry in published for chunk in unpack_chunks(entry)):
        choice = choices.setdefault(chunk.choice, ChoiceCheckpoint([], 0, []))
        choice.token_ids += chunk.token_ids
        choice.text_length = chunk.text_offset + len(chunk.text)
        choice.logprobs += chunk.logprobs or []
        choice.cached_tokens += chunk.cached_tokens
    return RequestCheckpoint(choices) if choices else None
