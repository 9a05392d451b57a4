"""What clients and operators see while the file store is not mounted, or not the right one."""

import shutil
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis

from jobs.batch import client as batch_client
from jobs.batch.client import BatchRecord, get_batch
from jobs.queue.request_queue import Queue
from jobs.store.marker import MARKER, open_store
from tests.support.commands import run_pipeline
from tests.support.control_plane import chat_line
from tests.support.store_batches import serve

pytestmark = pytest.mark.proof

AWAY = "The file store is not mounted at the moment, so nothing can be said of its files; try again."
BODY = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}


def test_calls_that_need_the_store_get_a_503_and_nothing_is_lost(
    redis_client: redis.Redis, client: openai.OpenAI, http: httpx.Client, tmp_path: Path
) -> None:
    serve(redis_client, "m")
    file = client.files.create(file=("in.jsonl", chat_line("a")), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, **BODY)  # type: ignore[arg-type]
    store, away = tmp_path / "store", tmp_path / "away"
    store.rename(away)
    store.mkdir()
    calls = [
        ("GET", "/v1/files"),
        ("GET", f"/v1/files/{file.id}"),
        ("GET", f"/v1/files/{file.id}/content"),
        ("DELETE", f"/v1/files/{file.id}"),
        ("POST", f"/v1/batches/{batch.id}/cancel"),
        ("GET", "/v1/batches/batch_0123456789abcdef01234567"),
    ]
    for method, path in calls:
        answer = http.request(method, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["message"]) == (503, "file_store_unavailable", AWAY), path
        assert answer.headers["retry-after"] == "1"
    with pytest.raises(openai.InternalServerError, match="not mounted"):
        client.batches.create(input_file_id=file.id, **BODY)  # type: ignore[arg-type]
    assert http.get(f"/v1/batches/{batch.id}").status_code == 200
    store.rmdir()
    away.rename(store)
    assert [one.id for one in client.files.list()] == [file.id]
    assert client.batches.retrieve(batch.id).status == "validating"


def test_a_batch_whose_folder_is_gone_can_be_cancelled(
    redis_client: redis.Redis, client: openai.OpenAI, tmp_path: Path
) -> None:
    serve(redis_client, "m")
    file = client.files.create(file=("in.jsonl", chat_line("a")), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, **BODY)  # type: ignore[arg-type]
    shutil.rmtree(tmp_path / "store" / "batches" / batch.id)
    ended = client.batches.cancel(batch.id)
    assert (ended.status, ended.output_file_id) == ("cancelled", None)
    assert ended.errors is not None
    assert [error.code for error in ended.errors.data or []] == ["batch_lost"]


def test_a_cancel_is_refused_where_redis_comes_back_empty_as_it_is_asked_for(
    redis_client: redis.Redis, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(redis_client, "m")
    file = client.files.create(file=("in.jsonl", chat_line("a")), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, **BODY)  # type: ignore[arg-type]

    def get_and_lose(*arguments: Any) -> BatchRecord:
        record = get_batch(*arguments)
        redis_client.flushall()
        return record

    monkeypatch.setattr(batch_client, "get_batch", get_and_lose)
    with pytest.raises(openai.InternalServerError) as refused:
        client.batches.cancel(batch.id)
    assert (refused.value.status_code, refused.value.code) == (503, "queue_unavailable")


@pytest.mark.parametrize("command", ["api", "jobs", "serve"])
def test_a_second_store_is_refused_at_the_start(
    command: str, redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    open_store(Queue(redis_client), tmp_path / "one")
    known = (tmp_path / "one" / MARKER).read_text().strip()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / MARKER).write_text("store_0123\n")
    done = run_pipeline(command, "--file-store", tmp_path / "other", redis_url=redis_url)
    assert done.returncode == 1
    assert f"other is store_0123, and that of this Redis is {known}: name the one folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_forget_asks_and_refuses_in_one_sentence(
    redis_client: redis.Redis, redis_url: str, client: openai.OpenAI, tmp_path: Path
) -> None:
    serve(redis_client, "m")
    file = client.files.create(file=("in.jsonl", chat_line("a")), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, **BODY).id  # type: ignore[arg-type]
    forget = ("batches", "forget", batch, "--file-store", tmp_path / "store")
    asked = run_pipeline(*forget, redis_url=redis_url)
    assert (asked.returncode, "for good? [y/N]" in asked.stderr) == (130, True)
    refused = run_pipeline(*forget, "--yes", redis_url=redis_url)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == f"Error: {batch} is validating and runs well: cancel it first"
    client.batches.cancel(batch)
    done = run_pipeline(*forget, "--yes", redis_url=redis_url)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        0,
        f"{batch} is forgotten; its result files stay until they expire",
    )
    assert client.batches.list().data == []
