"""Redis, the network and the clocks break one by one under a whole fleet at work: no process ends,
nothing is lost, nothing runs twice.

Each test looks at the answers of a batch and of a live call that run meanwhile, and counts how
often requests were claimed: the fence moves by one for each claim, so it also counts those that
were made in vain.
"""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import openai
import pytest
import redis

from jobs.batch.client import BatchRecord, BatchSpec, cancel_batch, create_batch, get_batch
from jobs.queue import keys
from tests.pipeline.results import read_results, text_of
from tests.support.fleet import LocalFleet, running_fleet
from tests.support.integrity import faults
from tests.support.processes import cpu_seconds, descendants, send_all

pytestmark = pytest.mark.proof

LINES = 8
TOKENS = 250
# A busy machine may hold a worker up for most of it, and then nothing must have run out
LEASE_SECONDS = 7.0
LONGER_THAN_A_LEASE = 1.3 * LEASE_SECONDS
END_SECONDS = 90


@pytest.fixture(scope="module")
def whole() -> Iterator[LocalFleet]:
    with running_fleet(workers=2, lease_seconds=LEASE_SECONDS, stream_interval=0.2, max_num_seqs=8, api=True) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def undisturbed(whole: LocalFleet) -> list[str]:
    """What the lines of `Work` are answered with; the last is the live call's."""
    work = Work(whole)
    return work.check_end(None)


@pytest.fixture
def fleet(whole: LocalFleet, undisturbed: list[str]) -> Iterator[LocalFleet]:
    """All at work before, and all still there after the test, none of them restarted.

    A test that failed half-way harms no other.
    """
    whole.wait_ready()
    exits = {name: list(codes) for name, codes in whole.exits.items()}
    logged = {name: len(member.log) for name, member in whole.members.items()}
    yield whole
    repair(whole)
    logs = {name: member.log[logged[name] :] for name, member in whole.members.items()}
    assert whole.exits == exits, {name: log[-2000:] for name, log in logs.items()}
    complaints = "".join(log for log in logs.values() if "Traceback" in log)
    assert not complaints, complaints
    assert faults(whole.client) == []


def repair(fleet: LocalFleet) -> None:
    """Undoes what a test has left broken or running that failed half-way; changes nothing after the
    others.
    """
    fleet.redis.repair()
    fleet.client.replicaof("NO", "ONE")
    fleet.client.config_set("maxmemory", 0)
    for proxy in fleet.proxies:
        proxy.lose(0)
        proxy.join()
    for worker in fleet.workers:
        send_all([worker.pid, *descendants(worker.pid)], signal.SIGCONT)
    for batch in fleet.queue.batches():
        cancel_batch(fleet.client, batch)
    fleet.wait(lambda: not fleet.client.exists(keys.LEASES), END_SECONDS, "nothing to be held any more")


class Work:
    """A batch and a live call, all claimed and under way: the API has received its call from the
    worker.

    The cores are stopped until that is so, so that nothing ends before; if they are `held`, until
    `go_on`.
    """

    def __init__(self, fleet: LocalFleet, held: bool = False) -> None:
        self._fleet = fleet
        self.cores = [pid for worker in fleet.workers for pid in worker.below("core_process")]
        send_all(self.cores, signal.SIGSTOP)
        self.claimed_before = fences(fleet)
        folder = fleet.folder / f"work-{time.time_ns()}"
        folder.mkdir()
        source, self._output = folder / "in.jsonl", folder / "out.jsonl"
        source.write_text("".join(json.dumps(line(number)) + "\n" for number in range(LINES)))
        root = fleet.store / "batches" / folder.name
        self._batch = create_batch(
            fleet.client, BatchSpec(input=str(source), root=str(root), output=str(self._output))
        ).id
        self._live = FollowedCall(fleet, question(LINES))
        fleet.wait(lambda: self.claims >= LINES + 1 and self._live.has_begun, END_SECONDS, "all to be under way")
        if not held:
            self.go_on()

    def go_on(self, *but: int) -> None:
        """Lets the cores begin, `but` these processes."""
        send_all([core for core in self.cores if core not in but], signal.SIGCONT)

    @property
    def claims(self) -> int:
        """How many were made since the start."""
        return fences(self._fleet) - self.claimed_before

    @property
    def record(self) -> BatchRecord:
        return get_batch(self._fleet.client, self._batch, retry_seconds=0)

    def has_ended(self) -> bool:
        """Also asked while the record is not rebuilt yet."""
        with contextlib.suppress(KeyError):
            return self.record.ended
        return False

    @property
    def undrained(self) -> int:
        """Bytes of results in Redis."""
        return self._fleet.queue.batch_fields(self._batch).result_bytes

    def check_end(self, answers: list[str] | None) -> list[str]:
        """Waits for the end: every line once and in order, the live call whole, all with the right
        answer.
        """
        self._fleet.wait(self.has_ended, END_SECONDS, "the batch to end")
        self._fleet.wait(lambda: not self._live.is_running, END_SECONDS, "the live call to end")
        record = self.record
        assert (record.state, record.total, record.completed, record.failed) == ("completed", LINES, LINES, 0)
        results = read_results(self._output)
        assert [result["custom_id"] for result in results] == [f"c{number}" for number in range(LINES)]
        texts = [*map(text_of, results), self._live.text]
        assert answers is None or texts == answers
        return texts


class FollowedCall:
    """A streamed call by the official client, in a thread."""

    def __init__(self, fleet: LocalFleet, request: dict[str, Any]) -> None:
        self._url = f"{fleet.api_url}/v1"
        self._request = request
        self._texts: list[str] = []
        self._error: Exception | None = None
        self.has_begun = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def text(self) -> str:
        """All that came. Raises what ended the call."""
        if self._error is not None:
            raise self._error
        return "".join(self._texts)

    def _run(self) -> None:
        try:
            with openai.OpenAI(base_url=self._url, api_key="none", max_retries=0, timeout=END_SECONDS) as client:
                stream = client.chat.completions.create(**self._request, stream=True, extra_body={"ignore_eos": True})
                self.has_begun = True
                for chunk in stream:
                    self._texts.append(chunk.choices[0].delta.content or "")
        except Exception as error:
            self._error = error


def question(number: int) -> dict[str, Any]:
    content = f"Repeat this list in order: one two {number}"
    return {"model": "demo", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": TOKENS}


def line(number: int) -> dict[str, object]:
    return {
        "custom_id": f"c{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {**question(number), "ignore_eos": True},
    }


def fences(fleet: LocalFleet) -> int:
    return int(fleet.client.get(keys.FENCE) or 0)  # type: ignore[arg-type]


def pass_time(fleet: LocalFleet, seconds: float) -> None:
    """Lets an outage last."""
    ends = time.monotonic() + seconds
    fleet.wait(lambda: time.monotonic() > ends, seconds + 5, "the outage to end")


def killed(fleet: LocalFleet, seconds: float) -> None:
    fleet.redis.kill()
    pass_time(fleet, seconds)
    fleet.redis.start()


def stopped(fleet: LocalFleet, seconds: float) -> None:
    fleet.redis.hang()
    pass_time(fleet, seconds)
    fleet.redis.go_on()


def disk_full(fleet: LocalFleet, seconds: float) -> None:
    fleet.redis.fill_disk()
    fleet.wait(partial(refuses_writes, fleet), 60, "writes to be refused")
    pass_time(fleet, seconds)
    fleet.redis.free_disk()


def read_only(fleet: LocalFleet, seconds: float) -> None:
    """As a server that was a master until another took over."""
    fleet.client.replicaof("127.0.0.1", 1)
    assert refuses_writes(fleet)
    pass_time(fleet, seconds)
    fleet.client.replicaof("NO", "ONE")


def loading(fleet: LocalFleet, seconds: float) -> None:
    """A large file, as the server sees it: each key takes its time to load."""
    fleet.client.mset({f"ballast:{number}": number for number in range(1000)})
    fleet.client.bgrewriteaof()
    fleet.wait(lambda: not is_rewriting(fleet), 60, "a file with nothing but the keys")
    delay = int(seconds * 1e6 / fleet.client.dbsize())  # type: ignore[operator]
    fleet.redis.kill()
    fleet.redis.start("--key-load-delay", str(delay), "--loading-process-events-interval-bytes", "1024")
    fleet.client.unlink(*(f"ballast:{number}" for number in range(1000)))


def is_rewriting(fleet: LocalFleet) -> bool:
    about: Any = fleet.client.info("persistence")
    return bool(about["aof_rewrite_scheduled"] or about["aof_rewrite_in_progress"])


def refuses_writes(fleet: LocalFleet) -> bool:
    try:
        fleet.client.set("ballast", 1)
    except redis.ResponseError:
        return True
    return False


OUTAGES = [
    pytest.param(killed, 0.0, id="killed and started again"),
    pytest.param(killed, LONGER_THAN_A_LEASE, id="gone for longer than a lease"),
    pytest.param(stopped, LONGER_THAN_A_LEASE, id="stopped for longer than a lease"),
    pytest.param(disk_full, LONGER_THAN_A_LEASE, id="disk full for longer than a lease"),
    pytest.param(read_only, LONGER_THAN_A_LEASE, id="read-only for longer than a lease"),
    pytest.param(loading, LONGER_THAN_A_LEASE, id="loading for longer than a lease"),
    pytest.param(stopped, 30.0, id="stopped for 30 s"),
]


@pytest.mark.parametrize(("outage", "seconds"), OUTAGES)
def test_an_outage_of_redis_makes_nothing_run_again(
    fleet: LocalFleet, undisturbed: list[str], outage: Callable[[LocalFleet, float], None], seconds: float
) -> None:
    work = Work(fleet)
    outage(fleet, seconds)
    work.check_end(undisturbed)
    assert work.claims == LINES + 1


@pytest.mark.parametrize("whose", ["redis", "workers"])
@pytest.mark.parametrize("seconds", [60.0, -60.0])
def test_a_clock_that_is_set_makes_nothing_run_again(
    fleet: LocalFleet, undisturbed: list[str], whose: str, seconds: float
) -> None:
    work = Work(fleet)
    clocks = [fleet.redis.clock] if whose == "redis" else [fleet.clocks[worker.name] for worker in fleet.workers]
    for clock in clocks:
        clock.step(seconds)
    work.check_end(undisturbed)
    assert work.claims == LINES + 1


def test_a_full_memory_lets_results_through_which_make_room(fleet: LocalFleet, undisturbed: list[str]) -> None:
    work = Work(fleet)
    fleet.client.config_set("maxmemory", 1)
    try:
        assert refuses_writes(fleet)
        fleet.wait(
            lambda: work.record.completed == LINES and not work.undrained, END_SECONDS, "all results to be drained"
        )
    finally:
        fleet.client.config_set("maxmemory", 0)
    work.check_end(undisturbed)
    assert work.claims == LINES + 1


def test_a_redis_that_came_back_empty_gets_all_its_work_again(fleet: LocalFleet, undisturbed: list[str]) -> None:
    work = Work(fleet)
    fleet.redis.lose_everything()
    fleet.redis.start()
    work.check_end(undisturbed)


def test_a_power_loss_takes_back_what_redis_said_and_no_line(fleet: LocalFleet, undisturbed: list[str]) -> None:
    work = Work(fleet)
    on_disk = fleet.redis.on_disk()
    fleet.wait(lambda: work.record.completed > 0, END_SECONDS, "a line that will not be done any more")
    fleet.redis.lose_power(on_disk)
    fleet.redis.start()
    work.check_end(undisturbed)


def test_a_checkpoint_with_a_hole_is_never_used(fleet: LocalFleet, undisturbed: list[str]) -> None:
    """Tokens were published, the server forgot them, and the worker that knows them goes on and
    dies.
    """
    work = Work(fleet)
    on_disk = fleet.redis.on_disk()
    generated = fleet.queue.token_totals().generated
    fleet.wait(lambda: fleet.queue.token_totals().generated > generated + 20 * LINES, END_SECONDS, "tokens")
    fleet.redis.lose_power(on_disk)
    fleet.redis.start()
    generated = fleet.queue.token_totals().generated
    fleet.wait(
        lambda: work.has_ended() or fleet.queue.token_totals().generated > generated + 20 * LINES,
        END_SECONDS,
        "more tokens",
    )
    lives = {worker.id for worker in fleet.queue.workers()}
    send_all(work.cores, signal.SIGKILL)
    work.check_end(undisturbed)
    fleet.wait(
        lambda: lives.isdisjoint(worker.id for worker in fleet.queue.workers()), END_SECONDS, "the deaths to be noticed"
    )


@contextlib.contextmanager
def cut_off(fleet: LocalFleet, number: int) -> Iterator[list[int]]:
    """Nothing gets through between the worker and Redis; no process is stopped."""
    fleet.proxies[number].part()
    try:
        yield []
    finally:
        fleet.proxies[number].join()


@contextlib.contextmanager
def stopped_worker(fleet: LocalFleet, number: int) -> Iterator[list[int]]:
    """The worker does nothing at all; gives its core, which is stopped too and stays so: it must
    have no result when the worker goes on.
    """
    worker = fleet.workers[number]
    send_all([worker.pid], signal.SIGSTOP)
    try:
        yield worker.below("core_process")
    finally:
        send_all([worker.pid], signal.SIGCONT)


@pytest.mark.parametrize("absence", [cut_off, stopped_worker])
def test_a_worker_that_was_away_for_longer_than_its_lease_is_refused(
    fleet: LocalFleet,
    undisturbed: list[str],
    absence: Callable[[LocalFleet, int], contextlib.AbstractContextManager[list[int]]],
) -> None:
    work = Work(fleet, held=True)
    number = holder(fleet)
    let_go = let_go_of(fleet, number)
    with absence(fleet, number) as stopped:
        work.go_on(*stopped)
        fleet.wait(lambda: work.claims > LINES + 1, 60, "its requests to be claimed by the other")
    # One that is only cut off may have finished them all, and has nothing left to let go of.
    if absence is stopped_worker:
        fleet.wait(lambda: let_go_of(fleet, number) > let_go, END_SECONDS, "it to let go of them")
    work.go_on()
    work.check_end(undisturbed)


def let_go_of(fleet: LocalFleet, number: int) -> int:
    """How often the worker dropped requests that another has now."""
    return fleet.workers[number].log.count("their leases expired")


def holder(fleet: LocalFleet) -> int:
    """The worker that holds the most requests."""
    held = {record.pid: int(fleet.client.scard(keys.held(record.id))) for record in fleet.queue.workers()}
    return max(range(len(fleet.workers)), key=lambda number: held.get(fleet.workers[number].pid, 0))


def test_workers_go_on_decoding_while_redis_is_away(fleet: LocalFleet, undisturbed: list[str]) -> None:
    """None of the work is done before Redis is gone, and then at least half of what it costs
    otherwise.
    """
    usual = Work(fleet, held=True)
    begun = spent(usual)
    usual.go_on()
    usual.check_end(undisturbed)
    half = (spent(usual) - begun) / 2
    assert half > 0
    work = Work(fleet, held=True)
    fleet.redis.kill()
    begun = spent(work)
    work.go_on()
    fleet.wait(lambda: spent(work) > begun + half, END_SECONDS, "the cores to go on computing")
    fleet.redis.start()
    work.check_end(undisturbed)
    assert work.claims == LINES + 1


def spent(work: Work) -> float:
    """Processor seconds of all cores."""
    return sum(map(cpu_seconds, work.cores))


@pytest.mark.parametrize("how", ["lose", "swallow"])
def test_lost_replies_make_nothing_run_again(fleet: LocalFleet, undisturbed: list[str], how: str) -> None:
    """A swallowed reply holds its caller up for longer than so short a lease: then what it held
    runs again, and just that.
    """
    work = Work(fleet)
    lost_before = [proxy.lost for proxy in fleet.proxies]
    for proxy in fleet.proxies:
        getattr(proxy, how)(1)
    fleet.wait(
        lambda: all(proxy.lost > before for proxy, before in zip(fleet.proxies, lost_before, strict=True)),
        60,
        "replies to be lost",
    )
    work.check_end(undisturbed)
    assert work.claims == LINES + 1 or how == "swallow"
