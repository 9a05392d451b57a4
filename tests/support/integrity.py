"""What must hold of all keys together at any moment; tests ask after every step."""

from collections import Counter
from typing import Any

import redis

from jobs import keys
from jobs.requests import Request, RequestKey, unpack_request


def faults(client: redis.Redis) -> list[str]:
    """Sentences about what contradicts itself in the queue; empty when all is well. Reads every key."""
    found: list[str] = []
    leases = _leases(client)
    found += _lease_faults(client, leases)
    suspects = _suspects(client)
    found += _suspect_faults(client, suspects, leases)
    taken = {*leases, *suspects}
    for batch in sorted(_texts(client.smembers(keys.BATCHES))):
        found += _batch_faults(client, batch, {key.line for key in taken if key.batch == batch})
    found += _live_faults(client, {key for key in taken if key.live})
    return found


def _lease_faults(client: Any, leases: dict[RequestKey, str]) -> list[str]:
    timed = {RequestKey.parse(name) for name in client.zrange(keys.LEASES, 0, -1)}
    found = [f"{key}: lease without a deadline, or the reverse" for key in sorted(timed ^ set(leases))]
    for name in client.keys(keys.held("*")):
        worker = name.decode().removeprefix(keys.held(""))
        for member in _texts(client.smembers(name)):
            if leases.get(RequestKey.parse(member)) != worker:
                found.append(f"{member}: in the set of worker {worker}, which holds no lease on it")
    for key, worker in leases.items():
        if not client.sismember(keys.held(worker), str(key)):
            found.append(f"{key}: not in the set of its worker {worker}")
        if not client.hexists(keys.bodies(key.batch), str(key.line)):
            found.append(f"{key}: held without a body")
    return found


def _suspect_faults(client: Any, suspects: list[RequestKey], leases: dict[RequestKey, str]) -> list[str]:
    found = [f"{key}: {count} times among the suspects" for key, count in Counter(suspects).items() if count > 1]
    found += [f"{key}: among the suspects and held" for key in sorted(set(suspects) & set(leases))]
    suspicions = {RequestKey.parse(name): int(tries.split(b" ")[2]) for name, tries in client.hgetall(keys.TRIES).items()}
    suspected = {key for key, count in suspicions.items() if count > 0}
    found += [f"{key}: suspected, and not among the suspects" for key in sorted(suspected - set(suspects) - set(leases))]
    noted = _texts(client.hkeys(keys.TRIALS))
    models = {name.decode().removeprefix(keys.suspects("")) for name in client.keys(keys.suspects("*"))}
    found += [f"{model}: a note of a wait without suspects, or the reverse" for model in sorted(noted ^ models)]
    for model in models:
        groups: dict[float, list[RequestKey]] = {}
        for name, number in client.zrange(keys.suspects(model), 0, -1, withscores=True):
            key = RequestKey.parse(name)
            groups.setdefault(number, []).append(key)
            if _request(client, key).model != model:
                found.append(f"{key}: among the suspects of another model")
        for group in groups.values():
            counts = {suspicions.get(key, 0) for key in group}
            if not ((counts == {1} and len(group) <= 16) or (counts == {2} and len(group) == 1)):
                found.append(f"{sorted(map(str, group))}: a group with {counts} suspicions")
    for worker in set(leases.values()):
        tried = {suspicions.get(key, 0) > 0 for key, holder in leases.items() if holder == worker}
        if len(tried) > 1:
            found.append(f"{worker}: holds suspects and others")
    return found


def _batch_faults(client: Any, batch: str, held: set[int]) -> list[str]:
    """`held` are the lines that a worker has, or that are among the suspects."""
    found: list[str] = []
    record = {name.decode(): value.decode() for name, value in client.hgetall(keys.batch(batch)).items()}
    bodies = {int(line): body for line, body in client.hgetall(keys.bodies(batch)).items()}
    results = {int(line): result for line, result in client.hgetall(keys.results(batch)).items()}
    waiting: list[int] = []
    for model in _texts(client.smembers(keys.batch_models(batch))):
        lines = [int(line) for line in client.lrange(keys.ready(batch, model), 0, -1)]
        waiting += lines
        found += [f"{batch}/{line}: waits for another model" for line in lines if unpack_request(bodies[line]).model != model]
        in_ring = client.zscore(keys.ring(model, record["tenant"]), batch) is not None
        if in_ring and client.zscore(keys.tenants(model), record["tenant"]) is None:
            found.append(f"{batch}: in the ring of tenant {record['tenant']!r}, which takes no turns")
        if in_ring and not lines:
            found.append(f"{batch}: in the ring of {model} without waiting lines")
    done = _bits(client.get(keys.done(batch)) or b"")
    found += [f"{batch}/{line}: waits {count} times" for line, count in Counter(waiting).items() if count > 1]
    found += [f"{batch}/{line}: waits and is held or suspected" for line in sorted(set(waiting) & held)]
    found += [f"{batch}/{line}: waiting or held without a body, or the reverse" for line in sorted((set(waiting) | held) ^ set(bodies))]
    found += [f"{batch}/{line}: done and still here" for line in sorted(done & set(bodies))]
    found += [f"{batch}/{line}: a result without its bit" for line in sorted(set(results) - done)]
    sums = {
        "body_bytes": sum(map(len, bodies.values())),
        "result_bytes": sum(map(len, results.values())),
    }
    found += [f"{batch}: {name} is {record.get(name)}, not {value}" for name, value in sums.items() if int(record.get(name, 0)) != value]
    ended = record["state"] in ("completed", "failed", "expired", "cancelled")  # then only the record is kept
    if not ended and int(record["completed"]) + int(record["failed"]) != len(done):
        found.append(f"{batch}: {record['completed']} completed and {record['failed']} failed, but {len(done)} bits")
    return found


def _live_faults(client: Any, held: set[RequestKey]) -> list[str]:
    """`held` as for a batch."""
    waiting: Counter[RequestKey] = Counter()
    for name in client.keys(keys.live("*")):
        waiting.update(RequestKey.parse(member) for member in client.lrange(name, 0, -1))
    prefix = keys.bodies("")
    present = {RequestKey(name.decode().removeprefix(prefix), 0) for name in client.keys(keys.bodies("live_*"))}
    found = [f"{key}: waits {count} times" for key, count in waiting.items() if count > 1]
    found += [f"{key}: waits and is held or suspected" for key in sorted(set(waiting) & held)]
    found += [f"{key}: waiting or held without a body, or the reverse" for key in sorted((set(waiting) | held) ^ present)]
    return found


def _suspects(client: Any) -> list[RequestKey]:
    return [RequestKey.parse(name) for key in client.keys(keys.suspects("*")) for name in client.zrange(key, 0, -1)]


def _request(client: Any, key: RequestKey) -> Request:
    return unpack_request(client.hget(keys.bodies(key.batch), str(key.line)))


def _leases(client: Any) -> dict[RequestKey, str]:
    """Request -> worker."""
    return {RequestKey.parse(name): lease.decode().split(" ")[2] for name, lease in client.hgetall(keys.LEASE).items()}


def _bits(bitmap: bytes) -> set[int]:
    return {8 * i + bit for i, byte in enumerate(bitmap) for bit in range(8) if byte >> (7 - bit) & 1}


def _texts(values: Any) -> set[str]:
    return {value.decode() for value in values}
