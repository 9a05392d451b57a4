"""What `pipeline fleet` refuses, in one sentence."""

from pathlib import Path

import pytest

from tests.pipeline.conftest import RunHere
from tests.support.commands import run_pipeline
from tests.support.ports import reserved_port

FLEET = ("fleet", "--ray-address", "auto")
REFUSALS = {
    "no cluster": (("fleet",), "Missing option '--ray-address'"),
    "more than most": ((*FLEET, "--min-workers", 2), "--min-workers 2 is above --max-workers 1"),
    "more than most of one model": (
        (*FLEET, "--model-flags", "demo=--min-workers 3 --max-workers 2"),
        "--min-workers 3 is above --max-workers 2",
    ),
    "no amount": ((*FLEET, "--worker-resource", "disk"), "'disk' is not NAME=AMOUNT, such as fast_disk=1"),
    "bad amount": ((*FLEET, "--worker-resource", "disk=-1"), "'disk=-1' is not NAME=AMOUNT"),
    "no folder": ((*FLEET, "--model", "/nowhere/model"), "there is no model folder /nowhere/model"),
    "bad address": (("fleet", "--ray-address", "nonsense"), "no Ray cluster can be used at the address nonsense"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_it_is_refused(redis_url: str, case: str) -> None:
    arguments, sentence = REFUSALS[case]
    done = run_pipeline(*arguments, redis_url=redis_url, RAY_USAGE_STATS_ENABLED="0")
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_it_needs_the_queue_of_a_fleet(run_here: RunHere, tmp_path: Path) -> None:
    assert "needs the queue of a fleet: set REDIS_URL" in run_here(*FLEET).err
    away = run_here(*FLEET, REDIS_URL=f"unix://{tmp_path}/redis.sock")
    assert away.code == 1
    assert "Redis" in away.err


@pytest.mark.proof
def test_a_head_that_is_gone_is_named(redis_url: str) -> None:
    with reserved_port() as port:
        done = run_pipeline("fleet", "--ray-address", f"127.0.0.1:{port}", redis_url=redis_url)
    assert done.returncode == 2
    assert f"no Ray cluster can be used at the address 127.0.0.1:{port}" in done.stderr
