"""A worker without an engine, for the benchmark of the control plane: it claims, renews, publishes
and commits as a replica does, and answers at once.

    python -m benchmarks.null_worker --redis-url unix:///run/redis.sock

It prints the id of each batch with the unix time of its first claim.
"""

import argparse
import os
import socket
import threading
import time
import uuid

from jobs.process import add_redis_url, die_with_parent
from jobs.protocol.endpoint import AnswerHead
from jobs.protocol.endpoints import ENDPOINTS
from jobs.protocol.requests import Claim, Delta, Finished, TokenChunk
from jobs.protocol.results import Choice, Result, Usage, encode_json
from jobs.queue.connection import connect
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Held, Queue
from jobs.queue.streams import FIRST_ID

MODEL = "null"
_TOKENS = list(range(16))
_TEXT = " an answer of sixteen tokens, which no engine has computed for anyone"
_USAGE = Usage(40, len(_TOKENS))
_LISTEN_SECONDS = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_redis_url(parser)
    parser.add_argument("--claim", type=int, default=500, help="most requests of one claim")
    parser.add_argument(
        "--publish", action="store_true", help="publish each request's tokens before its result, as for a reader"
    )
    args = parser.parse_args()
    die_with_parent()
    NullWorker(Queue(connect(args.redis_url)), args.claim, args.publish).run()


class NullWorker:
    """One worker of `MODEL`, until it is killed."""

    def __init__(self, queue: Queue, claim: int, publish: bool) -> None:
        self._queue = queue
        self._claim = claim
        self._publish = publish
        self._name = f"null-{uuid.uuid4().hex}"
        self._held: list[Held] = []
        self._generated = 0
        self._seen: set[str] = set()

    def run(self) -> None:
        """Claim and answer requests until the process is killed."""
        record = WorkerRecord(self._name, [MODEL], "ready", 4096, time.time(), socket.gethostname(), os.getpid())
        self._queue.register_worker(record)
        threading.Thread(target=self._renew, name="leases", daemon=True).start()
        last_id, seq = FIRST_ID, 0
        while True:
            seq += 1
            claims = self._queue.claim(self._name, seq, self._claim, models=[MODEL])
            if claims:
                self._answer(claims)
                continue
            if messages := self._queue.control_messages(self._name, last_id, _LISTEN_SECONDS):
                last_id = messages[-1].id

    def _answer(self, claims: list[Claim]) -> None:
        self._held = [(claim.key, claim.fence) for claim in claims]
        self._note_first(claims)
        deltas = [_delta(claim) for claim in claims]
        self._generated += len(_TOKENS) * len(claims)
        if self._publish:
            self._queue.publish(self._name, deltas, self._generated)
        finished = [
            Finished(claim.key, claim.fence, _result(claim), None if self._publish else delta, claim.request.reply_to)
            for claim, delta in zip(claims, deltas, strict=True)
        ]
        self._queue.commit(self._name, finished, self._generated)
        self._held = []

    def _note_first(self, claims: list[Claim]) -> None:
        for batch in {claim.key.batch for claim in claims} - self._seen:
            self._seen.add(batch)
            print(batch, time.time(), flush=True)

    def _renew(self) -> None:
        while True:
            time.sleep(self._queue.settings.lease_seconds / 4)
            self._queue.renew(self._name, self._held, self._generated)


def _delta(claim: Claim) -> Delta:
    return Delta(claim.key, claim.fence, len(_TOKENS), [TokenChunk(0, 0, _TOKENS, _TEXT, 0)], claim.request.reply_to)


def _result(claim: Claim) -> Result:
    endpoint = ENDPOINTS[claim.request.endpoint]
    head = AnswerHead(f"{endpoint.id_prefix}{claim.key.line}", MODEL, 1)
    answer = endpoint.body(head, [Choice(0, _TEXT, "length")], _USAGE)
    return Result(200, encode_json(answer), _USAGE, f"req_{claim.key.line}")


if __name__ == "__main__":
    main()
