"""A file store and a Redis of the version before are taken over: every batch comes to its end with
each line once, and every live call to its answer.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.support.integrity import faults
from tests.upgrades.make_fixture import FIXTURE, MARK
from tests.upgrades.mixed_fleet import Client, MixedFleet

EXPECTED: dict[str, Any] = json.loads((FIXTURE / "expected.json").read_text())


def test_each_line_and_call_of_a_store_and_a_redis_ends_once() -> None:
    with taken_over() as fleet:
        restore_redis(fleet)
        fleet.start_worker("worker")
        client = start_rest(fleet)
        texts = {name: client.read_stream(stream) for name, stream in EXPECTED["live"].items()}
        for text, last in texts.values():
            assert last["status"] == 200
            assert text == last["response"]["choices"][0]["message"]["content"]
        check_ends(client, fleet)


@pytest.mark.proof
def test_each_line_of_a_store_whose_redis_is_lost_ends_once() -> None:
    with taken_over() as fleet:
        fleet.start_worker("worker")
        fleet.wait_serving("worker")  # before batches are validated, since an empty Redis has no models
        check_ends(start_rest(fleet), fleet)


@contextmanager
def taken_over() -> Iterator[MixedFleet]:
    """A fleet of this version on the store, with clocks that go on from the moment of the
    fixture: leases and heartbeats are as old as after a restart, and no file has expired.
    """
    with TemporaryDirectory(prefix="upgrade-") as name, ExitStack() as stack:
        fleet = MixedFleet(Path(name), stack, started_at=EXPECTED["seconds"])
        for path in (FIXTURE / "store").rglob("*"):
            if path.is_file():
                copy = fleet.store / path.relative_to(FIXTURE / "store")
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes().replace(MARK, bytes(fleet.folder)))
        try:
            yield fleet
        except BaseException:
            print(fleet.logs())
            raise


def restore_redis(fleet: MixedFleet) -> None:
    with fleet.client.pipeline(transaction=False) as pipeline:
        for command in (FIXTURE / "redis.jsonl").read_text().splitlines():
            arguments = (argument.encode("latin-1") for argument in json.loads(command))
            pipeline.execute_command(*(argument.replace(MARK, bytes(fleet.folder)) for argument in arguments))
        pipeline.execute()


def start_rest(fleet: MixedFleet) -> Client:
    """Start an API and a control plane beside the worker."""
    url = fleet.start_api("api")
    fleet.start_jobs("jobs")
    client = Client(url, EXPECTED["secret"])
    client.wait_ready()
    return client


def check_ends(client: Client, fleet: MixedFleet) -> None:
    """Every batch has come to its end, and nothing contradicts itself."""
    for batch in EXPECTED["batches"].values():
        client.wait_ended(batch["id"], batch["ends"])
    assert faults(fleet.client) == []
    fleet.stop("api", "worker", "jobs")
    assert fleet.tracebacks() == {}
