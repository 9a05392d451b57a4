"""`python -m tests.chaos --seconds 600 [--seed N]`: a fleet at work while everything that can break
does, drawn from a seed.

Batches of questions and of texts with known answers, and live calls beside them, run through the
real control plane, workers and API (`load.py`). Every few seconds something is killed, stopped,
slowed, cut off, filled, emptied or set to another time (`killers.py`), and what ended is started
again, as a supervisor would. At the end every answer must be there once and right, and nothing may
be left over (`verdict.py`). With `--sentinel`, Redis is a pair of servers that fails over
(`failovers.py`); with `--bucket`, the file store is in a bucket (`buckets.py`).
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.bucket_load import BucketLoad
from tests.chaos.buckets import BucketKillers
from tests.chaos.embeddings import EmbeddedTexts
from tests.chaos.failovers import SentinelKillers
from tests.chaos.killers import Killers
from tests.chaos.load import ChaosLoad
from tests.chaos.verdict import Verdict, judge
from tests.support.bucket_fleet import BucketFleet
from tests.support.fleet import LocalFleet, running_fleet
from tests.support.processes import descendants
from tests.support.sentinel_fleet import SentinelFleet

LEASE_SECONDS = 2.0
STREAM_INTERVAL = 0.25  # between checkpoints
END_SECONDS = 300.0  # in which a fleet that is left alone must get through what it has


def main() -> int:
    """Runs from the command line; the exit code is 0 when every promise was kept."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description="A fleet at work while everything that can break does."
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="how long things break")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two of them")
    parser.add_argument("--requests", type=int, default=20_000, help="lines at least, however long that takes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    setting = parser.add_mutually_exclusive_group()
    setting.add_argument("--sentinel", action="store_true", help="put Redis behind Sentinels, and make them fail over")
    setting.add_argument("--bucket", action="store_true", help="put the file store on an S3 server, and break that too")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    verdict = run(folder, **vars(options))
    print(verdict.report())
    if verdict.faults:
        print(f"the fleet's folder is kept: {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def run(
    folder: Path,
    *,
    seconds: float,
    seed: int,
    every: float,
    requests: int,
    workers: int,
    max_num_seqs: int,
    sentinel: bool = False,
    bucket: bool = False,
) -> Verdict:
    """One run in `folder`."""
    print(f"seed {seed} (repeat with --seed {seed})", flush=True)
    rng = random.Random(seed)
    others = set(descendants(os.getpid()))
    texts = EmbeddedTexts(folder / "embedder")
    flags = {
        "embedder": folder / "embedder",
        "workers": workers,
        "max_num_seqs": max_num_seqs,
        "lease_seconds": LEASE_SECONDS,
        "stream_interval": STREAM_INTERVAL,
        "kind": SentinelFleet if sentinel else BucketFleet if bucket else LocalFleet,
    }
    kind = SentinelKillers if sentinel else BucketKillers if bucket else Killers
    with running_fleet(folder, api=True, **flags) as fleet:  # type: ignore[arg-type]
        load = (BucketLoad if bucket else ChaosLoad)(fleet, texts, random.Random(rng.random()))
        killers = kind(fleet, load, random.Random(rng.random()), every)
        began = time.monotonic()
        with load:
            _break_things(fleet, load, killers, began, seconds, requests)
            killers.finish()
            load.stop()
            fleet.wait(load.has_ended, END_SECONDS, f"the rest to end: {load.unfinished}")
        fleet.wait_ready()  # what is still on its way would end otherwise than in good order
        return judge(fleet, load, killers, time.monotonic() - began, seed, requests, others)


def _break_things(
    fleet: LocalFleet, load: ChaosLoad, killers: Killers, began: float, seconds: float, requests: int
) -> None:
    said = began
    while (now := time.monotonic()) < began + seconds or load.finished < requests:
        fleet.look_after()
        if now < began + seconds:
            killers.act(now - began)
        else:
            killers.finish()
        if now > said + 20:
            said = now
            print(
                f"[{now - began:5.0f} s] {load.finished} lines and {load.live_answers} live calls answered", flush=True
            )
        if now > began + 3 * seconds + END_SECONDS:
            break
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
