"""`/v1/files` as clients use it: the official one, plain HTTP, and bare sockets that stop in the
middle.
"""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import redis
from openai.types import FileObject

from api.http import lingering
from api.settings import ApiSettings
from jobs.batch.client import get_batch
from jobs.batch.retention import forget_output
from jobs.batch.submit import BatchSubmission, submit_batch
from jobs.control import slices
from jobs.protocol.ids import FILE, new_id
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from jobs.store.api_keys import create_key
from jobs.store.file_store import BATCH_FILE_SECONDS, FileRecord, FileStore
from tests.support.api_server import running_api
from tests.support.batch_steps import answer_all, run_to_end, step
from tests.support.control_plane import failing, write_input
from tests.support.redis_server import running_server
from tests.support.waiting import wait_until

LINES = b'{"custom_id":"a"}\n{"custom_id":"b"}\n'
BOUNDARY = "xYzZY"


@pytest.fixture
def store(queue: Queue, tmp_path: Path) -> FileStore:
    """The store of the API, looked at from beside it."""
    return FileStore(queue, str(tmp_path / "store"), forget_output)


@pytest.fixture
def api_url(redis_url: str, store: FileStore) -> Iterator[str]:
    """An API that takes batch files of up to 3 MB."""
    with api_on(redis_url, store) as url:
        yield url


@contextmanager
def api_on(redis_url: str, store: FileStore, **settings: Any) -> Iterator[str]:
    values = {"max_file_bytes": 3_000_000, **settings}
    with running_api(ApiSettings(redis_url=redis_url, file_store=str(store.root), **values)) as url:
        yield url


def left(store: FileStore) -> list[str]:
    """What is in the store."""
    folder = store.root / "files"
    return sorted(os.listdir(folder)) if folder.exists() else []


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    disposition = f'form-data; name="{name}"' + ("" if filename is None else f'; filename="{filename}"')
    return b"--%b\r\nContent-Disposition: %b\r\n\r\n%b\r\n" % (BOUNDARY.encode(), disposition.encode(), content)


END = f"--{BOUNDARY}--\r\n".encode()
FILE_PART = part("file", LINES, "in.jsonl")
PURPOSE_PART = part("purpose", b"batch")
KIND = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def upload(http: httpx.Client, *parts: bytes, end: bytes = END, headers: Mapping[str, str] = KIND) -> httpx.Response:
    return http.post("/v1/files", content=b"".join(parts) + end, headers=headers)


def check_error(answer: httpx.Response, status: int, code: str | None, param: str | None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert error["message"]
    return error


def test_the_official_client_s_way_through(client: openai.OpenAI, store: FileStore) -> None:
    file = client.files.create(file=("in.jsonl", LINES), purpose="batch")
    assert FileObject.model_validate(file.model_dump(), strict=True) == file
    assert (file.object, file.filename, file.bytes, file.purpose, file.status) == (
        "file",
        "in.jsonl",
        len(LINES),
        "batch",
        "processed",
    )
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == BATCH_FILE_SECONDS
    assert abs(file.created_at - time.time()) < 60
    assert client.files.retrieve(file.id) == file
    assert client.files.wait_for_processing(file.id) == file
    content = client.files.content(file.id)
    assert content.content == LINES
    assert content.response.headers["content-disposition"] == 'attachment; filename="in.jsonl"'
    assert [listed.id for listed in client.files.list()] == [file.id]
    deleted = client.files.delete(file.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (file.id, "file", True)
    assert list(client.files.list()) == []
    assert left(store) == []
    for use in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(openai.NotFoundError) as caught:
            use(file.id)
        assert caught.value.param == "id"


def test_nulls_are_there(http: httpx.Client) -> None:
    body = upload(http, part("purpose", b"evals"), FILE_PART).json()
    assert set(body) == set(FileObject.model_fields)
    assert (body["expires_at"], body["status_details"], body["purpose"]) == (None, None, "evals")


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_the_parts_come_in_any_order(http: httpx.Client, order: tuple[int, ...]) -> None:
    parts = [
        FILE_PART,
        PURPOSE_PART,
        part("expires_after[anchor]", b"created_at"),
        part("expires_after[seconds]", b"3600"),
    ]
    answer = upload(http, *(parts[number] for number in order), part("something else", b"\0" * 10_000, "x"), b"")
    assert answer.status_code == 200, answer.text
    file = answer.json()
    assert (file["bytes"], file["expires_at"]) == (len(LINES), file["created_at"] + 3600)
    assert http.get(f"/v1/files/{file['id']}/content").content == LINES


def test_the_official_client_s_expiry(client: openai.OpenAI) -> None:
    file = client.files.create(
        file=("in.jsonl", LINES), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 2_592_000}
    )
    assert file.expires_at == file.created_at + 2_592_000


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("../../etc/passwd.jsonl", "passwd.jsonl"),
        ("/a/b.jsonl", "b.jsonl"),
        ("C:\\\\x\\\\y.jsonl", "y.jsonl"),
        ("Fragen für heute 質問.jsonl", "Fragen für heute 質問.jsonl"),
        ("a;b=c.JSONL", "a;b=c.JSONL"),
        ("👩\u200d🚀.jsonl", "👩\u200d🚀.jsonl"),
    ],
)
def test_of_a_path_the_name_is_kept(http: httpx.Client, store: FileStore, sent: str, kept: str) -> None:
    answer = upload(http, part("file", LINES, sent), PURPOSE_PART)
    assert answer.json()["filename"] == kept
    assert left(store) == [answer.json()["id"]]
    content = http.get(f"/v1/files/{answer.json()['id']}/content")
    assert content.content == LINES
    assert content.headers["content-disposition"].startswith("attachment; filename")


@pytest.mark.parametrize(
    ("name", "magic"),
    [("in.jsonl.gz", b"\x1f\x8b"), ("in.jsonl.zst", b"\x28\xb5\x2f\xfd"), ("in.parquet", b"PAR1"), ("in.pq", b"PAR1")],
)
def test_what_else_a_batch_can_read(client: openai.OpenAI, name: str, magic: bytes) -> None:
    content = magic + bytes(range(256)) * 20 + b"\r\n--xYz\r\n-"
    file = client.files.create(file=(name, content), purpose="batch")
    assert client.files.content(file.id).content == content


BAD: dict[str, tuple[list[bytes], int, str | None, str | None]] = {
    "no file": ([PURPOSE_PART], 400, "missing_required_parameter", "file"),
    "nothing": ([], 400, "missing_required_parameter", "file"),
    "two files": ([PURPOSE_PART, FILE_PART, FILE_PART], 400, "invalid_value", "file"),
    "an empty part": ([PURPOSE_PART, part("file", b"", "")], 400, "missing_required_parameter", "file"),
    "a field": ([PURPOSE_PART, part("file", LINES)], 400, "missing_required_parameter", "file"),
    "0 bytes": ([part("file", b"", "in.jsonl"), PURPOSE_PART], 400, None, None),
    "0 bytes of another purpose": ([part("file", b"", "in"), part("purpose", b"vision")], 400, "empty_file", "file"),
    "wrong suffix": ([PURPOSE_PART, part("file", LINES, "in.json")], 400, None, None),
    "wrong suffix, purpose behind": ([part("file", LINES, "in.txt"), PURPOSE_PART], 400, None, None),
    "no name": ([PURPOSE_PART, part("file", LINES, "a/..")], 400, "invalid_value", "file"),
    "a name of control characters": ([PURPOSE_PART, part("file", LINES, "a\0.jsonl")], 400, "invalid_value", "file"),
    "a long name": ([PURPOSE_PART, part("file", LINES, "a" * 300 + ".jsonl")], 400, "string_above_max_length", "file"),
    "no purpose": ([FILE_PART], 400, "missing_required_parameter", "purpose"),
    "unknown purpose": ([part("purpose", b"fun"), FILE_PART], 400, "invalid_value", "purpose"),
    "a purpose of results": ([FILE_PART, part("purpose", b"batch_output")], 400, "invalid_value", "purpose"),
    "purpose twice": ([PURPOSE_PART, PURPOSE_PART, FILE_PART], 400, "invalid_value", "purpose"),
    "a long purpose": ([part("purpose", b"b" * 10_000), FILE_PART], 400, "string_above_max_length", "purpose"),
    "a purpose of no text": ([part("purpose", b"\xff\xfe"), FILE_PART], 400, "invalid_value", "purpose"),
    "anchor alone": (
        [FILE_PART, PURPOSE_PART, part("expires_after[anchor]", b"created_at")],
        400,
        "missing_required_parameter",
        "expires_after[seconds]",
    ),
    "seconds alone": (
        [part("expires_after[seconds]", b"3600"), FILE_PART, PURPOSE_PART],
        400,
        "missing_required_parameter",
        "expires_after[anchor]",
    ),
    "another anchor": (
        [FILE_PART, PURPOSE_PART, part("expires_after[anchor]", b"now")],
        400,
        "invalid_value",
        "expires_after[anchor]",
    ),
    "too soon": (
        [FILE_PART, PURPOSE_PART, part("expires_after[seconds]", b"3599")],
        400,
        "integer_below_min_value",
        "expires_after[seconds]",
    ),
    "too late": (
        [part("expires_after[seconds]", b"2592001"), FILE_PART, PURPOSE_PART],
        400,
        "integer_above_max_value",
        "expires_after[seconds]",
    ),
    "no number": (
        [FILE_PART, PURPOSE_PART, part("expires_after[seconds]", b"1e5")],
        400,
        "invalid_type",
        "expires_after[seconds]",
    ),
    "a part without a name": (
        [FILE_PART, b"--xYzZY\r\nContent-Type: text/plain\r\n\r\nbatch\r\n"],
        400,
        "invalid_multipart",
        None,
    ),
    "a header that is none": ([FILE_PART, b"--xYzZY\r\nnonsense\r\n\r\nbatch\r\n"], 400, "invalid_multipart", None),
    "an extended name alone": (
        [PURPOSE_PART, part("file", LINES, "in.jsonl").replace(b"filename=", b"filename*=utf-8''")],
        400,
        "invalid_multipart",
        None,
    ),
    "many parts": ([part(f"x{number}", b"") for number in range(100)], 400, "invalid_multipart", None),
    "a batch's file over the limit": (
        [PURPOSE_PART, part("file", b"x" * 3_000_001, "in.jsonl")],
        413,
        "request_too_large",
        "file",
    ),
    "the same, purpose behind": (
        [part("file", b"x" * 3_000_001, "in.jsonl"), PURPOSE_PART],
        413,
        "request_too_large",
        "file",
    ),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, FileStore]]:
    """One API for all bad input, none of which may leave anything."""
    from jobs.queue.connection import connect

    with running_server() as server:
        store = FileStore(Queue(connect(server.url)), str(tmp_path_factory.mktemp("bad")), forget_output)
        with api_on(server.url, store) as url, httpx.Client(base_url=url, timeout=60) as http:
            yield http, store


@pytest.mark.parametrize("case", BAD)
def test_a_bad_form_is_named_and_leaves_nothing(shared: tuple[httpx.Client, FileStore], case: str) -> None:
    http, store = shared
    parts, status, code, param = BAD[case]
    check_error(upload(http, *parts), status, code, param)
    wait_until(lambda: left(store) == [], 60, "nothing stays behind")


@pytest.mark.parametrize(
    ("content", "kind", "code"),
    [
        (b"{}", "application/json", "invalid_content_type"),
        (b"", "", "invalid_content_type"),
        (FILE_PART + PURPOSE_PART + END, "multipart/form-data", "invalid_multipart"),
        (FILE_PART + PURPOSE_PART + END, "multipart/form-data; boundary=another", "invalid_multipart"),
        (FILE_PART + PURPOSE_PART + END, f"multipart/form-data; boundary={'x' * 2000}", "invalid_multipart"),
        (PURPOSE_PART + FILE_PART, KIND["content-type"], "invalid_multipart"),
        (PURPOSE_PART + FILE_PART[:-20], KIND["content-type"], "invalid_multipart"),
        (b"--xYzZY\r\n" + b"A" * 100_000 + b": b\r\n\r\n", KIND["content-type"], "invalid_multipart"),
        (b"", KIND["content-type"], "invalid_multipart"),
        (b"nonsense", KIND["content-type"], "invalid_multipart"),
    ],
)
def test_what_is_no_form_is_named(shared: tuple[httpx.Client, FileStore], content: bytes, kind: str, code: str) -> None:
    http, store = shared
    check_error(http.post("/v1/files", content=content, headers={"content-type": kind}), 400, code, None)
    wait_until(lambda: left(store) == [], 60, "nothing stays behind")


NO_IDS = ["file-", "batch_" + "0" * 24, "file-" + "0" * 24, "%2e%2e", "file-..%2f..%2fx", "x" * 3000, "%00", "%ff"]


@pytest.mark.parametrize("file_id", NO_IDS)
def test_ids_that_are_none(shared: tuple[httpx.Client, FileStore], file_id: str) -> None:
    http, _ = shared
    for answer in (
        http.get(f"/v1/files/{file_id}"),
        http.delete(f"/v1/files/{file_id}"),
        http.get(f"/v1/files/{file_id}/content"),
    ):
        assert answer.status_code == 404
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("limit=0", "integer_below_min_value", "limit"),
        ("limit=10001", "integer_above_max_value", "limit"),
        ("limit=-1", "integer_below_min_value", "limit"),
        ("limit=ten", "invalid_value", "limit"),
        ("limit=", "invalid_value", "limit"),
        (f"limit={'9' * 5000}", "invalid_value", "limit"),
        ("order=up", "invalid_value", "order"),
        ("after=2", "invalid_value", "after"),
        ("after=batch_000000000000000000000000", "invalid_value", "after"),
    ],
)
def test_a_bad_query_is_named(shared: tuple[httpx.Client, FileStore], query: str, code: str, param: str) -> None:
    check_error(shared[0].get(f"/v1/files?{query}"), 400, code, param)


def test_the_client_pages_through_a_moving_list(client: openai.OpenAI) -> None:
    made = [client.files.create(file=("in.jsonl", LINES), purpose="batch").id for _ in range(5)]
    seen = []
    for file in client.files.list(limit=2, order="desc", extra_query={"unknown": "x"}):
        seen.append(file.id)
        client.files.create(file=("new.jsonl", LINES), purpose="batch")
        client.files.delete(file.id)
    assert seen == made[::-1]


def test_the_envelope(client: openai.OpenAI, http: httpx.Client) -> None:
    assert http.get("/v1/files").json() == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    made = [
        client.files.create(file=("in.jsonl", LINES), purpose=purpose).id for purpose in ("batch", "vision", "batch")
    ]
    page = http.get("/v1/files", params={"order": "asc", "limit": 2}).json()
    assert [file["id"] for file in page.pop("data")] == made[:2]
    assert page == {"object": "list", "first_id": made[0], "last_id": made[1], "has_more": True}
    assert [file.id for file in client.files.list(purpose="batch", order="asc")] == [made[0], made[2]]
    assert [file.id for file in client.files.list(purpose="fun")] == []


def test_a_file_is_gone_when_its_time_is_over(client: openai.OpenAI, store: FileStore, http: httpx.Client) -> None:
    """At once: what is on disk is not waited for."""
    file_id = client.files.create(file=("in.jsonl", LINES), purpose="batch").id
    record = store.root / "files" / file_id / "record.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"expires_at": int(time.time()) - 1}))
    for answer in (
        http.get(f"/v1/files/{file_id}"),
        http.get(f"/v1/files/{file_id}/content"),
        http.delete(f"/v1/files/{file_id}"),
    ):
        check_error(answer, 404, None, "id")
    assert client.files.list().data == []


def test_ranges_of_a_content(client: openai.OpenAI, http: httpx.Client) -> None:
    path = f"/v1/files/{client.files.create(file=('in.jsonl', LINES), purpose='batch').id}/content"
    answer = http.get(path, headers={"range": "bytes=5-9"})
    assert (answer.status_code, answer.content) == (206, LINES[5:10])
    beyond = http.get(path, headers={"range": "bytes=900-"})
    check_error(beyond, 416, "invalid_value", "Range")
    assert beyond.headers["content-range"] == f"bytes */{len(LINES)}"
    for meaningless in ("lines=1-", "bytes=abc", "bytes=5-1"):
        answer = http.get(path, headers={"range": meaningless})
        assert (answer.status_code, answer.content) == (200, LINES)


def test_a_result_that_is_being_written_is_not_deleted(client: openai.OpenAI, store: FileStore) -> None:
    record = FileRecord(
        id=new_id(FILE, time.time()),
        bytes=0,
        created_at=int(time.time()),
        filename="batch_x_output.jsonl",
        purpose="batch_output",
        expires_at=None,
        tenant="",
        suffix=".jsonl",
        batch_id="batch_" + "0" * 24,
        complete=False,
    )
    store.put(record)
    with pytest.raises(openai.ConflictError):
        client.files.delete(record.id)
    assert client.files.retrieve(record.id).purpose == "batch_output"


@pytest.fixture
def batch(client: openai.OpenAI, store: FileStore, queue: Queue, redis_client: redis.Redis, tmp_path: Path) -> str:
    """A batch of 300 lines that is being fed to workers."""
    source = write_input(tmp_path / "in.jsonl", 300)
    queue.register_worker(WorkerRecord("w", ["m"], "ready", 4096, 1.0, "test", 1))
    file = client.files.create(file=source, purpose="batch")
    new = BatchSubmission(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", seconds=86400
    )
    record = submit_batch(queue, store, new)
    assert step(redis_client, record.id).state == "in_progress"
    step(redis_client, record.id)
    return record.id


def ids_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line)["custom_id"] for line in answer.content.splitlines()]


def position(answer: httpx.Response) -> tuple[str, int]:
    return answer.headers["x-incomplete"], int(answer.headers["x-last-line"])


def test_results_are_read_while_they_come(
    batch: str, redis_client: redis.Redis, http: httpx.Client, client: openai.OpenAI, store: FileStore
) -> None:
    assert get_batch(redis_client, batch).output_file_id is None
    answer_all(redis_client, failing(7), most=100)
    file_id = wait_until(lambda: step(redis_client, batch).output_file_id, 30, "results are drained")
    path = f"/v1/files/{file_id}/content"
    assert client.files.retrieve(file_id).bytes == len(http.get(path).content) > 0
    first = http.get(path, params={"limit": 30})
    assert position(first) == ("true", 30)
    rest = http.get(path, params={"offset": 30})
    seen = ids_of(first) + ids_of(rest)
    assert position(rest) == ("true", len(seen))
    assert seen == ids_of(http.get(path))
    assert ids_of(http.get(path, params={"offset": len(seen)})) == []
    assert client.files.content(file_id).text.splitlines() == http.get(path).text.splitlines()

    record = run_to_end(redis_client, batch, failing(7))
    assert (record.state, record.completed, record.failed) == ("completed", 299, 1)
    tail = http.get(path, params={"offset": len(seen)})
    assert position(tail) == ("false", 299)
    assert tail.headers["content-disposition"] == f'attachment; filename="{batch}_output.jsonl"'
    assert position(http.get(path, params={"offset": 100, "limit": 50})) == ("true", 150)
    assert position(http.get(path, params={"offset": 10**6})) == ("false", 299)
    expected = [f"c{number}" for number in range(1, 301) if number != 7]
    assert sorted(seen + ids_of(tail)) == sorted(expected)
    whole = http.get(path)
    assert ids_of(whole) == expected
    assert client.files.retrieve(file_id).bytes == len(whole.content)
    for wrong, param in ({"offset": -1}, "offset"), ({"limit": 0}, "limit"), ({"limit": 2**31}, "limit"):
        assert http.get(path, params=wrong).json()["error"]["param"] == param
    check_error(
        http.get(f"/v1/files/{record.error_file_id}/content", params={"offset": 1}), 400, "invalid_value", "offset"
    )
    check_error(
        http.get(f"/v1/files/{record.spec.input_file_id}/content", params={"limit": 1}), 400, "invalid_value", "limit"
    )

    client.files.delete(file_id)
    assert http.get(path, params={"offset": 0}).status_code == 404
    assert not list(store.batch_root(batch).glob("completed.*"))
    assert ids_of(http.get(f"/v1/files/{record.error_file_id}/content")) == ["c7"]


def test_results_are_not_deleted_before_the_end_is_known(
    batch: str, redis_client: redis.Redis, client: openai.OpenAI, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that runs again would make the file anew."""

    def die(held: slices.Slice, state: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(slices.Slice, "end", die)
        with pytest.raises(KeyboardInterrupt):
            run_to_end(redis_client, batch)
    file_id = str(get_batch(redis_client, batch).spec.output_file_id)
    assert store.get("", file_id).complete
    with pytest.raises(openai.ConflictError):
        client.files.delete(file_id)
    assert run_to_end(redis_client, batch).completed == 300
    assert client.files.delete(file_id).deleted


class Socket:
    """A client that sends exactly the given bytes."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        self.socket = socket.create_connection((address.hostname, address.port), timeout=30)

    def begin(self, length: int | None, *headers: str, start: bytes = b"") -> None:
        """`start` of the body goes out with the head."""
        body = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        lines = [
            "POST /v1/files HTTP/1.1",
            "host: localhost",
            f"content-type: {KIND['content-type']}",
            body,
            *headers,
            "",
            "",
        ]
        self.socket.sendall("\r\n".join(lines).encode() + start)

    def chunk(self, data: bytes) -> None:
        self.socket.sendall(b"%x\r\n%b\r\n" % (len(data), data))

    def answer(self) -> tuple[int, dict[str, Any]]:
        """The status and the body, read while the request is not at its end."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._receive()
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(
            next(line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        )
        while len(body) < length:
            body += self._receive()
        return int(head.split(b" ")[1]), json.loads(body)

    def _receive(self) -> bytes:
        received = self.socket.recv(65536)
        assert received, "the server closed the connection without an answer"
        return received


@pytest.fixture
def bare(api_url: str) -> Iterator[Socket]:
    client = Socket(api_url)
    yield client
    client.socket.close()


def test_a_client_that_stops_in_the_middle_leaves_nothing(bare: Socket, store: FileStore, http: httpx.Client) -> None:
    bare.begin(3_000_000)
    bare.socket.sendall(PURPOSE_PART + part("file", b"x" * 1_500_000, "in.jsonl")[:-2])
    wait_until(lambda: left(store) != [], 60, "the upload has begun")
    assert http.get("/v1/files").json()["data"] == []
    bare.socket.close()
    wait_until(lambda: left(store) == [], 60, "nothing stays behind")


def test_a_client_that_falls_silent_gets_an_error_and_leaves_nothing(
    redis_url: str, store: FileStore, long_linger: None
) -> None:
    with api_on(redis_url, store, upload_silence_seconds=0.2) as url:
        client = Socket(url)
        client.begin(3_000_000, start=PURPOSE_PART + part("file", b"x" * 1_500_000, "in.jsonl")[:-2])
        status, body = client.answer()
        assert (status, body["error"]["code"]) == (408, "upload_timeout")
        client.socket.close()
        assert left(store) == []


def test_a_client_gets_an_error_when_the_server_stops(redis_url: str, store: FileStore) -> None:
    with ExitStack() as running:
        client = Socket(running.enter_context(api_on(redis_url, store)))
        client.begin(3_000_000)
        client.socket.sendall(PURPOSE_PART + part("file", b"x" * 1_500_000, "in.jsonl")[:-2])
        wait_until(lambda: left(store) != [], 60, "the upload has begun")
    status, body = client.answer()
    client.socket.close()
    assert (status, body["error"]["code"]) == (503, "server_stopping")
    assert left(store) == []


def test_a_body_announced_too_large_is_refused_at_once(bare: Socket, store: FileStore) -> None:
    bare.begin(10_000_000_000)
    status, body = bare.answer()
    assert (status, body["error"]["code"]) == (413, "request_too_large")
    assert left(store) == []


def test_a_client_that_asks_before_it_sends_is_refused_before(bare: Socket) -> None:
    bare.begin(10_000_000_000, "expect: 100-continue")
    assert bare.answer()[0] == 413
    assert bare.socket.recv(1) == b""


def test_a_file_is_refused_while_it_comes(bare: Socket, store: FileStore, long_linger: None) -> None:
    """The server has announced no size limit, and the client goes on sending."""
    bare.begin(None)
    bare.chunk(PURPOSE_PART + part("file", b"x" * 1_000_000, "in.jsonl")[:-2])
    wait_until(lambda: left(store) != [], 60, "the upload has begun")
    bare.chunk(b"y" * 2_100_000)
    status, body = bare.answer()
    assert (status, body["error"]["code"]) == (413, "request_too_large")
    assert left(store) == []
    bare.chunk(b"z" * 1_000_000)


def test_an_official_client_reads_why_its_file_is_refused(
    client: openai.OpenAI, store: FileStore, long_linger: None
) -> None:
    """It sends all of the file before it looks for an answer."""
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=("in.jsonl", b"x" * 60_000_000), purpose="batch")
    assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")
    assert left(store) == []


def test_a_stranger_reads_why_it_is_turned_away(
    client: openai.OpenAI, store: FileStore, http: httpx.Client, long_linger: None
) -> None:
    """Also with a large body, of which nothing is looked at."""
    create_key(str(store.root), tenant="one")
    wait_until(lambda: http.get("/v1/files").status_code == 401, 30, "a key is asked for")
    with pytest.raises(openai.AuthenticationError):
        client.files.create(file=("in.jsonl", b"x" * 60_000_000), purpose="batch")
    assert left(store) == []


def test_the_rest_of_a_refused_body_is_not_waited_for_long(bare: Socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "LINGER_SECONDS", 0.2)
    bare.begin(10_000_000_000, start=b"x" * 1000)
    assert bare.answer()[0] == 413
    assert bare.socket.recv(1) == b""
