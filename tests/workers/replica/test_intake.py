"""How much a worker claims: what its engine can soon use, live calls on top, and more as soon as
there is room.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import pytest

from jobs.protocol.requests import Claim, Finished, Request, RequestKey
from jobs.protocol.results import ApiError
from jobs.queue.request_queue import Queue
from jobs.queue.streams import FIRST_ID
from tests.support.requests import ready_length
from workers.replica.intake import Intake, batch_slots, free_places, is_short, requests_for
from workers.replica.leases import Leases
from workers.replica.metrics import RequestMetrics
from workers.replica.preparation import Preparation
from workers.replica.prepared import PreparedRequest
from workers.replica.running import Load
from workers.replica.sampling_params import ModelLimits
from workers.replica.tokenization import Tokenization, TokenizerAnswers
from workers.settings import DEMO_MODEL
from workers.text.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer.load(DEMO_MODEL)
TENANT = "live_" + 12 * "a"
BODY = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}).encode()


class Collector:
    """Takes the place of the engine: keeps what it is given."""

    def __init__(self) -> None:
        self.taken: list[PreparedRequest] = []
        self.refused: list[Finished] = []
        self.answered: list[Finished] = []

    def load(self) -> Load:
        choices = [(item.claim.live, len(item.prompts) * item.call.best_of) for item in self.taken]
        return Load(
            len(choices),
            sum(count for live, count in choices if not live),
            sum(count for live, count in choices if live),
            live_places=sum(count for live, count in choices if live),
            tenants=Counter(item.claim.key.tenant_mark for item in self.taken if item.claim.live),
        )

    def start(self, prepared: list[PreparedRequest], errors: list[Finished]) -> None:
        self.taken += prepared
        self.refused += errors

    def finish(self, finished: Finished) -> None:
        """Take the place of the outbox."""
        self.answered.append(finished)


@pytest.mark.parametrize(
    ("load", "places", "requests"),
    [
        (Load(), (18, 34), (16, 16)),  # nothing to go by: a first claim
        (Load(requests=10, batch=10), (8, 24), (8, 24)),
        (Load(requests=5, batch=10), (8, 24), (4, 12)),  # of two choices each
        (Load(requests=18, batch=18), (0, 16), (0, 16)),
        (Load(requests=1, batch=40), (-22, 16), (0, 1)),  # too many choices leave the live calls theirs
        (Load(requests=34, batch=18, live=16, live_places=16), (-16, 0), (0, 0)),
        (Load(requests=1, live=64, live_places=8), (-46, 26), (0, 1)),  # a call of many choices stops no other
    ],
)
def test_places_are_shared_and_some_are_for_live_calls(
    load: Load, places: tuple[int, int], requests: tuple[int, int]
) -> None:
    assert free_places(load, 16, 16) == places
    assert tuple(requests_for(free, load) for free in places) == requests


@pytest.mark.parametrize(
    ("load", "slots"),
    [
        (Load(requests=50, batch=50), 256),  # none of them for numbers
        (Load(requests=50, batch=50, pooled_tokens=50 * 8), 256),
        (Load(requests=50, batch=40, live=10, pooled_tokens=50 * 128), 128),  # 16 steps of 1,024 tokens
        (Load(requests=1, batch=2000, pooled_tokens=2000 * 128), 128),
        (Load(requests=4, batch=4, pooled_tokens=4 * 8192), 16),
    ],
)
def test_longer_texts_for_numbers_take_fewer_slots(load: Load, slots: int) -> None:
    assert batch_slots(load, 256, 1024) == slots
    assert free_places(load, 256, slots)[1] == free_places(load, 256, 256)[1]


@pytest.mark.parametrize(
    ("requests", "short"),
    [
        ([("/v1/embeddings", b"x" * 100)], True),
        ([("/v1/embeddings", b"x" * 100), ("/v1/classify", b"x" * 200)], True),
        ([("/v1/embeddings", b"x" * 1500), ("/v1/embeddings", b"x" * 1500)], False),
        ([("/v1/embeddings", b'"x",' * 200)], False),
        ([("/v1/rerank", b"x" * 100)], False),  # each document comes with the query
        ([("/v1/embeddings", b"x" * 100), ("/v1/chat/completions", b"x" * 100)], False),  # a template renders it
    ],
)
def test_a_few_short_texts_for_numbers_need_no_thread(requests: list[tuple[str, bytes]], short: bool) -> None:
    claims = [
        Claim(RequestKey("live_a", 0), 1, Request(url, "m", body, seed=1), None, 1, live=True) for url, body in requests
    ]
    assert is_short(claims) == short


def add_lines(queue: Queue, batch: str, count: int, body: bytes = BODY) -> None:
    queue.create_batch(batch, count, state="in_progress")
    for first in range(0, count, 500):
        lines = range(first, min(count, first + 500))
        assert queue.ingest(
            batch, [(line, Request("/v1/chat/completions", "demo", body, line)) for line in lines], first, lines.stop
        )


def with_intake(
    queue: Queue, max_num_seqs: int, scenario: Callable[[Intake, Collector, Leases], Awaitable[None]]
) -> None:
    async def run() -> None:
        collector = Collector()
        leases = Leases(queue, "worker", 30.0, lambda: 0, lambda lost: None)
        limits = ModelLimits(2048, 1024)
        preparation, answers = (kind(TOKENIZER, ["demo"], limits) for kind in (Preparation, TokenizerAnswers))
        tokenization = Tokenization(answers, collector, RequestMetrics())
        prepare = preparation.prepare
        intake = Intake(queue, "worker", ["demo"], max_num_seqs, 1024, leases, prepare, tokenization, collector.load)
        task = asyncio.create_task(intake.run(collector.start))
        try:
            await scenario(intake, collector, leases)
        finally:
            task.cancel()
            intake.close()

    asyncio.run(run())


async def until(condition: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, what
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(("max_num_seqs", "lines"), [(16, 60), (600, 1500)])
def test_claims_slots_and_a_little_more(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, lines: int
) -> None:
    """Full claims follow each other: none waits until an idle worker would look again."""
    monkeypatch.setattr("workers.replica.intake.LOOK_SECONDS", 600.0)
    room = max_num_seqs + max_num_seqs // 8
    add_lines(queue, "batch_a", lines)

    async def scenario(intake: Intake, collector: Collector, leases: Leases) -> None:
        await until(lambda: len(collector.taken) >= room, "a full house")
        assert len(collector.taken) == room
        assert [item.claim.key.line for item in collector.taken] == list(range(room))
        assert ready_length(queue, "batch_a") == lines - room
        assert len(leases.all()) == room
        done = collector.taken[: room // 2]
        del collector.taken[: room // 2]
        intake.room_made()
        await until(lambda: len(collector.taken) == min(room, lines - len(done)), "the freed slots to be used")

    with_intake(queue, max_num_seqs, scenario)


def test_more_lines_wait_until_a_claim_is_not_full(queue: Queue) -> None:
    add_lines(queue, "batch_a", 20)

    async def scenario(intake: Intake, collector: Collector, leases: Leases) -> None:
        assert not intake.has_backlog
        await until(lambda: len(collector.taken) == 18, "a full house")
        assert intake.has_backlog
        collector.taken.clear()
        intake.room_made()
        await until(lambda: len(collector.taken) == 2, "the rest")
        assert not intake.has_backlog

    with_intake(queue, 16, scenario)


def test_so_many_wait_beside_the_engine_and_no_more(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that wait for an answer have no slot, but leases, which bound them; live calls get in
    none the less.
    """
    monkeypatch.setattr("workers.replica.intake.LOOK_SECONDS", 600.0)
    monkeypatch.setattr("workers.replica.intake._MOST_BESIDE", 40)
    monkeypatch.setattr(Collector, "load", lambda collector: Load(1, 1))
    add_lines(queue, "batch_a", 100)

    async def scenario(intake: Intake, collector: Collector, leases: Leases) -> None:
        await until(lambda: len(collector.taken) == 41, "one that runs and all that may wait")
        queue.submit("live_1", Request("/v1/chat/completions", "demo", BODY, 1, reply_to="api"))
        intake.wake()
        await until(lambda: len(collector.taken) == 42, "the live call")
        assert ready_length(queue, "batch_a") == 59
        leases.drop(leases.all()[1:11])
        intake.room_made()
        await until(lambda: len(collector.taken) == 51, "as many as were answered, but for the live call's place")
        assert len(leases.all()) == 41

    with_intake(queue, 16, scenario)


def test_live_calls_get_in_when_all_is_full(queue: Queue) -> None:
    add_lines(queue, "batch_a", 60)

    async def scenario(intake: Intake, collector: Collector, leases: Leases) -> None:
        await until(lambda: len(collector.taken) == 18, "a full house")
        queue.submit("live_1", Request("/v1/chat/completions", "demo", BODY, 1, reply_to="api"))
        intake.wake()
        await until(lambda: len(collector.taken) == 19, "the live call")
        assert collector.taken[-1].claim.key == RequestKey("live_1", 0)
        assert ready_length(queue, "batch_a") == 42

    with_intake(queue, 16, scenario)


def test_a_live_call_that_finds_no_place_gets_the_next_one(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when an idle worker would look again."""
    monkeypatch.setattr("workers.replica.intake.LOOK_SECONDS", 600.0)

    async def scenario(intake: Intake, collector: Collector, leases: Leases) -> None:
        for count in range(1, 6):  # for four there are places
            queue.submit(f"{TENANT}{count}", Request("/v1/chat/completions", "demo", BODY, 1, reply_to="api"))
            intake.wake()
            await until(lambda taken=min(count, 4): len(collector.taken) == taken, "the live call")
        for _ in range(5):  # turns of the loop, in which it finds no place
            await asyncio.sleep(0)
        del collector.taken[0]
        intake.room_made()
        await until(lambda: len(collector.taken) == 4, "the last live call")

    with_intake(queue, 1, scenario)


def test_other_tenants_find_a_place_where_one_has_taken_all(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two each, which is half of their share of 16 slots; the first one gets no more."""
    monkeypatch.setattr("workers.replica.intake.LOOK_SECONDS", 600.0)

    def submit(tenant: str, count: int) -> None:
        for number in range(count):
            queue.submit(f"{tenant}{number}", Request("/v1/chat/completions", "demo", BODY, 1, reply_to="api"))

    async def scenario(intake: Intake, collector: Collector, leases: Leases) -> None:
        submit(TENANT, 60)
        intake.wake()
        await until(lambda: len(collector.taken) == 34, "all places to be taken")
        for letter in "bc":
            submit("live_" + 12 * letter, 2)
        intake.wake()
        await until(lambda: len(collector.taken) == 38, "the calls of the others")
        assert collector.load().tenants == {12 * "a": 34, 12 * "b": 2, 12 * "c": 2}

    with_intake(queue, 16, scenario)


def test_requests_of_many_choices_take_as_many_places(queue: Queue) -> None:
    """64 places and 8 spare ones; what requests are like shows with the first ones.

    Live calls get in beside too many choices.
    """
    add_lines(queue, "batch_a", 60, json.dumps({**json.loads(BODY), "n": 4}).encode())

    async def scenario(intake: Intake, collector: Collector, leases: Leases) -> None:
        await until(lambda: len(collector.taken) >= 18, "a full house")
        assert len(collector.taken) == 18
        queue.submit("live_1", Request("/v1/chat/completions", "demo", BODY, 1, reply_to="api"))
        intake.wake()
        await until(lambda: len(collector.taken) == 19, "the live call")
        assert collector.taken[-1].claim.live
        assert ready_length(queue, "batch_a") == 42

    with_intake(queue, 64, scenario)


def test_a_paused_intake_claims_nothing(queue: Queue) -> None:
    async def scenario(intake: Intake, collector: Collector, leases: Leases) -> None:
        await intake.pause()
        add_lines(queue, "batch_a", 5)
        for _ in range(3):
            intake.wake()
            await asyncio.sleep(0.02)  # time for a claim that must not come
        assert ready_length(queue, "batch_a") == 5
        intake.resume()
        await until(lambda: len(collector.taken) == 5, "the claims of a resumed intake")

    with_intake(queue, 16, scenario)


def test_what_cannot_run_comes_back_as_an_error(queue: Queue) -> None:
    queue.create_batch("batch_a", 1, state="in_progress")
    queue.ingest("batch_a", [(0, Request("/v1/chat/completions", "demo", b"{}", 0))], 0, 1)

    async def scenario(intake: Intake, collector: Collector, leases: Leases) -> None:
        await until(lambda: len(collector.refused) == 1, "the error")
        assert collector.refused[0].result.status == 400
        assert collector.taken == []

    with_intake(queue, 16, scenario)


@pytest.fixture
def held_preparation(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The first event is set once requests are to be prepared; they are, once the second one is."""
    preparing, go_on = threading.Event(), threading.Event()

    def prepare(self: Preparation, claims: list[Claim]) -> tuple[list[PreparedRequest], list[Finished]]:
        preparing.set()
        assert go_on.wait(60)
        return real_prepare(self, claims)

    real_prepare = Preparation.prepare
    monkeypatch.setattr(Preparation, "prepare", prepare)
    yield preparing, go_on
    go_on.set()


def test_a_claim_whose_lease_is_lost_while_it_is_prepared_is_dropped(
    queue: Queue, held_preparation: tuple[threading.Event, threading.Event]
) -> None:
    """Another worker has it by then; this one would compute it too. So with what cannot run."""
    add_lines(queue, "batch_a", 2)
    add_lines(queue, "batch_b", 2, b"{}")
    preparing, go_on = held_preparation

    async def scenario(intake: Intake, collector: Collector, leases: Leases) -> None:
        assert await asyncio.to_thread(preparing.wait, 60)
        lost = [(key, fence) for key, fence in leases.all() if key.line == 0]
        assert len(lost) == 2
        queue.requeue("worker", lost)
        again = queue.claim("other", 1, 2, models=["demo"])
        assert queue.renew("worker", leases.all(), 0) == [key for key, _ in lost]
        leases.drop(lost)
        go_on.set()
        await until(lambda: len(collector.taken) + len(collector.refused) == 2, "what is still held")
        assert [item.claim.key for item in collector.taken] == [RequestKey("batch_a", 1)]
        assert [finished.key for finished in collector.refused] == [RequestKey("batch_b", 1)]
        assert {claim.key for claim in again} == {key for key, _ in lost}

    with_intake(queue, 16, scenario)


def test_a_claim_that_is_cancelled_while_it_is_prepared_is_dropped(
    queue: Queue, held_preparation: tuple[threading.Event, threading.Event]
) -> None:
    """A batch is cancelled by its name, a live call by its own."""
    add_lines(queue, "batch_a", 3)
    add_lines(queue, "batch_b", 1)
    for call in ("live_1", "live_2"):
        queue.submit(call, Request("/v1/chat/completions", "demo", BODY, 1, reply_to="api"))
    preparing, go_on = held_preparation

    async def scenario(intake: Intake, collector: Collector, leases: Leases) -> None:
        assert await asyncio.to_thread(preparing.wait, 60)
        queue.remove_unfinished("batch_a")
        queue.cancel([RequestKey("live_1", 0)])
        orders = [order for order in queue.control_messages("worker", FIRST_ID, 5) if order.kind == "cancel"]
        assert len(orders) == 2
        for order in orders:
            leases.drop(leases.named(order))
        go_on.set()
        await until(lambda: bool(collector.taken), "what is still held")
        assert {str(item.claim.key) for item in collector.taken} == {"batch_b/0", "live_2/0"}

    with_intake(queue, 16, scenario)


def test_beside_quarantined_requests_nothing_is_claimed_until_they_are_released(queue: Queue) -> None:
    add_lines(queue, "batch_a", 1)
    crashed = [(claim.key, claim.fence) for claim in queue.claim("crashed", 1, 1, models=["demo"])]
    queue.quarantine("crashed", crashed, ApiError(500, "given up").result("req_1"))

    async def scenario(intake: Intake, collector: Collector, leases: Leases) -> None:
        await until(lambda: len(collector.taken) == 1, "the quarantined request")
        add_lines(queue, "batch_b", 1)
        await intake.pause()
        intake.resume()
        intake.wake()
        assert intake.isolated
        queue.requeue("worker", leases.all(), cleared=True)
        collector.taken.clear()
        intake.end_isolation()
        await until(lambda: len(collector.taken) == 2, "both requests")
        assert not intake.isolated

    with_intake(queue, 16, scenario)
