"""Which keys an idle queue may hold: those that stay, and those that go away by themselves within a
known time.
"""

import re
import time
from typing import Any

from jobs.queue import keys

_STAY = {keys.BATCHES, *keys.PERMANENT, "rq:queues", "rq:workers", "rq:workers:batches"}
_STAY_WITH_FILES = re.compile(r"\{q\}:(files|batch_index):.*", re.DOTALL)
_GO_AWAY = {  # pattern of the key, and within how many seconds it must be gone
    r"\{q\}:batch:.*": 30 * 24 * 3600,  # records of ended batches
    r"\{q\}:tok:live_.*": 300,  # streams of ended live calls, for those who were cut
    r"\{q\}:api:.*": 300,
    r"\{q\}:api_alive:.*": 60,
    r"\{q\}:batch_tok:.*": 180,  # of batches that a client read
    r"\{q\}:claim:.*": 120,
    r"\{q\}:counted:.*": 24 * 3600,
    r"\{q\}:published:.*": 24 * 3600,
    r"\{q\}:driver(_host)?:.*": 60,
    r"\{q\}:written": 5,
    r"\{q\}:ctl:.*": 600,
    r"\{q\}:(on_demand|loaders:.*)": 30,  # of servers that were killed
    r"\{q\}:file_place:.*": 6 * 3600,  # of deleted results, for listings that go on behind them
    r"\{q\}:gauges:.*": 60,
    r"\{q\}:retained(_bytes)?": 300,
    r"\{q\}:hold:.*": 5,
    r"\{q\}:level:.*": 1200,
    r"\{q\}:served:.*": 600,
    re.escape(keys.WATCHED): 180,
    # Of jobs that a process was killed with before it began them
    r"rq:queue:.*:intermediate:first_seen:.*": 24 * 3600,
    r"rq:.*": 3600,
}


def leftovers(client: Any, patience: float = 60.0, ahead: float = 0.0) -> list[str]:
    """Return sentences about unexpected keys, after `patience` seconds in which those of workers
    that just stopped can go away.

    `ahead`: seconds by which the clock of the control plane is ahead of the server's. RQ sets the
    time at which a failed job is removed by the former.
    """
    deadline = time.monotonic() + patience
    while (
        found := list(filter(None, (_fault(client, key, ahead) for key in client.keys("*"))))
    ) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def _fault(client: Any, raw: bytes, ahead: float) -> str | None:
    key, left = raw.decode(errors="replace"), client.ttl(raw)
    if key == keys.WATCHED:  # its members go when no client watches any more
        last = client.zrange(raw, -1, -1, withscores=True)
        left = int(last[0][1] / 1000 - client.time()[0]) if last else -2
    if key.startswith("rq:failed:"):  # RQ takes out what such jobs left when its time has come
        last = client.zrange(raw, -1, -1, withscores=True)
        left = max(0, int(last[0][1] - ahead - client.time()[0])) if last else -2
    if key in _STAY or _STAY_WITH_FILES.fullmatch(key) or left == -2:
        return None
    for pattern, seconds in _GO_AWAY.items():
        if re.fullmatch(pattern, key, re.DOTALL):
            return None if 0 <= left <= seconds else f"the key {key} lasts for {left} s"
    return f"unexpected key {key}"
