"""All that Redis holds: as it is, and in a form in which two runs of the same calls are equal."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import redis

from jobs.queue import keys

_SEED = 1_000_000  # a fence is this times the second in which the counting began, and a number
_TIMES = {keys.LEASES, keys.ALIVE, keys.WATCHED, keys.RETAINED, keys.ENDED}  # zsets whose scores are times
_OF_ONE_CALL = (b"token", b"since")


_READ_ALL = """
local read = {
  string = {'GET'}, hash = {'HGETALL'}, zset = {'ZRANGE', 0, -1, 'WITHSCORES'},
  stream = {'XRANGE', '-', '+'}, set = {'SMEMBERS'}, list = {'LRANGE', 0, -1}
}
local found = {}
for i, name in ipairs(redis.call('KEYS', '*')) do
  local kind = redis.call('TYPE', name).ok
  local command = read[kind]
  found[i] = {name, kind, redis.call('TTL', name), redis.call(command[1], name, unpack(command, 2))}
end
return found
"""


class Dump:
    """Every key at one moment, whatever else is running."""

    def __init__(self, client: redis.Redis) -> None:
        found: Any = sorted(client.eval_ro(_READ_ALL, 0))
        self.kinds = {name.decode(): kind.decode() for name, kind, _, _ in found}
        self.passing = {name.decode() for name, _, ttl, _ in found if ttl > 0}
        self.values: dict[str, Any] = {name.decode(): _PARSE[kind](value) for name, kind, _, value in found}

    def starting(self, prefix: str) -> dict[str, Any]:
        """Values of the keys that begin so, by the rest of their names."""
        return {name.removeprefix(prefix): value for name, value in self.values.items() if name.startswith(prefix)}

    def comparable(self) -> dict[str, Any]:
        """Key -> whether it goes away by itself and what it holds, without times, random tokens and
        the number where fences began.
        """
        return {name: (name in self.passing, self._comparable(name, value)) for name, value in self.values.items()}

    def _comparable(self, name: str, value: Any) -> Any:
        if name == keys.FENCE:
            return int(value) % _SEED
        if name == keys.LEASE:
            return {
                field: (int(lease.split(b" ")[0]) % _SEED, lease.split(b" ", 1)[1]) for field, lease in value.items()
            }
        if name.startswith(keys.claim("")):
            given = msgspec.msgpack.decode(value[b"set"])
            return value[b"seq"], [(request, int(fence) % _SEED) for request, fence in given]
        if name == keys.REGISTRY_SINCE or name.startswith(keys.rate("")):
            return None  # a time, and a time and a random token
        if name.startswith((keys.batch(""), keys.bodies("live_"))):
            return {field: text for field, text in value.items() if field not in _OF_ONE_CALL}
        if name in (keys.QUARANTINE_WAITS, keys.TICK) or name in _TIMES:
            return sorted(value) if isinstance(value, dict) else sorted(member for member, _ in value)
        if self.kinds[name] == "stream" and not name.startswith(keys.tokens("")):
            return [fields for _, fields in value]  # whose ids are times
        return value


def _pairs(flat: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


_PARSE: dict[bytes, Callable[[Any], Any]] = {
    b"string": lambda value: value,
    b"hash": lambda flat: dict(_pairs(flat)),
    b"zset": lambda flat: [(member, float(score)) for member, score in _pairs(flat)],
    b"stream": lambda entries: [(entry_id, dict(_pairs(fields))) for entry_id, fields in entries],
    b"set": set,
    b"list": lambda values: values,
}
