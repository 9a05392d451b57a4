"""A batch keeps the defaults of its models that it was validated with."""

import json
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs.batch.client import create_batch
from jobs.batch.manifest import load_manifest, save_manifest
from jobs.control import early_lines
from jobs.protocol.default_parameters import DefaultParameters
from jobs.protocol.requests import Claim, Request
from jobs.protocol.results import Result
from jobs.queue.on_demand import OnDemandModel
from jobs.queue.registry import WorkerRecord, WorkerState
from jobs.queue.request_queue import Queue
from tests.support.batch_steps import answer_all, begin, run_to_end, step
from tests.support.control_plane import echo, write_input

COUNT = 9000  # more than are in Redis at once


def serve(
    client: redis.Redis, defaults: DefaultParameters | None, state: WorkerState = "ready", name: str = "served"
) -> None:
    record = WorkerRecord(name, ["m"], state, 4096, 1.0, "test", 1, defaults=defaults)
    Queue(client).register_worker(record)


class Seen:
    """A worker that notes what the requests are."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __call__(self, claim: Claim) -> Result:
        self.requests.append(claim.request)
        return echo(claim)

    def values(self, member: str) -> set[Any]:
        return {json.loads(request.body).get(member) for request in self.requests}

    @property
    def marks(self) -> set[str]:
        return {request.defaults for request in self.requests}


def test_all_lines_of_a_batch_get_those_of_its_validation(redis_client: redis.Redis, tmp_path: Path) -> None:
    """Also after the worker is replaced, and after Redis lost all."""
    serve(redis_client, {"temperature": 0.25, "max_tokens": 9})
    source, seen = write_input(tmp_path / "in.jsonl", COUNT), Seen()
    record = begin(redis_client, source)
    step(redis_client, record.id)
    serve(redis_client, {"temperature": 0.75})
    answer_all(redis_client, seen, most=100)
    step(redis_client, record.id)
    redis_client.flushall()
    serve(redis_client, {"temperature": 0.75})
    again = create_batch(redis_client, record.spec)
    assert run_to_end(redis_client, again.id, seen).completed == COUNT
    assert len(seen.requests) >= COUNT
    assert (seen.values("temperature"), seen.values("max_tokens"), seen.marks) == ({0.25}, {9}, {"max_tokens"})


def test_early_lines_and_those_of_a_repeated_validation_are_alike(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_lines, "_SMALLEST_BYTES", 1)
    serve(redis_client, {"temperature": 0.25})
    seen = Seen()
    record = begin(redis_client, write_input(tmp_path / "in.jsonl", COUNT))
    with monkeypatch.context() as killed:
        killed.setattr("jobs.batch.source_check.SourceCheck.problems", _killed)
        with pytest.raises(KeyboardInterrupt):
            step(redis_client, record.id)
    serve(redis_client, {"temperature": 0.75})
    assert run_to_end(redis_client, record.id, seen).completed == COUNT
    assert seen.values("temperature") == {0.25}


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_lines_get_the_workers_own_until_they_are_known(redis_client: redis.Redis, tmp_path: Path) -> None:
    seen, later = Seen(), Seen()
    record = begin(redis_client, write_input(tmp_path / "in.jsonl", COUNT))
    step(redis_client, record.id)
    serve(redis_client, {"temperature": 0.25})
    answer_all(redis_client, seen)
    assert (seen.values("temperature"), seen.marks) == ({None}, {"worker"})
    run_to_end(redis_client, record.id, later)
    assert (later.values("temperature"), later.marks) == ({0.25}, {""})


@pytest.mark.parametrize("source", ["loading", "offer"])
def test_those_of_a_model_that_is_not_loaded_yet_count(redis_client: redis.Redis, tmp_path: Path, source: str) -> None:
    if source == "loading":
        serve(redis_client, None, name="of-the-last-version")
        serve(redis_client, {"temperature": 0.25}, "loading")
    else:
        Queue(redis_client).offer({"m": OnDemandModel("server", defaults={"temperature": 0.25})}, [])
    record, seen = begin(redis_client, write_input(tmp_path / "in.jsonl", 3)), Seen()
    step(redis_client, record.id)
    answer_all(redis_client, seen)
    assert (seen.values("temperature"), seen.marks) == ({0.25}, {""})


def test_a_batch_of_a_version_without_defaults_gets_none(redis_client: redis.Redis, tmp_path: Path) -> None:
    record, seen = begin(redis_client, write_input(tmp_path / "in.jsonl", 3)), Seen()
    manifest = load_manifest(record.spec.root)
    assert manifest is not None
    manifest.defaults = None
    save_manifest(manifest)
    serve(redis_client, {"temperature": 0.25})
    run_to_end(redis_client, record.id, seen)
    assert (seen.values("temperature"), seen.marks) == ({None}, {""})


def test_a_control_plane_of_the_last_version_in_between_changes_no_line(
    redis_client: redis.Redis, tmp_path: Path
) -> None:
    """It saves the manifest without them."""
    serve(redis_client, {"temperature": 0.25})
    record, seen = begin(redis_client, write_input(tmp_path / "in.jsonl", COUNT)), Seen()
    step(redis_client, record.id)
    manifest = load_manifest(record.spec.root)
    assert manifest is not None
    manifest.defaults = None
    save_manifest(manifest)
    run_to_end(redis_client, record.id, seen)
    assert seen.values("temperature") == {0.25}
