"""Files and batches over HTTP, of a file store in a bucket."""

import asyncio
import gzip
from collections.abc import Iterator
from typing import Any

import httpx
import obstore
import openai
import pytest
import redis
from obstore.exceptions import GenericError

from api.app import create_app
from api.settings import ApiSettings
from jobs.store import object_storage
from jobs.store.storage import list_names
from tests.support.api_server import running_api
from tests.support.batch_steps import run_to_end
from tests.support.control_plane import failing
from tests.support.object_stores import Bucket, bucket
from tests.support.store_batches import lines_of, serve
from tests.support.waiting import wait_until

LINES = lines_of(20)


@pytest.fixture
def remote() -> Iterator[Bucket]:
    """The bucket of the API."""
    with bucket() as found:
        yield found


@pytest.fixture
def api_url(redis_url: str, remote: Bucket) -> Iterator[str]:
    """The address that `client` and `http` call: of an API with a bucket."""
    with running_api(ApiSettings(redis_url=redis_url, file_store=remote.uri)) as url:
        yield url


def test_a_start_asks_the_bucket_nothing_once_its_event_loop_runs(redis_url: str, remote: Bucket) -> None:
    """A failure there would end the process with a traceback."""
    app = create_app(ApiSettings(redis_url=redis_url, file_store=remote.uri))
    remote.server.denied = True

    async def start() -> None:
        async with app.router.lifespan_context(app):
            pass

    asyncio.run(start())


def test_ranges_of_a_content(client: openai.OpenAI, http: httpx.Client) -> None:
    content = LINES * 1000  # of several requests
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    path = f"/v1/files/{file.id}/content"
    assert client.files.content(file.id).read() == content
    for start, end in ((5, 9), (len(content) - 3, len(content) - 1), (1 << 19, 3 << 19)):
        answer = http.get(path, headers={"range": f"bytes={start}-{end}"})
        assert (answer.status_code, answer.content) == (206, content[start : end + 1])
    assert http.get(path, headers={"range": f"bytes={len(content)}-"}).status_code == 416
    several = http.get(path, headers={"range": "bytes=0-1,5-6"})
    assert several.headers["content-type"].startswith("multipart/byteranges")
    assert content[5:7] in several.content
    client.files.delete(file.id)
    assert http.get(path).status_code == 404


def test_a_content_that_cannot_be_read_is_answered_503(
    client: openai.OpenAI, http: httpx.Client, remote: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    path = f"/v1/files/{client.files.create(file=('in.jsonl', LINES), purpose='batch').id}/content"
    remote.server.refused = f"GET /store/files/{path.split('/')[3]}/content"
    for headers in ({}, {"range": "bytes=0-1"}, {"range": "bytes=0-1,3-4"}, {"range": "of no kind"}):
        answer = http.get(path, headers=headers)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "file_store_unavailable"
    assert "/content: AccessDenied" in caplog.text
    remote.server.refused = ""
    assert http.get(path).content == LINES


def test_a_content_that_cannot_be_read_to_its_end_is_cut_off(
    client: openai.OpenAI, http: httpx.Client, remote: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    content = LINES * (40_000_000 // len(LINES))  # more than is on its way to a client that reads nothing
    path = f"/v1/files/{client.files.create(file=('in.jsonl', content), purpose='batch').id}/content"
    with http.stream("GET", path) as answer:
        assert answer.status_code == 200
        remote.server.refused = "GET /store/files"
        with pytest.raises(httpx.RemoteProtocolError):
            answer.read()
    wait_until(lambda: "is cut off: cannot read s3://store/files/" in caplog.text, 60, "the log")
    assert "Traceback" not in caplog.text
    remote.server.refused = ""
    assert http.get(path).content == content


def test_lines_of_a_batch_that_cannot_be_read_are_answered_503(
    client: openai.OpenAI, http: httpx.Client, redis_client: redis.Redis, remote: Bucket
) -> None:
    serve(redis_client, "m")
    file = client.files.create(file=("in.jsonl", LINES), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    run_to_end(redis_client, made.id)
    path = f"/v1/files/{client.batches.retrieve(made.id).output_file_id}/content"
    object_storage._cache._objects.clear()  # as of another process than wrote them
    remote.server.refused = f"GET /store/batches/{made.id}/log"
    assert http.get(path, params={"limit": 5}).status_code == 503
    remote.server.refused = ""
    assert len(http.get(path, params={"limit": 5}).content.splitlines()) == 5


@pytest.mark.parametrize("key", [{}, {"idempotency-key": "k"}])
def test_a_batch_that_may_have_been_made(
    client: openai.OpenAI, http: httpx.Client, remote: Bucket, monkeypatch: pytest.MonkeyPatch, key: dict[str, str]
) -> None:
    """The answer to its manifest is lost, then all. With a key, the repeated call finds it."""
    file = client.files.create(file=("in.jsonl", LINES), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    put = obstore.put

    def lose(store: Any, path: str, *arguments: Any, **options: Any) -> Any:
        answer = put(store, path, *arguments, **options)
        if path.endswith("manifest.json") and not remote.server.denied:
            remote.server.denied = True
            raise GenericError("error sending request")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", lose)
        answer = http.post("/v1/batches", json=asked, headers=key)
    assert answer.status_code == 503
    assert answer.headers.get("x-should-retry") == (None if key else "false")
    assert ("may exist" in answer.json()["error"]["message"]) == (not key)
    remote.server.denied = False
    [made] = list_names(f"{remote.uri}/batches")
    if key:
        assert http.post("/v1/batches", json=asked, headers=key).json()["id"] == made


def test_a_batch_and_its_results(client: openai.OpenAI, http: httpx.Client, redis_client: redis.Redis) -> None:
    serve(redis_client, "m")
    file = client.files.create(file=("in.jsonl", LINES), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    made = [http.post("/v1/batches", json=asked, headers={"idempotency-key": "k"}) for _ in range(2)]
    assert made[0].json()["id"] == made[1].json()["id"]
    run_to_end(redis_client, made[0].json()["id"], failing(3))
    batch = client.batches.retrieve(made[0].json()["id"])
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 19, 1)
    output = client.files.content(batch.output_file_id or "").read()
    assert len(output.splitlines()) == 19
    some = http.get(f"/v1/files/{batch.output_file_id}/content", params={"offset": 3, "limit": 2})
    assert some.headers["x-last-line"] == "5"
    assert set(some.content.splitlines()) < set(output.splitlines())
    assert len(client.files.content(batch.error_file_id or "").read().splitlines()) == 1


def test_a_compressed_file_and_a_retry_of_its_failed_lines(
    client: openai.OpenAI, http: httpx.Client, redis_client: redis.Redis
) -> None:
    serve(redis_client, "m")
    file = client.files.create(file=("in.jsonl.gz", gzip.compress(LINES)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    run_to_end(redis_client, batch.id, failing(3))
    retried = http.post(f"/v1/batches/{batch.id}/retry").json()
    run_to_end(redis_client, retried["id"])
    counts = client.batches.retrieve(retried["id"]).request_counts
    assert counts is not None
    assert (counts.total, counts.completed) == (1, 1)
    client.delete(f"/batches/{batch.id}", cast_to=object)
    assert http.get(f"/v1/batches/{batch.id}").status_code == 404
