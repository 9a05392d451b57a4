"""Waiting for a batch, and copies of its results."""

import os
import resource
import signal
from pathlib import Path

import msgspec
import pytest
import redis

from jobs.batch.client import BatchRecord, BatchSpec, create_batch
from jobs.queue.scripts import QueueUnavailable
from jobs.store.storage import StoreError
from pipeline import batch_wait
from pipeline.batch_wait import copy_results, wait_for_batch
from pipeline.errors import Interrupted


@pytest.fixture
def batch(redis_client: redis.Redis, tmp_path: Path) -> BatchRecord:
    """A batch that no process works on."""
    (tmp_path / "in.jsonl").write_text("{}\n")
    spec = BatchSpec(
        input=str(tmp_path / "in.jsonl"), root=str(tmp_path / "root"), output=str(tmp_path / "out"), models=("m",)
    )
    return create_batch(redis_client, spec)


@pytest.mark.proof
def test_a_batch_that_redis_lost_is_waited_for(
    batch: BatchRecord, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = msgspec.structs.replace(batch, state="completed")
    answers: list[BatchRecord | KeyError] = [batch, KeyError(batch.id), batch, ended]

    def read(*_: object, **__: object) -> BatchRecord:
        answer = answers.pop(0)
        if isinstance(answer, KeyError):
            raise answer
        return answer

    monkeypatch.setattr(batch_wait, "get_batch", read)
    wait_for_batch(batch.id, None, redis_url, fail_on_error=False)
    assert answers == []


@pytest.mark.proof
def test_an_order_to_stop_is_obeyed_while_redis_is_away(
    batch: BatchRecord, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_away(*_: object, retry_seconds: float) -> BatchRecord:
        assert retry_seconds == 0
        os.kill(os.getpid(), signal.SIGTERM)
        raise QueueUnavailable("Redis is away")

    monkeypatch.setattr(batch_wait, "get_batch", is_away)
    with pytest.raises(Interrupted, match=f"{batch.id} goes on"):
        wait_for_batch(batch.id, None, redis_url, fail_on_error=False)


def test_a_copy_that_fails_leaves_the_file_of_before(tmp_path: Path) -> None:
    """The file system takes no file of that size."""
    source, target = tmp_path / "results.jsonl", tmp_path / "copies" / "copy.jsonl"
    source.write_bytes(b"x" * 100_000)
    target.parent.mkdir()
    target.write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(StoreError, match="cannot write"):
            copy_results(str(source), target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert target.read_text() == "before"
    assert list(target.parent.iterdir()) == [target]
    copy_results(str(source), target)
    assert target.read_bytes() == source.read_bytes()


def test_a_pipe_and_the_file_behind_a_link_are_written_as_they_are(tmp_path: Path) -> None:
    source, pipe, link, file = (tmp_path / name for name in ("results.jsonl", "pipe", "link", "file"))
    source.write_text("x")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        copy_results(str(source), pipe)
        assert os.read(reader, 9) == b"x"
    finally:
        os.close(reader)
    file.write_text("before")
    link.symlink_to(file)
    copy_results(str(source), link)
    assert link.is_symlink()
    assert file.read_text() == "x"


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    source, target = tmp_path / "results.jsonl", tmp_path / "copy.jsonl"
    source.write_text("x")
    target.touch()
    target.chmod(0o600)
    copy_results(str(source), target)
    assert target.stat().st_mode & 0o777 == 0o600
