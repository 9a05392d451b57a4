"""What must hold of all keys together at any moment; tests ask after every step."""

from collections import Counter
from typing import Any

import redis
from msgspec import msgpack

from jobs.protocol.requests import RequestKey, unpack_request
from jobs.queue import keys
from jobs.queue.on_demand import OnDemandModel
from tests.support.dump import Dump

ENDED = ("completed", "failed", "expired", "cancelled")
"""States in which only the record of a batch is kept."""


def faults(client: redis.Redis) -> list[str]:
    """Sentences about what contradicts itself in the queue; empty when all is well.

    Reads every key.
    """
    return _Check(Dump(client)).faults()


class _Check:
    """One look at all keys."""

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self.values = dump.values
        self.leases = {
            RequestKey.parse(name): lease.decode().split(" ")[2] for name, lease in self.hash(keys.LEASE).items()
        }
        self.groups = {  # model -> number of a group -> its quarantined requests
            model: _grouped((number, RequestKey.parse(name)) for name, number in members)
            for model, members in dump.starting(keys.quarantined("")).items()
        }
        self.quarantined = [key for groups in self.groups.values() for group in groups.values() for key in group]
        self.engine_crashes = {
            RequestKey.parse(name): int(tries.split(b" ")[2]) for name, tries in self.hash(keys.TRIES).items()
        }
        self.taken = {*self.leases, *self.quarantined}

    def hash(self, name: str) -> Any:
        return self.values.get(name, {})

    def members(self, name: str) -> set[str]:
        """Of a set or a zset."""
        return {(member[0] if isinstance(member, tuple) else member).decode() for member in self.values.get(name, ())}

    def faults(self) -> list[str]:
        found = [*self.of_leases(), *self.of_quarantine(), *self.of_live_calls(), *self.of_workers(), *self.of_files()]
        for batch in sorted(self.members(keys.BATCHES)):
            found += self.of_batch(batch)
        return [*found, *self.of_open_batches()]

    def of_open_batches(self) -> list[str]:
        tenants = self.dump.starting(keys.open_batches(""))
        listed = {batch for tenant in tenants for batch in self.members(keys.open_batches(tenant))} - self.members(
            keys.ACTIVE
        )
        states = {batch: self.hash(keys.batch(batch)).get(b"state", b"").decode() for batch in sorted(listed)}
        return [f"{batch}: {state}, and counted as open" for batch, state in states.items() if state in ENDED]

    def of_leases(self) -> list[str]:
        timed = {RequestKey.parse(name) for name in self.members(keys.LEASES)}
        found = [f"{key}: lease without a deadline, or the reverse" for key in sorted(timed ^ set(self.leases))]
        for worker in self.dump.starting(keys.held("")):
            for member in self.members(keys.held(worker)):
                if self.leases.get(RequestKey.parse(member)) != worker:
                    found.append(f"{member}: in the set of worker {worker}, which holds no lease on it")
        for key, worker in self.leases.items():
            if str(key) not in self.members(keys.held(worker)):
                found.append(f"{key}: not in the set of its worker {worker}")
            if str(key.line).encode() not in self.hash(keys.bodies(key.batch)):
                found.append(f"{key}: held without a body")
        return found

    def of_quarantine(self) -> list[str]:
        found = [f"{key}: {count} times in quarantine" for key, count in Counter(self.quarantined).items() if count > 1]
        found += [f"{key}: in quarantine and held" for key in sorted(set(self.quarantined) & set(self.leases))]
        crashed = {key for key, count in self.engine_crashes.items() if count > 0}
        found += [f"{key}: counted for an engine crash, and not in quarantine" for key in sorted(crashed - self.taken)]
        noted = {model.decode() for model in self.hash(keys.QUARANTINE_WAITS)}
        found += [
            f"{model}: a note of a wait without quarantined requests, or the reverse"
            for model in sorted(noted ^ set(self.groups))
        ]
        for model, groups in self.groups.items():
            for group in groups.values():
                counts = {self.engine_crashes.get(key, 0) for key in group}
                if not (counts == {1} and len(group) <= 16) and not (counts == {2} and len(group) == 1):
                    found.append(f"{sorted(map(str, group))}: a group with {counts} engine crashes")
                found += [f"{key}: in quarantine of another model" for key in group if self.model(key) != model]
        for worker in set(self.leases.values()):
            tried = {self.engine_crashes.get(key, 0) > 0 for key, holder in self.leases.items() if holder == worker}
            if len(tried) > 1:
                found.append(f"{worker}: holds quarantined requests and others")
        return found

    def of_workers(self) -> list[str]:
        known = {worker.decode() for worker in self.hash(keys.WORKERS)}
        servers = {msgpack.decode(offer, type=OnDemandModel).server for offer in self.hash(keys.ON_DEMAND).values()}
        listed = [
            ("waits for", keys.waiting(""), known),
            ("serves", keys.serving(""), known),
            ("would load", keys.loaders(""), servers),
        ]
        return [
            f"{worker}: {what} {model}, which is not registered"
            for what, prefix, registered in listed
            for model in self.dump.starting(prefix)
            for worker in sorted(self.members(prefix + model) - registered)
        ]

    def of_files(self) -> list[str]:
        prefix = keys.files("").removesuffix("\0")
        # Tenant -> how often a file is in a listing of one purpose
        listed: dict[str, Counter[str]] = {}
        every: dict[str, Counter[str]] = {}
        for name in self.dump.starting(prefix):
            tenant, _, purpose = name.partition("\0")
            (listed if purpose else every).setdefault(tenant, Counter()).update(self.members(prefix + name))
        tenants = sorted({*listed, *every})
        return [
            f"tenant {name!r}: its files are not each in one listing"
            for name in tenants
            if listed.get(name) != every.get(name)
        ]

    def of_batch(self, batch: str) -> list[str]:
        found: list[str] = []
        record = {name.decode(): value.decode() for name, value in self.hash(keys.batch(batch)).items()}
        bodies = {int(line): body for line, body in self.hash(keys.bodies(batch)).items()}
        results = {int(line): result for line, result in self.hash(keys.results(batch)).items()}
        taken = {key.line for key in self.taken if key.batch == batch}
        waiting: list[int] = []
        for model in self.members(keys.batch_models(batch)):
            lines = [int(line) for line in self.values.get(keys.ready(batch, model), ())]
            waiting += lines
            found += [
                f"{batch}/{line}: waits for another model"
                for line in lines
                if self.model(RequestKey(batch, line)) != model
            ]
            in_ring = batch in self.members(keys.ring(model, record["tenant"]))
            if in_ring and record["tenant"] not in self.members(keys.tenants(model)):
                found.append(f"{batch}: in the ring of tenant {record['tenant']!r}, which takes no turns")
            if in_ring and not lines:
                found.append(f"{batch}: in the ring of {model} without waiting lines")
        done = _bits(self.values.get(keys.done(batch), b""))
        found += [f"{batch}/{line}: waits {count} times" for line, count in Counter(waiting).items() if count > 1]
        found += [f"{batch}/{line}: waits and is held or in quarantine" for line in sorted(set(waiting) & taken)]
        found += [
            f"{batch}/{line}: waiting or held without a body, or the reverse"
            for line in sorted({*waiting, *taken} ^ set(bodies))
        ]
        found += [f"{batch}/{line}: done and still here" for line in sorted(done & set(bodies))]
        found += [f"{batch}/{line}: a result without its bit" for line in sorted(set(results) - done)]
        for name, values in (("body_bytes", bodies), ("result_bytes", results)):
            size = sum(map(len, values.values()))
            if int(record.get(name, 0)) != size:
                found.append(f"{batch}: {name} is {record.get(name)}, not {size}")
        if record["state"] not in ENDED and int(record["completed"]) + int(record["failed"]) != len(done):
            found.append(
                f"{batch}: {record['completed']} completed and {record['failed']} failed, but {len(done)} bits"
            )
        return found

    def of_live_calls(self) -> list[str]:
        in_turns = self.dump.starting(keys.live_of("", "").removesuffix("\0"))
        waiting = Counter(
            RequestKey.parse(name)
            for names in [*self.dump.starting(keys.live("")).values(), *in_turns.values()]
            for name in names
        )
        taken = {key for key in self.taken if key.live}
        present = {RequestKey(f"live_{rest}", 0) for rest in self.dump.starting(keys.bodies("live_"))}
        found = [f"{key}: waits {count} times" for key, count in waiting.items() if count > 1]
        found += [f"{key}: waits and is held or in quarantine" for key in sorted(set(waiting) & taken)]
        found += [
            f"{key}: waiting or held without a body, or the reverse" for key in sorted((set(waiting) | taken) ^ present)
        ]
        found += [
            f"{tenant}: in the ring of live calls of {model} without a call, or the reverse"
            for model in {name.partition("\0")[0] for name in in_turns} | set(self.dump.starting(keys.live_tenants("")))
            for tenant in {name.partition("\0")[2] for name in in_turns if name.startswith(f"{model}\0")}
            ^ self.members(keys.live_tenants(model))
        ]
        return found + self.of_live_counts(present)

    def of_live_counts(self, present: set[RequestKey]) -> list[str]:
        """The counts that limits are judged by are those of the calls that are counted."""
        calls: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        found: list[str] = []
        for name, counted in self.hash(keys.LIVE_CALLS).items():
            key, (size, _, model) = RequestKey.parse(name), counted.decode().split(" ", 2)
            if key not in present:
                found.append(f"{key}: counted, and not here")
            elif self.model(key) != model or len(self.hash(keys.bodies(key.batch))[b"0"]) != int(size):
                found.append(f"{key}: counted as {size} bytes for {model}")
            for usage in (f"tenant:{str(key)[5:17]}", f"model:{model}"):
                calls[usage] += 1
                sizes[usage] += int(size)
        retained = {field.decode(): int(value) for field, value in self.hash(keys.RETAINED_BYTES).items()}
        total = retained.pop("", 0)
        if total != sum(retained.values()) or self.members(keys.RETAINED) != set(retained):
            found.append(f"{total} bytes of streams counted, and {sum(retained.values())} noted")
        usages = self.dump.starting(keys.live_usage("", "").removesuffix(":"))
        for usage in {*usages, *calls}:
            counts = {field.decode(): int(value) for field, value in usages.get(usage, {}).items()}
            if counts != {"calls": calls[usage], "bytes": sizes[usage]}:
                found.append(f"{usage}: {counts} counted, and {calls[usage]} calls of {sizes[usage]} bytes are here")
        return found

    def model(self, key: RequestKey) -> str:
        """The model that a request names; "" without a body."""
        body = self.hash(keys.bodies(key.batch)).get(str(key.line).encode())
        return "" if body is None else unpack_request(body).model


def _grouped(members: Any) -> dict[float, list[RequestKey]]:
    groups: dict[float, list[RequestKey]] = {}
    for number, key in members:
        groups.setdefault(number, []).append(key)
    return groups


def _bits(bitmap: bytes) -> set[int]:
    return {8 * i + bit for i, byte in enumerate(bitmap) for bit in range(8) if byte >> (7 - bit) & 1}
