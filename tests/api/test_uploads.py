"""`/v1/uploads`: the official client's way through, bad input, limits, tenants, and a kill."""

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis
from openai.types import Upload
from openai.types.uploads import UploadPart

from api.routes import uploads as routes
from api.settings import ApiSettings
from jobs.protocol.validation import decode_body
from jobs.store.api_keys import create_key
from jobs.store.upload_store import PART_BYTES
from tests.api.test_file_limits import api_process, peak_bytes
from tests.api.test_files import END, KIND, Socket, check_error, part
from tests.support.api_server import official_client, running_api
from tests.support.waiting import wait_until

LINES = b'{"custom_id":"a"}\n{"custom_id":"b"}\n'
NEW = {"bytes": len(LINES), "filename": "in.jsonl", "mime_type": "application/jsonl", "purpose": "batch"}


@pytest.fixture
def api_url(redis_url: str, tmp_path: Path) -> Iterator[str]:
    """An API that takes batch files of up to 100 bytes."""
    settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path / "store"), max_file_bytes=100)
    with running_api(settings) as url:
        yield url


def create(client: openai.OpenAI, **changes: Any) -> Upload:
    return client.uploads.create(**(NEW | changes))


def parts_in(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "store" / "uploads").glob("*/*part*")]


def test_the_official_client_s_way_through(client: openai.OpenAI, tmp_path: Path) -> None:
    upload = create(client, expires_after={"anchor": "created_at", "seconds": 7200})
    assert Upload.model_validate(upload.model_dump(), strict=True) == upload
    assert upload.model_dump() == {
        "id": upload.id,
        "object": "upload",
        "bytes": len(LINES),
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "pending",
        "created_at": upload.created_at,
        "expires_at": upload.created_at + 3600,
        "file": None,
    }
    assert abs(upload.created_at - time.time()) < 60
    second = client.uploads.parts.create(upload.id, data=LINES[20:])
    first = client.uploads.parts.create(upload.id, data=("any name", LINES[:20]))
    assert UploadPart.model_validate(first.model_dump(), strict=True) == first
    assert (first.object, first.upload_id) == ("upload.part", upload.id)
    assert client.files.list().data == []
    done = client.uploads.complete(upload.id, part_ids=[first.id, second.id], md5=hashlib.md5(LINES).hexdigest())
    assert (done.id, done.status) == (upload.id, "completed")
    assert done.file is not None
    assert client.files.list().data == [client.files.retrieve(done.file.id)] == [done.file]
    assert done.file.expires_at == done.file.created_at + 7200
    assert client.files.content(done.file.id).content == LINES
    assert client.uploads.complete(upload.id, part_ids=[first.id, second.id]) == done
    assert parts_in(tmp_path) == []
    batch = client.batches.create(input_file_id=done.file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert batch.input_file_id == done.file.id


def test_a_file_in_chunks(client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(LINES)
    done = client.uploads.upload_file_chunked(file=path, mime_type="application/jsonl", purpose="batch", part_size=5)
    assert done.file is not None
    assert client.files.content(done.file.id).content == LINES


def test_a_cancelled_upload_has_no_parts_and_no_file(client: openai.OpenAI, tmp_path: Path) -> None:
    upload = create(client)
    part_id = client.uploads.parts.create(upload.id, data=LINES).id
    for _ in range(2):
        cancelled = client.uploads.cancel(upload.id)
        assert (cancelled.status, cancelled.file) == ("cancelled", None)
    assert parts_in(tmp_path) == []
    for call in (
        lambda: client.uploads.complete(upload.id, part_ids=[part_id]),
        lambda: client.uploads.parts.create(upload.id, data=LINES),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            call()
        assert caught.value.code == "upload_cancelled"
    assert client.files.list().data == []


def test_parts_are_sent_side_by_side(client: openai.OpenAI) -> None:
    pieces = [b"%03d\n" % number for number in range(40)]
    upload = create(client, bytes=160, purpose="user_data", filename="numbers.txt")
    with ThreadPoolExecutor(8) as threads:
        made = threads.map(lambda piece: client.uploads.parts.create(upload.id, data=piece).id, pieces)
        done = client.uploads.complete(upload.id, part_ids=list(made))
    assert done.file is not None
    assert (done.file.expires_at, done.file.purpose) == (None, "user_data")
    assert client.files.content(done.file.id).content == b"".join(pieces)


@pytest.mark.parametrize("end", ["", "/complete"])
def test_a_body_is_read_off_the_event_loop(
    http: httpx.Client, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    upload = create(client)
    path, body = ("/v1/uploads", NEW) if not end else (f"/v1/uploads/{upload.id}{end}", {"part_ids": ["x"] * 9_000})
    reading, other_was_answered = threading.Event(), threading.Event()

    def read_slowly(raw: bytes) -> Any:
        reading.set()
        assert other_was_answered.wait(60)
        return decode_body(raw)

    monkeypatch.setattr(routes, "decode_body", read_slowly)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(http.post, path, json=body, timeout=120)
        assert reading.wait(60)
        assert client.files.list(timeout=30).data == []
        other_was_answered.set()
        assert answer.result().status_code == (400 if end else 200)


BAD_NEW: list[tuple[dict[str, Any], int, str | None, str | None]] = [
    ({"bytes": None}, 400, "missing_required_parameter", "bytes"),
    ({"bytes": 0}, 400, "integer_below_min_value", "bytes"),
    ({"bytes": "8"}, 400, "invalid_type", "bytes"),
    ({"bytes": 101}, 413, "request_too_large", "bytes"),
    ({"bytes": 10**400}, 400, "integer_above_max_value", "bytes"),
    ({"bytes": 2**29 + 1, "purpose": "vision"}, 413, "request_too_large", "bytes"),
    ({"filename": None}, 400, "missing_required_parameter", "filename"),
    ({"filename": "a/.."}, 400, "invalid_value", "filename"),
    ({"filename": "a\0.jsonl"}, 400, "invalid_value", "filename"),
    ({"filename": "a" * 300 + ".jsonl"}, 400, "string_above_max_length", "filename"),
    ({"filename": "in.csv"}, 400, None, None),
    ({"mime_type": None}, 400, "missing_required_parameter", "mime_type"),
    ({"mime_type": ["text"]}, 400, "invalid_type", "mime_type"),
    ({"purpose": None}, 400, "missing_required_parameter", "purpose"),
    ({"purpose": "batch_output"}, 400, "invalid_value", "purpose"),
    (
        {"expires_after": {"anchor": "created_at", "seconds": 1}},
        400,
        "integer_below_min_value",
        "expires_after.seconds",
    ),
]


@pytest.mark.parametrize(("changes", "status", "code", "param"), BAD_NEW)
def test_a_bad_upload_is_named(
    http: httpx.Client, changes: dict[str, Any], status: int, code: str | None, param: str | None
) -> None:
    check_error(http.post("/v1/uploads", json=NEW | changes), status, code, param)


def test_bad_parts_and_completions_are_named(http: httpx.Client, client: openai.OpenAI, tmp_path: Path) -> None:
    path = f"/v1/uploads/{create(client).id}"

    def send(*parts: bytes) -> httpx.Response:
        return http.post(f"{path}/parts", content=b"".join(parts) + END, headers=KIND)

    check_error(send(part("other", b"x")), 400, "missing_required_parameter", "data")
    check_error(send(part("data", b"", "x")), 400, "empty_file", "data")
    check_error(send(part("data", b"x", "x"), part("data", b"y", "x")), 400, "invalid_value", "data")
    check_error(http.post(f"{path}/parts", json={}), 400, "invalid_content_type", None)
    assert parts_in(tmp_path) == []
    part_id = send(part("data", LINES)).json()["id"]  # a name is not needed
    for body, code, param in (
        ({}, "missing_required_parameter", "part_ids"),
        ({"part_ids": []}, "empty_array", "part_ids"),
        ({"part_ids": part_id}, "invalid_type", "part_ids"),
        ({"part_ids": [part_id, 7]}, "invalid_type", "part_ids[1]"),
        ({"part_ids": ["a" * 24]}, "invalid_value", "part_ids[0]"),
        ({"part_ids": [part_id, part_id]}, "invalid_value", "part_ids"),
        ({"part_ids": [part_id], "md5": "d41d"}, "invalid_value", "md5"),
        ({"part_ids": [part_id], "md5": "0" * 32}, "invalid_value", "md5"),
    ):
        check_error(http.post(f"{path}/complete", json=body), 400, code, param)
    assert http.post(f"{path}/complete", json={"part_ids": [part_id], "md5": None}).status_code == 200


def test_what_no_batch_can_read_is_refused_as_that_of_one_upload(http: httpx.Client, client: openai.OpenAI) -> None:
    upload = create(client)
    data = b"not json\n".ljust(len(LINES))
    part_id = client.uploads.parts.create(upload.id, data=data).id
    joined = http.post(f"/v1/uploads/{upload.id}/complete", json={"part_ids": [part_id]})
    whole = http.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"})
    assert (joined.status_code, joined.json()) == (400, whole.json())
    assert client.files.list().data == []


def test_a_part_above_the_limit_is_refused_before_it_comes(api_url: str, client: openai.OpenAI) -> None:
    upload = create(client)
    with Socket(api_url).socket as bare:
        length = PART_BYTES + 300_000
        head = f"POST /v1/uploads/{upload.id}/parts HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n"
        bare.sendall(f"{head}content-type: {KIND['content-type']}\r\n\r\n".encode())
        assert bare.recv(12) == b"HTTP/1.1 413"


def test_a_client_that_stops_in_the_middle_leaves_no_part(api_url: str, client: openai.OpenAI, tmp_path: Path) -> None:
    upload = create(client, bytes=2**28, purpose="vision")
    with Socket(api_url).socket as bare:
        head = f"POST /v1/uploads/{upload.id}/parts HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3000000\r\n"
        bare.sendall(f"{head}content-type: {KIND['content-type']}\r\n\r\n".encode())
        bare.sendall(part("data", b"x" * 1_500_000, "x")[:-2])
        wait_until(lambda: parts_in(tmp_path) != [], 60, "the part has begun")
    wait_until(lambda: parts_in(tmp_path) == [], 60, "nothing stays behind")
    assert client.uploads.cancel(upload.id).status == "cancelled"


def test_another_tenant_s_upload_is_unknown(api_url: str, tmp_path: Path) -> None:
    blue, green = (create_key(str(tmp_path / "store"), tenant=tenant)[1] for tenant in ("blue", "green"))
    with official_client(api_url, blue) as owner, official_client(api_url, green) as other:
        upload = create(owner)
        for call in (
            lambda: other.uploads.parts.create(upload.id, data=LINES),
            lambda: other.uploads.complete(upload.id, part_ids=["part"]),
            lambda: other.uploads.cancel(upload.id),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                call()
            assert caught.value.param == "upload_id"
        assert owner.uploads.cancel(upload.id).status == "cancelled"


@pytest.mark.parametrize(
    "upload_id", ["upload_", "upload_" + "0" * 24, "%2e%2e", "file-..%2f..%2fx", "x" * 3000, "%ff"]
)
def test_ids_that_are_none(http: httpx.Client, upload_id: str) -> None:
    for path, body in (("complete", {"part_ids": ["x"]}), ("cancel", None)):
        answer = http.post(f"/v1/uploads/{upload_id}/{path}", json=body)
        assert answer.status_code == 404
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_the_store_is_not_mounted(http: httpx.Client, client: openai.OpenAI, tmp_path: Path) -> None:
    upload = create(client)
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").mkdir()
    for path, body in (("", NEW), (f"/{upload.id}/complete", {"part_ids": ["x"]}), (f"/{upload.id}/cancel", None)):
        assert http.post(f"/v1/uploads{path}", json=body).status_code == 503
    (tmp_path / "store").rmdir()
    (tmp_path / "away").rename(tmp_path / "store")
    assert client.uploads.cancel(upload.id).status == "cancelled"


@pytest.mark.proof
def test_an_upload_goes_on_after_its_api_process_was_killed(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    """On another one, and with an empty Redis."""
    store = tmp_path / "store"
    with api_process(redis_url, store) as (url, api), official_client(url) as client:
        upload = create(client)
        first = client.uploads.parts.create(upload.id, data=LINES[:20]).id
        api.process.kill()
        api.process.wait()
    redis_client.flushall()
    with api_process(redis_url, store) as (url, _), official_client(url) as client:
        second = client.uploads.parts.create(upload.id, data=LINES[20:]).id
        done = client.uploads.complete(upload.id, part_ids=[first, second])
        assert done.file is not None
        assert client.files.content(done.file.id).content == LINES
        assert client.files.list().data == [done.file]


@pytest.mark.proof
def test_memory_does_not_grow_with_the_parts(redis_url: str, redis_client: redis.Redis, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 60
    with api_process(redis_url, tmp_path / "store") as (url, api), official_client(url) as client:
        small = create(client, bytes=3, purpose="vision", filename="x")
        client.uploads.complete(small.id, part_ids=[client.uploads.parts.create(small.id, data=b"abc").id])
        before = peak_bytes(api)
        upload = create(client, bytes=3 * len(data), purpose="vision", filename="x")
        ids = [client.uploads.parts.create(upload.id, data=data).id for _ in range(3)]
        done = client.uploads.complete(upload.id, part_ids=ids, md5=hashlib.md5(data * 3).hexdigest())
        assert done.status == "completed"
        assert peak_bytes(api) - before < 32e6
