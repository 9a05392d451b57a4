"""Many workers at once, with every misfortune that the queue must survive: deaths, stalls,
quarantine, lost replies, a killed server.
"""

import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from jobs.protocol.requests import Claim, RequestKey
from jobs.protocol.results import ApiError
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from jobs.server import PrivateServer
from tests.support.integrity import faults
from tests.support.lossy_proxy import LossyProxy
from tests.support.redis_server import keep_all_that_is_said, kill_and_start
from tests.support.requests import MODEL, delta, finished, held, start_batch
from tests.support.waiting import wait_until

WORKERS = 5
DEAD_LETTER = ApiError(500, "It ended the engine.", "server_error", code="engine_crashed").result("req_1")
SETTINGS = QueueSettings(lease_seconds=0.4, worker_deaths=10_000, redis_retry_seconds=30)


class Race:
    """Threads that behave like workers, a ticker and a broken network, until every line is done."""

    def __init__(self, server: PrivateServer, proxy: LossyProxy, batches: list[str], seed: int) -> None:
        self.server, self.proxy, self.batches, self.seed = server, proxy, batches, seed
        self.over = threading.Event()
        # Commits that the queue accepted, by the replies that their callers got
        self.won: Counter[RequestKey] = Counter()
        self.errors: list[BaseException] = []
        self.lock = threading.Lock()

    def run(self, kills: int, deadline: float) -> None:
        threads = [threading.Thread(target=self.guard, args=(self.work, number)) for number in range(WORKERS)]
        threads += [
            threading.Thread(target=self.guard, args=(self.tick, 0)),
            threading.Thread(target=self.guard, args=(self.lose, 0)),
        ]
        for thread in threads:
            thread.start()
        try:
            dice = random.Random(self.seed)
            for _ in range(kills):
                self.over.wait(dice.uniform(0.3, 0.8))
                kill_and_start(self.server)
            queue = Queue(connect(self.server.url), SETTINGS)
            wait_until(
                lambda: self.errors or all(self.is_done(queue, batch) for batch in self.batches),
                deadline,
                "every line is done",
            )
        finally:
            self.over.set()
            for thread in threads:
                thread.join(60)
        assert self.errors == []

    @staticmethod
    def is_done(queue: Queue, batch: str) -> bool:
        return queue.batch_fields(batch).all_done

    def guard(self, target, number: int) -> None:  # type: ignore[no-untyped-def]
        try:
            target(random.Random(f"{self.seed}/{target.__name__}/{number}"), number)
        except BaseException as error:
            self.errors.append(error)

    def tick(self, dice: random.Random, number: int) -> None:
        queue = Queue(connect(self.server.url), SETTINGS)
        while not self.over.wait(0.05):
            queue.reap()

    def lose(self, dice: random.Random, number: int) -> None:
        """One reply of some, however slowly they come: else none would get through."""
        seen = 0
        while not self.over.wait(dice.uniform(0.005, 0.03)):
            if self.proxy.replies >= seen + 2 * WORKERS:
                seen = self.proxy.replies
                self.proxy.lose(1)

    def work(self, dice: random.Random, number: int) -> None:
        """One worker after another, each with a new name; some die with their requests in hand,
        some stall and commit too late.
        """
        queue = Queue(connect(self.proxy.url), SETTINGS)
        stalled: list[tuple[str, list[Claim]]] = []
        for life in range(1_000_000):
            worker = f"w{number}.{life}"
            for seq in range(1, dice.randint(2, 20)):
                if self.over.is_set():
                    return
                claims = queue.claim(worker, seq, dice.randint(1, 12), models=[MODEL])
                if not claims:
                    self.over.wait(0.02)
                self.decode(queue, worker, claims, dice)
                if not self.settle(queue, worker, claims, stalled, dice.random()):
                    break
            queue.reap(worker)

    def settle(
        self, queue: Queue, worker: str, claims: list[Claim], stalled: list[tuple[str, list[Claim]]], fate: float
    ) -> bool:
        """End the claims in one of the ways that `fate`, from 0 to 1, chooses; False where the
        worker dies with them.
        """
        if fate < 0.1:
            queue.requeue(worker, held(claims))
        elif fate < 0.2:
            stalled.append((worker, claims))
        elif fate < 0.25 and stalled:
            self.commit(queue, *stalled.pop(0))
            queue.requeue(worker, held(claims))
        elif fate < 0.3:
            return False
        elif fate < 0.36:
            queue.quarantine(worker, held(claims), DEAD_LETTER)
        elif claims and claims[0].engine_crashes and fate < 0.7:
            queue.requeue(worker, held(claims), cleared=True)
        else:
            self.commit(queue, worker, claims)
        return True

    def decode(self, queue: Queue, worker: str, claims: list[Claim], dice: random.Random) -> None:
        """What is published goes on from the checkpoint: token i is i."""
        for claim in claims:
            before = claim.checkpoint.choices[0].token_ids if claim.checkpoint else []
            if before != list(range(len(before))):
                raise AssertionError(f"{claim.key} has the checkpoint {before}")
            count = dice.randint(1, 3)
            queue.publish(
                worker,
                [delta(claim, len(before), list(range(len(before), len(before) + count)), "x" * count, len(before))],
            )
        queue.renew(worker, held(claims))

    def commit(self, queue: Queue, worker: str, claims: list[Claim]) -> None:
        lost = queue.commit(worker, [finished(claim, f"{claim.key}") for claim in claims])
        with self.lock:
            self.won.update(claim.key for claim in claims if claim.key not in lost)


def race(folder: Path, seed: int, lines: int, kills: int, deadline: float) -> None:
    batches = ["batch_a", "batch_b"]
    with PrivateServer(folder / "r") as server, LossyProxy(server.url) as proxy:
        # A commit that was accepted and is lost would be accepted again
        keep_all_that_is_said(server)
        client = connect(server.url)
        queue = Queue(client, SETTINGS)
        for batch in batches:
            start_batch(queue, batch, lines, tenant=batch)
        started = time.monotonic()
        contest = Race(server, proxy, batches, seed)
        contest.run(kills, deadline)
        print(
            f"{2 * lines} requests, {proxy.lost} lost replies, {kills} killed servers,"
            f" {time.monotonic() - started:.1f} s"
        )
        assert faults(client) == []
        assert [key for key, count in contest.won.items() if count > 1] == []
        for batch in batches:
            results = queue.results(batch, limit=lines)
            assert [line for line, _ in results] == list(range(lines))
            dead_letter = sum(result == DEAD_LETTER for _, result in results)
            answered = sum(result.body == b'{"text":"%b/%d"}' % (batch.encode(), line) for line, result in results)
            assert (answered, answered + dead_letter) == (queue.batch_fields(batch).completed, lines)
            assert dead_letter < lines / 10
            queue.forget(batch)
        assert proxy.lost > 0


def test_every_request_ends_once(tmp_path: Path, seed: int) -> None:
    race(tmp_path, seed, lines=150, kills=1, deadline=120)


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_every_request_ends_once_over_many_kills(tmp_path: Path, seed: int) -> None:
    race(tmp_path, seed, lines=2000, kills=10, deadline=600)
