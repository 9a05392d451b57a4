"""The scripts against a plain model of what they should do, over random interleavings of workers,
losses, engine_crashes, repeats and a Redis that goes back.

Any script call may be repeated at once, as after a lost reply, or much later, as by a network that
held it up: neither may change anything.
"""

import copy
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jobs.protocol.requests import Claim, Delta, RequestKey, TokenChunk
from jobs.protocol.results import ApiError, PositionLogprobs, TokenLogprob
from jobs.queue import keys
from jobs.queue.limits import ModelOverloaded, TooManyCalls
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import Scripts
from jobs.queue.settings import QueueSettings
from tests.support.dump import Dump
from tests.support.integrity import faults
from tests.support.requests import MODEL, finished, held, request, start_batch
from tests.support.rollback import EarlierRedis

LINES = 12
TENANTS = 3
MOST_OF_TENANT, MOST_LIVE = 5, 9
BATCHES = ("batch_a", "batch_b")
SLOTS = 3
CHOICES = 3
TOGETHER = 16  # quarantined requests that run together
ANSWER_TOKENS = 5  # of `finished`
DEAD_LETTER = ApiError(500, "It ended the engine.", "server_error", code="engine_crashed").result("req_1")
FENCED = ("claim", "publish", "renew", "commit", "requeue", "quarantine", "drained", "transition", "ingest", "restore")
# What the model knows that Redis knows too: lost when it goes back
IN_REDIS = ("known", "groups", "seqs", "lives", "claims", "last", "cancelled", "drained", "counts", "delivered")


@dataclass
class Known:
    """What the model knows of one request."""

    waiting: bool = True  # for anyone, in its list
    fence: int = 0  # of the lease; 0 when no worker holds it
    worker: str = ""
    attempts: int = 0  # that count
    engine_crashes: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by choice
    ended: str = ""  # completed, failed or cancelled

    @property
    def total(self) -> int:
        return sum(map(len, self.tokens.values()))


class RepeatingScripts(Scripts):
    """Runs calls again at random, and sees to it that this changes nothing."""

    def __init__(self, client: redis.Redis, dice: random.Random) -> None:
        super().__init__(client, 0)
        self._redis = client
        self._dice = dice
        self._sent: list[tuple[str, list[Any]]] = []

    def call(self, name: str, arguments: list[Any]) -> Any:
        answer = super().call(name, arguments)
        if self._dice.random() < 0.3:
            repeated = self._changes_nothing(name, arguments)
            if name in ("claim", "publish", "renew", "drained", "transition", "ingest", "restore"):
                assert repeated == answer, name
        if name in FENCED:
            self._sent.append((name, arguments))
        return answer

    def forget(self) -> None:
        """Calls to a server that has gone back are no repeats."""
        self._sent.clear()

    def late_duplicate(self) -> None:
        if self._sent:
            self._changes_nothing(*self._dice.choice(self._sent[-40:]))

    def _changes_nothing(self, name: str, arguments: list[Any]) -> Any:
        before = Dump(self._redis).comparable()
        repeated = super().call(name, arguments)
        assert Dump(self._redis).comparable() == before, f"{name} changed something when it was repeated: {arguments}"
        return repeated


class QueueModel(RuleBasedStateMachine):
    """Three workers, two batches and live calls.

    A worker remembers every claim it ever got, as a slow one would.
    """

    client: redis.Redis  # set by the tests

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        limits = QueueSettings(live_calls_per_tenant=MOST_OF_TENANT, live_calls_per_model=MOST_LIVE)
        self.queue = Queue(self.client, limits)
        self.apis = 1  # so many there were; the last one lives
        self.known: dict[RequestKey, Known] = {}
        self.groups: list[list[RequestKey]] = []  # of quarantined requests, the oldest first
        self.seqs = [0] * SLOTS
        self.lives = [0] * SLOTS
        # Every one a slot's workers got
        self.claims: list[list[Claim]] = [[] for _ in range(SLOTS)]
        self.last: list[list[RequestKey]] = [[] for _ in range(SLOTS)]
        self.cancelled: set[str] = set()
        self.drained: dict[str, set[int]] = {batch: set() for batch in BATCHES}
        # Whether it succeeded, of each line that a part holds
        self.on_disk: dict[str, dict[int, bool]] = {batch: {} for batch in BATCHES}
        self.moment: tuple[EarlierRedis, dict[str, Any]] | None = None
        self.submitted = 0
        self.counts: dict[str, int] = {}  # tokens that a worker says it generated
        self.delivered = 0

    def name(self, slot: int) -> str:
        return f"w{slot}.{self.lives[slot]}"

    def held_by(self, worker: str) -> list[RequestKey]:
        """In the order of their fences."""
        return sorted(
            (key for key, known in self.known.items() if known.worker == worker), key=lambda key: self.known[key].fence
        )

    @initialize(dice=st.randoms(use_true_random=False))
    def make_batches(self, dice: random.Random) -> None:
        self.scripts = self.queue._scripts = RepeatingScripts(self.client, dice)
        for slot in range(SLOTS):
            self.register(slot)
        for batch in BATCHES:
            start_batch(self.queue, batch, LINES, tenant=batch)
            self.known |= {RequestKey(batch, line): Known() for line in range(LINES)}

    def register(self, slot: int) -> None:
        self.queue.register_worker(WorkerRecord(self.name(slot), [MODEL], "ready", 100, 1.0, "host", 1))

    @rule()
    def late_duplicate(self) -> None:
        self.scripts.late_duplicate()

    @rule(tenant=st.integers(0, TENANTS - 1))
    def submit(self, tenant: int) -> None:
        self.submit_call(tenant)

    def submit_call(self, tenant: int) -> None:
        """A call that its tenant may have, or that is refused and leaves nothing."""
        key = RequestKey(f"{live_id_of(tenant)}{self.submitted}", 0)
        self.submitted += 1
        of_tenant = [live for live in self.live_calls() if live.batch.startswith(live_id_of(tenant))]
        call = request(reply_to=f"api{self.apis}")
        if len(of_tenant) < MOST_OF_TENANT and len(self.live_calls()) < MOST_LIVE:
            self.queue.submit(key.batch, call)
            self.known[key] = Known()
            return
        with pytest.raises(TooManyCalls if len(of_tenant) == MOST_OF_TENANT else ModelOverloaded):
            self.queue.submit(key.batch, call)

    def live_calls(self) -> list[RequestKey]:
        return [key for key, known in self.known.items() if key.live and not known.ended]

    @rule(data=st.data())
    def api_dies(self, data: st.DataObject) -> None:
        """Its calls end, wherever they are, but for one that a client reads elsewhere."""
        if data.draw(st.integers(0, 3)) > 0:
            return
        calls = sorted(self.live_calls())
        watched = [data.draw(st.sampled_from(calls))] if calls else []
        for key in watched:
            Queue(self.client).watch(key, 60)  # a repeat of which repeats its order
        self.client.delete(*(keys.api_alive(f"api{number}") for number in range(self.apis + 1)))
        self.apis += 1
        self.queue.reap()
        self.client.hset(keys.TICK, "reap_after", 0)
        assert self.queue.reap() == 0
        for key in {*calls} - {RequestKey.parse(name) for name in self.client.zrange(keys.WATCHED, 0, -1)}:
            self.end(key, "cancelled")

    @precondition(lambda self: self.groups or any(known.waiting for known in self.known.values()))
    @rule(slot=st.integers(0, SLOTS - 1), limit=st.integers(1, 2 * LINES))
    def claim(self, slot: int, limit: int) -> None:
        self.take(slot, limit)

    def take(self, slot: int, limit: int) -> None:
        worker = self.name(slot)
        self.seqs[slot] += 1
        holding = self.held_by(worker)
        claims = self.queue.claim(worker, self.seqs[slot], limit, models=[MODEL])
        if any(self.known[key].engine_crashes for key in holding):
            assert claims == []
        elif self.groups and not holding:
            group = self.groups[0]
            assert [claim.key for claim in claims] == sorted(group, key=str)[:limit]
            self.groups[0] = [key for key in group if key not in {claim.key for claim in claims}]
            self.groups = [group for group in self.groups if group]
        else:
            self.check_turns(claims, limit)
        newest = max((known.fence for known in self.known.values()), default=0)
        for claim in claims:
            known = self.known[claim.key]
            assert claim.fence > newest
            assert (claim.attempt, claim.engine_crashes) == (known.attempts + 1, known.engine_crashes)
            self.check_checkpoint(claim)
            known.waiting, known.fence, known.worker = False, claim.fence, worker
            known.attempts += 1
        self.last[slot] = [claim.key for claim in claims]
        self.claims[slot] += claims

    def check_turns(self, claims: list[Claim], limit: int) -> None:
        waiting = {key for key, known in self.known.items() if known.waiting}
        assert {claim.key for claim in claims} <= waiting
        assert len(claims) == min(limit, len(waiting))
        live = sum(claim.live for claim in claims)
        kept = 1 + limit // 10  # for the batches
        assert live >= min(limit, sum(key.live for key in waiting)) - kept

    def check_checkpoint(self, claim: Claim) -> None:
        choices = claim.checkpoint.choices if claim.checkpoint else {}
        assert {choice: part.token_ids for choice, part in choices.items()} == self.known[claim.key].tokens
        for choice, part in choices.items():
            assert part.text_length == len(part.token_ids)
            assert [position.chosen.token_id for position in part.logprobs] == (part.token_ids if choice == 0 else [])

    @precondition(lambda self: any(self.seqs))
    @rule(data=st.data(), back=st.integers(0, 1))
    def claim_again(self, data: st.DataObject, back: int) -> None:
        slot = data.draw(st.sampled_from([slot for slot in range(SLOTS) if self.seqs[slot]]))
        claims = self.queue.claim(self.name(slot), self.seqs[slot] - back, 5, models=[MODEL])
        if back:
            assert claims == []
            return
        fences = {claim.key: claim.fence for claim in self.claims[slot]}  # the last one of each
        still = [key for key in self.last[slot] if self.known[key].fence == fences[key]]
        assert [claim.key for claim in claims] == still

    def pick(self, data: st.DataObject) -> tuple[str, list[Claim], list[RequestKey]]:
        """A worker, all that it holds or some claims it once got, and which of those it does not
        hold any more.
        """
        slot = data.draw(st.sampled_from([slot for slot in range(SLOTS) if self.claims[slot]]))
        worker, claims = self.name(slot), self.claims[slot]
        chosen = [claim for claim in claims if self.holds(worker, claim)]
        if not chosen or data.draw(st.integers(0, 2)) == 0:
            chosen = data.draw(st.lists(st.sampled_from(claims), unique_by=lambda claim: claim.key, max_size=8))
        return worker, chosen, [claim.key for claim in chosen if not self.holds(worker, claim)]

    def holds(self, worker: str, claim: Claim) -> bool:
        known = self.known[claim.key]
        return (known.worker, known.fence) == (worker, claim.fence)

    @precondition(lambda self: any(self.claims))
    @rule(
        data=st.data(),
        count=st.integers(1, 3),
        choices=st.sets(st.integers(0, CHOICES - 1), min_size=1),
        generated=st.integers(-5, 9),
    )
    def publish(self, data: st.DataObject, count: int, choices: set[int], generated: int) -> None:
        """Tokens of some choices; those of the first one with their log probabilities."""
        worker, chosen, lost = self.pick(data)
        deltas = []
        for claim in chosen:
            known = self.known[claim.key]
            chunks = [chunk_of(choice, len(known.tokens.get(choice, [])), count) for choice in sorted(choices)]
            deltas.append(
                Delta(claim.key, claim.fence, known.total + count * len(chunks), chunks, claim.request.reply_to)
            )
        assert self.queue.publish(worker, deltas, self.say_count(worker, generated, bool(deltas))) == lost
        for item in deltas:
            for chunk in item.chunks if item.key not in lost else []:
                self.known[item.key].tokens.setdefault(chunk.choice, []).extend(chunk.token_ids)

    @precondition(lambda self: any(self.claims))
    @rule(data=st.data())
    def server_forgets_tokens(self, data: st.DataObject) -> None:
        """What was published last is gone, and its worker goes on after it."""
        worker, chosen, lost = self.pick(data)
        first, second = [], []
        for claim in chosen:
            total, reply_to = self.known[claim.key].total, claim.request.reply_to
            first.append(Delta(claim.key, claim.fence, total + 1, [chunk_of(0, total, 1)], reply_to))
            second.append(Delta(claim.key, claim.fence, total + 3, [chunk_of(0, total + 1, 2)], reply_to))
        earlier = EarlierRedis(self.client)
        assert self.queue.publish(worker, first) == lost
        earlier.restore()
        self.scripts.forget()
        assert self.queue.publish(worker, second) == [claim.key for claim in chosen]
        back = [claim.key for claim in chosen if claim.key not in lost]
        for key in back:
            self.known[key].attempts -= 1
        self.put_back(back)

    @rule(slot=st.integers(0, SLOTS - 1), generated=st.integers(-5, 9))
    def count_tokens(self, slot: int, generated: int) -> None:
        self.renew(self.name(slot), [], [], generated)

    @precondition(lambda self: any(self.claims))
    @rule(data=st.data(), generated=st.integers(-5, 9))
    def renew_some(self, data: st.DataObject, generated: int) -> None:
        self.renew(*self.pick(data), generated)

    def renew(self, worker: str, chosen: list[Claim], lost: list[RequestKey], generated: int) -> None:
        assert self.queue.renew(worker, held(chosen), self.say_count(worker, generated)) == lost

    def say_count(self, worker: str, generated: int, delivered: bool = True) -> int:
        """What a worker says that it generated in its life."""
        # A late one says less than was said before
        count = max(0, self.counts.get(worker, 0) + generated)
        if delivered:
            self.counts[worker] = max(count, self.counts.get(worker, 0))
        return count

    @precondition(lambda self: any(self.claims))
    @rule(data=st.data(), good=st.booleans(), most=st.integers(1, 4), generated=st.integers(-5, 9))
    def commit(self, data: st.DataObject, good: bool, most: int, generated: int) -> None:
        worker, chosen, lost = self.pick(data)
        chosen = chosen[:most]  # few at a time, or all would soon be over
        lost = [claim.key for claim in chosen if claim.key in lost]
        items = [finished(claim, status=200 if good else 400) for claim in chosen]
        assert self.queue.commit(worker, items, self.say_count(worker, generated, bool(items))) == lost
        for claim in chosen:
            if claim.key not in lost:
                self.end(claim.key, "completed" if good else "failed")
                self.delivered += ANSWER_TOKENS
        assert self.queue.commit(worker, items) == [claim.key for claim in chosen]

    @precondition(lambda self: any(self.claims))
    @rule(data=st.data(), cleared=st.booleans())
    def requeue(self, data: st.DataObject, cleared: bool) -> None:
        self.requeue_some(*self.pick(data), cleared)

    def requeue_some(self, worker: str, chosen: list[Claim], lost: list[RequestKey], cleared: bool) -> None:
        answer = self.queue.requeue(worker, held(chosen), cleared)
        assert sorted(answer) == sorted(lost)
        back = [claim.key for claim in chosen if claim.key not in lost]
        for key in back:
            known = self.known[key]
            known.attempts -= 1
            known.engine_crashes = 0 if cleared else known.engine_crashes
        self.put_back(reversed(back))

    @precondition(lambda self: any(self.claims))
    @rule(data=st.data())
    def core_dies(self, data: st.DataObject) -> None:
        self.blame(*self.pick(data))

    @precondition(
        lambda self: self.free_slots() and (self.groups or any(known.waiting for known in self.known.values()))
    )
    @rule(data=st.data(), fate=st.sampled_from(["dies", "dies", "releases", "gives back", "runs on"]))
    def run_with_nothing_else(self, data: st.DataObject, fate: str) -> None:
        """Claims, and all of it fares in the same way: how quarantined requests get on."""
        slot = data.draw(st.sampled_from(self.free_slots()))
        self.take(slot, 2 * LINES)
        worker = self.name(slot)
        taken = [claim for claim in self.claims[slot] if self.holds(worker, claim)]
        if fate == "dies":
            self.blame(worker, taken, [])
        elif fate == "runs on":
            self.submit_call(0)
            self.take(slot, 3)  # beside quarantined requests nothing
        else:
            self.requeue_some(worker, taken, [], fate == "releases")

    def free_slots(self) -> list[int]:
        return [slot for slot in range(SLOTS) if not self.held_by(self.name(slot))]

    def blame(self, worker: str, chosen: list[Claim], lost: list[RequestKey]) -> None:
        assert self.queue.quarantine(worker, held(chosen), DEAD_LETTER) == lost
        alive = [claim.key for claim in chosen if claim.key not in lost]
        for key in alive:
            self.known[key].engine_crashes += 1
            if self.known[key].engine_crashes > 2:
                self.end(key, "failed")
        self.put_back(key for key in alive if not self.known[key].ended)

    @precondition(lambda self: any(known.worker for known in self.known.values()))
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([slot for slot in range(SLOTS) if self.held_by(self.name(slot))]))
        worker = self.name(slot)
        held = self.held_by(worker)
        assert self.queue.reap(worker) == len(held)
        assert self.queue.claim(worker, self.seqs[slot] + 1, 5, models=[MODEL]) == []
        self.put_back(reversed(held))
        self.lives[slot] += 1
        self.seqs[slot] = 0
        self.last[slot] = []
        self.register(slot)

    @precondition(lambda self: any(known.worker for known in self.known.values()))
    @rule(data=st.data())
    def leases_run_out(self, data: st.DataObject) -> None:
        held = sorted(key for key, known in self.known.items() if known.worker)
        late = data.draw(st.lists(st.sampled_from(held), unique=True))
        self.queue.reap()
        self.client.hset(keys.TICK, "reap_after", 0)
        for key in late:
            self.client.zadd(keys.LEASES, {str(key): 1})
        assert self.queue.reap() == len(late)
        self.put_back(sorted(late, key=lambda key: -self.known[key].fence))

    @precondition(lambda self: self.groups)
    @rule()
    def quarantine_waits_in_vain(self) -> None:
        self.queue.reap()
        self.client.hset(keys.TICK, "reap_after", 0)
        self.client.hincrby(keys.QUARANTINE_WAITS, MODEL, -20_000)
        assert self.queue.reap() == 0

    @precondition(lambda self: any(key.live and not known.ended for key, known in self.known.items()))
    @rule(data=st.data())
    def cancel_live(self, data: st.DataObject) -> None:
        key = data.draw(
            st.sampled_from(sorted(key for key, known in self.known.items() if key.live and not known.ended))
        )
        self.queue.cancel([key])
        self.end(key, "cancelled")

    @precondition(lambda self: len(self.cancelled) < len(BATCHES))
    @rule(data=st.data())
    def cancel_batch(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 7)) > 0:  # seldom, or little else would happen
            return
        batch = data.draw(st.sampled_from([batch for batch in BATCHES if batch not in self.cancelled]))
        assert self.queue.transition(batch, ["in_progress"], "cancelling")
        self.queue.remove_unfinished(batch)
        self.cancelled.add(batch)
        for key, known in self.known.items():
            if key.batch == batch and not known.ended:
                self.end(key, "cancelled")

    @rule(batch=st.sampled_from(BATCHES))
    def drain(self, batch: str) -> None:
        there = [line for line, _ in self.queue.results(batch)]
        done = {
            key.line
            for key, known in self.known.items()
            if key.batch == batch and known.ended in ("completed", "failed")
        }
        assert set(there) == done - self.drained[batch]
        if there:
            part = f"part-{len(self.drained[batch])}"
            assert not self.queue.drained(batch, "other", [*there, LINES])
            assert self.queue.drained(batch, part, there)
            assert not self.queue.drained(batch, "later", there)
        self.drained[batch] |= set(there)
        for line in there:
            self.on_disk[batch].setdefault(line, self.known[RequestKey(batch, line)].ended == "completed")

    @rule()
    def note_the_moment(self) -> None:
        self.moment = EarlierRedis(self.client), copy.deepcopy({name: getattr(self, name) for name in IN_REDIS})

    @precondition(lambda self: self.moment is not None)
    @rule()
    def redis_goes_back(self) -> None:
        """Then it gets to know what is on disk, as before each drain."""
        assert self.moment is not None
        snapshot, known = self.moment
        snapshot.restore()
        vars(self).update(copy.deepcopy(known))
        self.scripts.forget()
        for batch, outcomes in self.on_disk.items():
            if not outcomes:
                continue
            self.queue.restore(batch, f"restored-{len(outcomes)}", len(outcomes), sorted(outcomes.items()))
            for line, good in outcomes.items():
                self.end(RequestKey(batch, line), "completed" if good else "failed")
            self.drained[batch] |= outcomes.keys()

    def put_back(self, released: Iterable[RequestKey]) -> None:
        """What a worker lost or gave back, in the order in which the script meets it."""
        filling: list[RequestKey] | None = None
        for key in released:
            known = self.known[key]
            known.waiting, known.fence, known.worker = known.engine_crashes == 0, 0, ""
            if known.engine_crashes == 1:
                if filling is None or len(filling) == TOGETHER:
                    filling = []
                    self.groups.append(filling)
                filling.append(key)
            elif known.engine_crashes:
                self.groups.append([key])

    def end(self, key: RequestKey, how: str) -> None:
        known = self.known[key]
        known.waiting, known.fence, known.worker, known.ended = False, 0, "", how
        for group in self.groups:
            if key in group:
                group.remove(key)
        self.groups = [group for group in self.groups if group]

    @invariant()
    def keys_agree_with_each_other(self) -> None:
        assert faults(self.client) == []

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        for batch in BATCHES if self.known else ():
            record = self.queue.batch_fields(batch)
            for how in ("completed", "failed"):
                assert getattr(record, how) == sum(
                    known.ended == how for key, known in self.known.items() if key.batch == batch
                )
        assert self.queue.token_totals() == (sum(self.counts.values()), self.delivered)

    def teardown(self) -> None:
        for batch in BATCHES:
            self.queue.forget(batch)
        self.queue.cancel([key for key, known in self.known.items() if key.live and not known.ended])
        for slot in range(SLOTS):
            self.queue.remove_worker(self.name(slot))
        staying = {name.decode() for name in self.client.scan_iter() if self.client.ttl(name) < 0}
        assert staying <= keys.PERMANENT | {keys.CREDIT}


def live_id_of(tenant: int) -> str:
    """How the ids of its calls begin."""
    return f"live_{tenant:012}"


def chunk_of(choice: int, first: int, count: int) -> TokenChunk:
    """Tokens that are numbered, each of one character."""
    token_ids = list(range(first, first + count))
    logprobs = (
        [PositionLogprobs(TokenLogprob(token_id, b"x", -0.5, 1), []) for token_id in token_ids] if choice == 0 else None
    )
    return TokenChunk(choice, first, token_ids, "x" * count, first, logprobs)


def run(client: redis.Redis, seed: int, examples: int, steps: int) -> None:
    machine = type("Machine", (QueueModel,), {"client": client})
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    run_state_machine_as_test(seeded(seed)(machine), settings=options)


@pytest.mark.proof
def test_queue_does_what_the_model_does(redis_client: redis.Redis, seed: int) -> None:
    run(redis_client, seed, examples=30, steps=25)


@pytest.mark.proof
@pytest.mark.timeout(1500)
def test_queue_does_what_the_model_does_over_thousands_of_steps(redis_client: redis.Redis, seed: int) -> None:
    run(redis_client, seed, examples=60, steps=40)
