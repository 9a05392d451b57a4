"""All that Redis holds: as it is, and in a form in which two runs of the same calls are equal."""

from typing import Any

import msgspec
import redis

from jobs import keys

_SEED = 1_000_000  # a fence is this times the second in which the counting began, and a number
_TIMES = {keys.LEASES, keys.ALIVE, keys.WATCHED}  # zsets whose scores are times
_OF_ONE_CALL = (b"token", b"heartbeat")


class Dump:
    """Every key at one moment, read in a few round trips."""

    def __init__(self, client: redis.Redis) -> None:
        names = sorted(set(client.scan_iter(count=1000)))  # a scan may name a key twice
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.type(name)
            pipeline.ttl(name)
        about = pipeline.execute()
        self.kinds = {name.decode(): kind.decode() for name, kind in zip(names, about[::2], strict=True)}
        self.passing = {name for name, ttl in zip(self.kinds, about[1::2], strict=True) if ttl > 0}
        for name, kind in self.kinds.items():
            _READ[kind](pipeline, name)
        # A key whose time came between two round trips is none.
        self.values: dict[str, Any] = {name: value for name, value in zip(self.kinds, pipeline.execute(), strict=True) if value}

    def starting(self, prefix: str) -> dict[str, Any]:
        """Values of the keys that begin so, by the rest of their names."""
        return {name.removeprefix(prefix): value for name, value in self.values.items() if name.startswith(prefix)}

    def comparable(self) -> dict[str, Any]:
        """Key -> whether it goes away by itself and what it holds, without times, random tokens and the number where fences began."""
        return {name: (name in self.passing, self._comparable(name, value)) for name, value in self.values.items()}

    def _comparable(self, name: str, value: Any) -> Any:
        if name == keys.FENCE:
            return int(value) % _SEED
        if name == keys.LEASE:
            return {field: (int(lease.split(b" ")[0]) % _SEED, lease.split(b" ", 1)[1]) for field, lease in value.items()}
        if name.startswith(keys.claim("")):
            given = msgspec.msgpack.decode(value[b"set"])
            return value[b"seq"], [(request, int(fence) % _SEED) for request, fence in given]
        if name.startswith(keys.rate("")):
            return None  # a time and a random token
        if name.startswith(keys.batch("")):
            return {field: text for field, text in value.items() if field not in _OF_ONE_CALL}
        if name in (keys.TRIALS, keys.TICK) or name in _TIMES:
            return sorted(value) if isinstance(value, dict) else sorted(member for member, _ in value)
        if self.kinds[name] == "stream" and not name.startswith(keys.tokens("")):
            return [fields for _, fields in value]  # whose ids are times
        return value


_READ = {
    "none": lambda pipeline, name: pipeline.get(name),
    "string": lambda pipeline, name: pipeline.get(name),
    "hash": lambda pipeline, name: pipeline.hgetall(name),
    "zset": lambda pipeline, name: pipeline.zrange(name, 0, -1, withscores=True),
    "stream": lambda pipeline, name: pipeline.xrange(name),
    "set": lambda pipeline, name: pipeline.smembers(name),
    "list": lambda pipeline, name: pipeline.lrange(name, 0, -1),
}
