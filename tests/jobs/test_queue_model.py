"""The scripts against a plain model of what they should do, over random interleavings of workers, losses and repeats."""

from dataclasses import dataclass, field

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from jobs import keys
from jobs.queue import Queue
from jobs.requests import Claim, RequestKey
from tests.support.integrity import faults
from tests.support.requests import MODEL, delta, finished, request, start_batch

LINES = 6
BATCHES = ("batch_a", "batch_b")
SLOTS = 3


@dataclass
class Known:
    """What the model knows of one request."""

    waiting: bool = True
    fence: int = 0  # of the lease; 0 when nobody holds it
    worker: str = ""
    attempts: int = 0  # that count
    tokens: list[int] = field(default_factory=list)
    ended: str = ""  # done or cancelled


class QueueModel(RuleBasedStateMachine):
    """Three workers, two batches and live calls. A worker remembers every claim it ever got, as a slow one would."""

    client: redis.Redis  # set by the tests

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.queue = Queue(self.client)
        self.known: dict[RequestKey, Known] = {}
        self.seqs = [0] * SLOTS
        self.lives = [0] * SLOTS
        self.claims: list[list[Claim]] = [[] for _ in range(SLOTS)]  # every one a slot's workers got
        self.last: list[list[RequestKey]] = [[] for _ in range(SLOTS)]
        self.cancelled: set[str] = set()
        self.drained: dict[str, set[int]] = {batch: set() for batch in BATCHES}
        self.submitted = 0

    def name(self, slot: int) -> str:
        return f"w{slot}.{self.lives[slot]}"

    @initialize()
    def make_batches(self) -> None:
        for batch in BATCHES:
            start_batch(self.queue, batch, LINES, tenant=batch)
            self.known |= {RequestKey(batch, line): Known() for line in range(LINES)}

    @rule()
    def submit(self) -> None:
        key = RequestKey(f"live_{self.submitted}", 0)
        self.submitted += 1
        self.queue.submit(key.batch, request())
        self.queue.submit(key.batch, request())
        self.known[key] = Known()

    @rule(slot=st.integers(0, SLOTS - 1), limit=st.integers(1, 5))
    def claim(self, slot: int, limit: int) -> None:
        self.seqs[slot] += 1
        waiting = {key for key, known in self.known.items() if known.waiting and not known.ended}
        claims = self.queue.claim(self.name(slot), self.seqs[slot], limit, models=[MODEL])
        assert len(claims) == min(limit, len(waiting))
        live_first = [claim.live for claim in claims]
        assert live_first.count(True) >= min(limit, sum(key.live for key in waiting)) - 1  # one turn may be the batches'
        for claim in claims:
            known = self.known[claim.key]
            assert claim.key in waiting
            assert claim.fence > max((other.fence for other in self.known.values()), default=0)
            assert claim.attempt == known.attempts + 1
            assert (claim.checkpoint.choices[0].token_ids if claim.checkpoint else []) == known.tokens
            known.waiting, known.fence, known.worker = False, claim.fence, self.name(slot)
            known.attempts += 1
        self.last[slot] = [claim.key for claim in claims]
        self.claims[slot] += claims

    @rule(slot=st.integers(0, SLOTS - 1), back=st.integers(0, 1))
    def claim_again(self, slot: int, back: int) -> None:
        if self.seqs[slot] == 0:
            return
        claims = self.queue.claim(self.name(slot), self.seqs[slot] - back, 5, models=[MODEL])
        if back:
            assert claims == []
            return
        fences = {claim.key: claim.fence for claim in self.claims[slot]}  # the last one of each
        still = [key for key in self.last[slot] if self.known[key].fence == fences[key]]
        assert [claim.key for claim in claims] == still

    def pick(self, data: st.DataObject) -> tuple[str, list[Claim], list[RequestKey]]:
        """A worker, some claims it once got, and which of those it does not hold any more."""
        slot = data.draw(st.integers(0, SLOTS - 1))
        claims = self.claims[slot][-8:]
        chosen = data.draw(st.lists(st.sampled_from(claims), unique_by=lambda claim: claim.key)) if claims else []
        return self.name(slot), chosen, [claim.key for claim in chosen if not self.holds(self.name(slot), claim)]

    def holds(self, worker: str, claim: Claim) -> bool:
        known = self.known[claim.key]
        return (known.worker, known.fence) == (worker, claim.fence)

    @rule(data=st.data(), count=st.integers(1, 3))
    def publish(self, data: st.DataObject, count: int) -> None:
        worker, chosen, lost = self.pick(data)
        deltas = [delta(claim, (at := len(self.known[claim.key].tokens)), list(range(at, at + count)), "x" * count, at) for claim in chosen]
        for _ in range(2):
            assert self.queue.publish(worker, deltas) == lost
        for item in deltas:
            if item.key not in lost:
                self.known[item.key].tokens += item.chunks[0].token_ids

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        worker, chosen, lost = self.pick(data)
        assert self.queue.renew(worker, [(claim.key, claim.fence) for claim in chosen]) == lost

    @rule(data=st.data(), good=st.booleans())
    def commit(self, data: st.DataObject, good: bool) -> None:
        worker, chosen, lost = self.pick(data)
        items = [finished(claim, status=200 if good else 400) for claim in chosen]
        assert self.queue.commit(worker, items) == lost
        for claim in chosen:
            if claim.key not in lost:
                self.end(claim.key, "completed" if good else "failed")
        assert self.queue.commit(worker, items) == [claim.key for claim in chosen]

    @rule(data=st.data())
    def hand_back(self, data: st.DataObject) -> None:
        worker, chosen, lost = self.pick(data)
        answer = self.queue.hand_back(worker, [(claim.key, claim.fence) for claim in chosen])
        assert sorted(answer) == sorted(lost)
        for claim in chosen:
            if claim.key not in lost:
                self.known[claim.key].attempts -= 1
                self.free(claim.key)

    @rule(slot=st.integers(0, SLOTS - 1))
    def worker_dies(self, slot: int) -> None:
        worker = self.name(slot)
        held = [key for key, known in self.known.items() if known.worker == worker]
        assert self.queue.reap(worker) == len(held)
        assert self.queue.reap(worker) == 0
        assert self.queue.claim(worker, self.seqs[slot] + 1, 5, models=[MODEL]) == []
        for key in held:
            self.free(key)
        self.lives[slot] += 1
        self.seqs[slot] = 0
        self.last[slot] = []

    @rule(data=st.data())
    def leases_run_out(self, data: st.DataObject) -> None:
        held = sorted(key for key, known in self.known.items() if known.worker)
        late = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        self.queue.reap()
        self.client.hset(keys.TICK, "reap_after", 0)
        for key in late:
            self.client.zadd(keys.LEASES, {str(key): 1})
        assert self.queue.reap() == len(late)
        for key in late:
            self.free(key)

    @rule(data=st.data())
    def cancel_live(self, data: st.DataObject) -> None:
        live = sorted(key for key, known in self.known.items() if key.live and not known.ended)
        if live:
            key = data.draw(st.sampled_from(live))
            self.queue.cancel([key])
            self.queue.cancel([key])
            self.end(key, "cancelled")

    @precondition(lambda self: len(self.cancelled) < len(BATCHES))
    @rule(data=st.data())
    def cancel_batch(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 7)) > 0:  # seldom, or little else would happen
            return
        batch = data.draw(st.sampled_from([batch for batch in BATCHES if batch not in self.cancelled]))
        assert self.queue.transition(batch, ["in_progress"], "cancelling")
        self.queue.cancel_batch(batch)
        self.cancelled.add(batch)
        for key, known in self.known.items():
            if key.batch == batch and not known.ended:
                self.end(key, "cancelled")

    @rule(batch=st.sampled_from(BATCHES))
    def drain(self, batch: str) -> None:
        there = [line for line, _ in self.queue.results(batch)]
        done = {key.line for key, known in self.known.items() if key.batch == batch and known.ended in ("completed", "failed")}
        assert set(there) == done - self.drained[batch]
        if there:
            part = f"part-{len(self.drained[batch])}"
            assert not self.queue.drained(batch, "other", [*there, LINES])
            for _ in range(2):
                assert self.queue.drained(batch, part, there)
            assert not self.queue.drained(batch, "later", there)
        self.drained[batch] |= set(there)

    def free(self, key: RequestKey) -> None:
        known = self.known[key]
        known.waiting, known.fence, known.worker = True, 0, ""

    def end(self, key: RequestKey, how: str) -> None:
        known = self.known[key]
        known.waiting, known.fence, known.worker, known.ended = False, 0, "", how

    @invariant()
    def keys_agree_with_each_other(self) -> None:
        assert faults(self.client) == []

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        for batch in BATCHES if self.known else ():
            record = self.queue.batch_fields(batch)
            for how in ("completed", "failed"):
                assert int(record[how]) == sum(known.ended == how for key, known in self.known.items() if key.batch == batch)

    def teardown(self) -> None:
        for batch in BATCHES:
            self.queue.forget(batch)
        self.queue.cancel([key for key, known in self.known.items() if key.live and not known.ended])
        staying = {name.decode() for name in self.client.scan_iter() if self.client.ttl(name) < 0}
        assert staying <= keys.PERMANENT | {keys.CREDIT}


def run(client: redis.Redis, examples: int, steps: int) -> None:
    machine = type("Machine", (QueueModel,), {"client": client})
    options = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(machine, settings=options)


def test_queue_does_what_the_model_does(redis_client: redis.Redis) -> None:
    run(redis_client, examples=40, steps=30)


@pytest.mark.proof
@pytest.mark.timeout(1500)
def test_queue_does_what_the_model_does_over_thousands_of_steps(redis_client: redis.Redis) -> None:
    run(redis_client, examples=400, steps=50)
