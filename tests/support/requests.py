"""Small requests, deltas and results for tests of the queue."""

import redis

from jobs.protocol.requests import Claim, Delta, Finished, Request, RequestKey, StreamEntry, TokenChunk
from jobs.protocol.results import Result, Usage
from jobs.queue import keys
from jobs.queue.base import text
from jobs.queue.request_queue import Queue
from jobs.queue.streams import FIRST_ID, ApiItem, parse_api_entry

MODEL = "m"


def request(model: str = MODEL, body: bytes = b'{"prompt":"x"}', reply_to: str | None = None) -> Request:
    return Request("/v1/completions", model, body, seed=7, reply_to=reply_to)


def start_batch(queue: Queue, batch: str, lines: int, *, tenant: str = "", model: str = MODEL, first: int = 0) -> None:
    """A batch in progress whose lines `first`.. are all ready."""
    assert queue.create_batch(batch, lines, tenant=tenant, state="in_progress")
    for start in range(0, lines, 500):
        end = min(lines, start + 500)
        assert queue.ingest(batch, [(first + line, request(model)) for line in range(start, end)], start, end)


def delta(
    claim: Claim, index: int, token_ids: list[int], text: str = "", offset: int = 0, accepted: bool = False
) -> Delta:
    """The next tokens of a request with one choice."""
    chunks = [TokenChunk(0, index, token_ids, text, offset)] if token_ids or text else []
    return Delta(claim.key, claim.fence, index + len(token_ids), chunks, claim.request.reply_to, accepted)


def finished(claim: Claim, text: str = "done", status: int = 200, last: Delta | None = None) -> Finished:
    body = b'{"text":"%b"}' % text.encode() if status < 400 else b'{"error":{"message":"%b"}}' % text.encode()
    return Finished(claim.key, claim.fence, Result(status, body, Usage(3, 5, 0), "req_1"), last, claim.request.reply_to)


def pass_time(client: redis.Redis, seconds: float) -> None:
    """Brings the ends of leases and of workers' records so much nearer, as if the time had passed
    and the ticker had run meanwhile.
    """
    for name in (keys.LEASES, keys.ALIVE):
        for member in client.zrange(name, 0, -1):  # type: ignore[union-attr]
            client.zincrby(name, -1000 * seconds, member)
    client.hincrby(keys.TICK, "reap_after", int(-1000 * seconds))


def held(claims: list[Claim]) -> list[tuple]:
    return [(claim.key, claim.fence) for claim in claims]


def lines(claims: list[Claim]) -> list[int]:
    return [claim.key.line for claim in claims]


def text_in(entry: StreamEntry, choice: int = 0) -> str:
    """What it adds to the text of one choice."""
    return "".join(chunk.text for chunk in entry.chunks if chunk.choice == choice)


def token_ids_in(entry: StreamEntry, choice: int = 0) -> list[int]:
    """What it adds to the tokens of one choice."""
    return [token_id for chunk in entry.chunks if chunk.choice == choice for token_id in chunk.token_ids]


def ready_length(queue: Queue, batch: str) -> int:
    """Lines that wait for a worker."""
    models = queue.redis.smembers(keys.batch_models(batch))
    return sum(queue.redis.llen(keys.ready(batch, model.decode())) for model in models)


def read_api(queue: Queue, api_id: str, last_id: str = FIRST_ID, block: int | None = None) -> list[tuple]:
    """What came for an API process after `last_id`, as (id in its stream, entry); waits up to
    `block` milliseconds for it.
    """
    found = queue.redis.xread({keys.api(api_id): last_id}, block=block)
    return [
        (text(entry_id), _whole(queue, item))
        for _, entries in found
        for entry_id, fields in entries
        for item in parse_api_entry(fields)
    ]


def _whole(queue: Queue, item: ApiItem) -> StreamEntry:
    """A large one is in the request's own stream only."""
    key = RequestKey.parse(item.name)
    return item.entry(key) or queue.read_ranges([(key, item.entry_id, item.entry_id)])[0][0]
