"""`Idempotency-Key` on what creates something: the first answer again, and never a second object,
also where API processes are killed.
"""

import contextlib
import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis

from api.settings import ApiSettings
from api.uploads import FileWriter
from jobs.batch.retention import forget_output
from jobs.batch.submit import BatchSubmission, submit_batch, submitted_batch
from jobs.protocol.chat import CHAT
from jobs.protocol.ids import BATCH, FILE, new_id
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue, QueueFull, QueueUnavailable
from jobs.queue.settings import QueueSettings
from jobs.store.api_keys import create_key
from jobs.store.file_store import FileStore
from jobs.store.idempotency import IdempotencyKeys
from tests.api.test_file_limits import api_process
from tests.api.test_files import PURPOSE_PART, Socket, check_error, part
from tests.support.api_server import plain_client, running_api
from tests.support.control_plane import chat_line
from tests.support.integrity import faults
from tests.support.killed_steps import killed_before_each_step
from tests.support.store_batches import put, store_of
from tests.support.waiting import wait_until

LINES = chat_line("a") + chat_line("b")
UPLOAD = {"bytes": 9, "filename": "in.jsonl", "mime_type": "application/jsonl", "purpose": "batch"}


@pytest.fixture
def api_url(redis_url: str, tmp_path: Path) -> Iterator[str]:
    """An API on the store of `tests.support.store_batches`."""
    with running_api(ApiSettings(redis_url=redis_url, file_store=str(tmp_path / "store"))) as url:
        yield url


def new_batch(file_id: str, **changes: Any) -> dict[str, Any]:
    return {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **changes}


def send_file(http: httpx.Client, key: str, content: bytes = LINES, name: str = "in.jsonl", **form: str) -> Any:
    """Each time with another boundary, as clients do."""
    files, form = {"file": (name, content)}, {"purpose": "batch", **form}
    return http.post("/v1/files", files=files, data=form, headers={"idempotency-key": key})


def send(http: httpx.Client, path: str, key: str, body: dict[str, Any]) -> httpx.Response:
    return http.post(path, json=body, headers={"idempotency-key": key})


def check_replay(first: httpx.Response, *others: httpx.Response) -> None:
    assert first.status_code == 200, first.text
    assert "idempotent-replayed" not in first.headers
    for other in others:
        assert (other.status_code, other.content) == (200, first.content)
        assert other.headers["idempotent-replayed"] == "true"


def test_a_batch_is_made_once(http: httpx.Client, client: openai.OpenAI) -> None:
    body = new_batch(client.files.create(file=("in.jsonl", LINES), purpose="batch").id)
    first = send(http, "/v1/batches", "k", body)
    client.batches.cancel(first.json()["id"])
    check_replay(first, *(send(http, "/v1/batches", "k", body) for _ in range(2)))
    other = send(http, "/v1/batches", "k", {**body, "metadata": {"team": "blue"}})
    check_error(other, 422, "idempotency_key_reused", "Idempotency-Key")
    another = send(http, "/v1/batches", "k2", body)
    assert {batch.id for batch in client.batches.list()} == {first.json()["id"], another.json()["id"]}
    options: Any = {"extra_headers": {"Idempotency-Key": "k"}}
    assert client.batches.create(**body, **options).id == first.json()["id"]


def test_a_file_is_stored_once(http: httpx.Client, client: openai.OpenAI, tmp_path: Path) -> None:
    first = send_file(http, "k")
    check_replay(first, send_file(http, "k"), send_file(http, "k"))
    for changed in (
        {"content": LINES + b"\n"},
        {"name": "other.jsonl"},
        {"purpose": "user_data"},
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"},
    ):
        check_error(send_file(http, "k", **changed), 422, "idempotency_key_reused", "Idempotency-Key")  # type: ignore[arg-type]
    assert [file.id for file in client.files.list()] == [first.json()["id"]]
    assert [path.name for path in (tmp_path / "store" / "files").iterdir()] == [first.json()["id"]]
    client.files.delete(first.json()["id"])
    check_replay(first, send_file(http, "k"))


def test_a_file_that_was_deleted_is_stored_again_under_a_new_key_only(
    http: httpx.Client, client: openai.OpenAI, tmp_path: Path
) -> None:
    first = send_file(http, "k")
    client.files.delete(first.json()["id"])
    check_replay(first, send_file(http, "k"), send_file(http, "k"))
    check_error(http.get(f"/v1/files/{first.json()['id']}"), 404, None, "id")
    assert client.files.list().data == []
    again = send_file(http, "k2")
    check_replay(again, send_file(http, "k2"))
    assert [file.id for file in client.files.list()] == [again.json()["id"]]


def test_a_file_that_was_deleted_before_its_answer_was_noted_is_stored_again(
    http: httpx.Client, client: openai.OpenAI, tmp_path: Path
) -> None:
    """As where the process was killed between the two, and another client deleted the file."""
    first = send_file(http, "k").json()["id"]
    [noted] = (tmp_path / "store" / "idempotency").iterdir()
    noted.write_bytes(noted.read_bytes().splitlines(keepends=True)[0])
    client.files.delete(first)
    again = send_file(http, "k")
    assert again.json()["id"] != first
    check_replay(again, send_file(http, "k"))
    assert [file.id for file in client.files.list()] == [again.json()["id"]]


def test_an_upload_is_begun_once(http: httpx.Client, tmp_path: Path) -> None:
    first = send(http, "/v1/uploads", "k", UPLOAD)
    check_replay(first, send(http, "/v1/uploads", "k", UPLOAD))
    changed = send(http, "/v1/uploads", "k", UPLOAD | {"bytes": 8})
    check_error(changed, 422, "idempotency_key_reused", "Idempotency-Key")
    assert [path.name for path in (tmp_path / "store" / "uploads").iterdir()] == [first.json()["id"]]


def test_a_refused_batch_leaves_its_key_to_a_corrected_one(api_url: str, tmp_path: Path) -> None:
    _, secret = create_key(str(tmp_path / "store"), tenant="blue", open_batches=1)
    with plain_client(api_url, headers={"authorization": f"Bearer {secret}"}) as http:
        body = new_batch(send_file(http, "k").json()["id"])
        open_batch = send(http, "/v1/batches", "open", body).json()["id"]
        for _ in range(2):
            check_error(send(http, "/v1/batches", "k", body), 429, "rate_limit_exceeded", None)
        check_error(send(http, "/v1/batches", "k", body | {"metadata": {"a": "b"}}), 429, "rate_limit_exceeded", None)
        assert [batch["id"] for batch in http.get("/v1/batches").json()["data"]] == [open_batch]


def test_the_answer_outlives_an_emptied_redis(
    http: httpx.Client, client: openai.OpenAI, redis_client: redis.Redis
) -> None:
    body = new_batch(client.files.create(file=("in.jsonl", LINES), purpose="batch").id)
    first = send(http, "/v1/batches", "k", body)
    redis_client.flushall()
    check_replay(first, send(http, "/v1/batches", "k", body))


def test_keys_are_of_a_tenant_and_an_endpoint(api_url: str, tmp_path: Path) -> None:
    made = []
    for secret in [create_key(str(tmp_path / "store"), tenant=tenant)[1] for tenant in ("blue", "green")]:
        with plain_client(api_url, headers={"authorization": f"Bearer {secret}"}) as http:
            file = send_file(http, "k")
            made += [file, send(http, "/v1/batches", "k", new_batch(file.json()["id"]))]
            made.append(send(http, "/v1/uploads", "k", UPLOAD))
    assert [(answer.status_code, "idempotent-replayed" in answer.headers) for answer in made] == [(200, False)] * 6


@pytest.mark.parametrize("path", ["/v1/batches", "/v1/files", "/v1/uploads"])
def test_a_bad_key_is_named(http: httpx.Client, client: openai.OpenAI, path: str) -> None:
    body = UPLOAD if path == "/v1/uploads" else new_batch("file-x")

    def call(*keys: str) -> httpx.Response:
        headers = [("idempotency-key", key) for key in keys]
        if path == "/v1/files":
            return http.post(path, files={"file": ("in.jsonl", LINES)}, data={"purpose": "batch"}, headers=headers)
        return http.post(path, json=body, headers=headers)

    check_error(call("x" * 256), 400, "string_above_max_length", "Idempotency-Key")
    check_error(call(""), 400, "empty_string", "Idempotency-Key")
    check_error(call("a", "b"), 400, "invalid_value", "Idempotency-Key")
    assert call("x" * 255).status_code == 200
    assert call('"8e03978e-40d5-43dd-bc93-6894a57f9324"').status_code == 200


def test_bad_input_takes_no_key(http: httpx.Client, client: openai.OpenAI) -> None:
    check_error(send(http, "/v1/batches", "k", {}), 400, "missing_required_parameter", "input_file_id")
    check_error(send(http, "/v1/uploads", "k", {}), 400, "missing_required_parameter", "purpose")
    assert send_file(http, "k", b"no json").status_code == 400
    file = send_file(http, "k")
    assert send(http, "/v1/batches", "k", new_batch(file.json()["id"])).status_code == 200
    assert send(http, "/v1/uploads", "k", UPLOAD).status_code == 200


def test_a_body_of_odd_values_is_compared_like_any(http: httpx.Client) -> None:
    headers = {"idempotency-key": "k", "content-type": "application/json"}
    odd = '"half": "\\ud800", "large": %s, "nothing": NaN, "deep": %s%s' % ("9" * 5000, "[" * 50, "]" * 50)  # noqa: UP031
    for new, replayed in ((f'{{"bytes": 9, {odd}', False), (f'{{{odd}, "bytes": 9', True)):
        body = f'{new}, "filename": "in.jsonl", "mime_type": "", "purpose": "batch"}}'
        answer = http.post("/v1/uploads", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert ("idempotent-replayed" in answer.headers) == replayed


def test_a_key_is_in_use_while_its_file_comes(
    api_url: str, http: httpx.Client, client: openai.OpenAI, tmp_path: Path
) -> None:
    bare = Socket(api_url)
    content = b"{}".ljust(1_500_000)
    body = PURPOSE_PART + part("file", content, "in.jsonl")
    bare.begin(len(body) + 100, "idempotency-key: k", start=body[:-10])
    wait_until(lambda: list((tmp_path / "store" / "files").glob("*/*")), 60, "the upload has begun")
    check_error(send_file(http, "k"), 409, "idempotency_key_in_use", "Idempotency-Key")
    bare.socket.close()
    answer = wait_until(lambda: not_in_use(send_file(http, "k")), 60, "the key to be free again")
    assert answer.status_code == 200
    assert [file.id for file in client.files.list()] == [answer.json()["id"]]


def not_in_use(answer: httpx.Response) -> httpx.Response | None:
    return None if answer.status_code == 409 else answer


def test_kills_between_any_two_steps_make_one_batch(redis_client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    """A tenant that may have one batch for each key gets each."""
    store = store_of(redis_client, tmp_path)
    file_id = put(store, LINES)
    made: list[str] = []

    def call(queue: Queue) -> dict[str, Any]:
        files = FileStore(queue, str(store.root), forget_output)
        new = BatchSubmission(
            input_file_id=file_id, endpoint=CHAT, completion_window="24h", seconds=86400, open_batches=len(made) + 1
        )

        def find(batch: str) -> dict[str, Any] | None:
            record = submitted_batch(queue, files, "", batch)
            return None if record is None else {"id": record.id}

        with IdempotencyKeys(queue, files).hold("", BATCH, f"key {len(made)}") as held:
            make = lambda batch: {"id": submit_batch(queue, files, new, batch).id}  # noqa: E731
            return held.make_once("digest", new_id(BATCH, queue.now()), find, make)[0]

    for number in killed_before_each_step(lambda: call(Queue(connect(redis_url)))):
        answer = call(Queue(redis_client))
        assert call(Queue(redis_client)) == answer
        made.append(answer["id"])
        on_disk = [path.parent.name for path in store.root.glob("batches/*/manifest.json")]
        assert sorted(on_disk) == sorted(made), number
        assert sorted(Queue(redis_client).open_batches("")) == sorted(made), number
        assert Queue(redis_client).listed_batches("", None, 1000) == made[::-1], number
    assert number > 20
    assert faults(redis_client) == []


def test_a_file_that_redis_has_no_room_for_leaves_its_key_to_another(redis_client: redis.Redis, tmp_path: Path) -> None:
    queue = Queue(redis_client, QueueSettings(redis_retry_seconds=0.1))
    files = FileStore(queue, str(tmp_path / "store"), forget_output)

    def writer(content: bytes) -> FileWriter:
        held = IdempotencyKeys(queue, files).hold("", FILE, "key")
        found = FileWriter(files, files.begin(filename="in.jsonl", purpose="batch", tenant=""), held)
        found.write(content)
        return found

    refused = writer(LINES)
    redis_client.config_set("maxmemory", "1")
    try:
        with pytest.raises(QueueFull):
            refused.commit()
    finally:
        redis_client.config_set("maxmemory", "0")
    stored, replayed = writer(LINES + LINES).commit()
    assert not replayed
    assert os.listdir(tmp_path / "store" / "files") == [stored["id"]]


def test_a_batch_that_redis_has_no_room_for_leaves_its_key_to_another(
    redis_client: redis.Redis, tmp_path: Path
) -> None:
    store = store_of(redis_client, tmp_path)
    file_id, queue = put(store, LINES), Queue(redis_client, QueueSettings(redis_retry_seconds=0.1))
    files = FileStore(queue, str(store.root), forget_output)
    new = BatchSubmission(input_file_id=file_id, endpoint=CHAT, completion_window="24h", seconds=86400)

    def find(batch: str) -> dict[str, Any] | None:
        record = submitted_batch(queue, files, "", batch)
        return None if record is None else {"id": record.id}

    def make(batch: str) -> dict[str, Any]:
        return {"id": submit_batch(queue, files, new, batch).id}

    def call(digest: str) -> tuple[dict[str, Any], bool]:
        with IdempotencyKeys(queue, files).hold("", BATCH, "key") as held:
            return held.make_once(digest, new_id(BATCH, queue.now()), find, make)

    redis_client.config_set("maxmemory", "1")
    try:
        with pytest.raises(QueueFull):
            call("first")
    finally:
        redis_client.config_set("maxmemory", "0")
    made, replayed = call("corrected")
    assert not replayed
    assert call("corrected") == (made, True)
    assert [path.name for path in store.root.glob("batches/*")] == [made["id"]]
    assert faults(redis_client) == []


def test_kills_between_any_two_steps_store_one_file(redis_client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    stored: list[str] = []

    def call(queue: Queue) -> dict[str, Any]:
        files = FileStore(queue, root, forget_output)
        held = IdempotencyKeys(queue, files).hold("", FILE, f"key {len(stored)}")
        writer = FileWriter(files, files.begin(filename="in.jsonl", purpose="batch", tenant=""), held)
        writer.write(LINES)
        return writer.commit()[0]

    files = FileStore(Queue(redis_client), root, forget_output)
    for number in killed_before_each_step(lambda: call(Queue(connect(redis_url)))):
        answer = call(Queue(redis_client))
        assert call(Queue(redis_client)) == answer
        stored.append(answer["id"])
        page = files.list("", after=None, limit=1000, order="asc", purpose=None)
        assert sorted(record.id for record in page.items) == sorted(stored), number
        assert {files.content_path(record).read_bytes() for record in page.items} == {LINES}
    assert number > 15
    assert faults(redis_client) == []


def test_a_batch_whose_answer_redis_kept_back_is_found_again(
    http: httpx.Client, client: openai.OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client may ask again, which without a key would make a second one."""
    body = new_batch(client.files.create(file=("in.jsonl", LINES), purpose="batch").id)

    def away(queue: Queue, *arguments: Any, **options: Any) -> bool:
        raise QueueUnavailable("Redis is away")

    with monkeypatch.context() as patch:
        patch.setattr(Queue, "create_batch", away)
        for _ in range(2):
            answer = send(http, "/v1/batches", "k", body)
            check_error(answer, 503, "queue_unavailable", None)
            assert (answer.headers["retry-after"], answer.headers.get("x-should-retry")) == ("1", None)
    [manifest] = (tmp_path / "store").glob("batches/*/manifest.json")
    found = send(http, "/v1/batches", "k", body)
    assert (found.status_code, found.json()["id"]) == (200, manifest.parent.name)
    assert send(http, "/v1/batches", "k", body).content == found.content
    assert [batch.id for batch in client.batches.list()] == [manifest.parent.name]


@pytest.mark.proof
def test_one_batch_for_each_key_while_api_processes_are_killed(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path, seed: int
) -> None:
    """Clients repeat each call, on two processes at once, until it is answered."""
    rng, store = random.Random(seed), tmp_path / "store"
    file_id = put(store_of(redis_client, tmp_path), LINES)
    urls = ["", ""]

    def ask(key: str, place: int) -> str:
        for _ in range(20_000):
            with contextlib.suppress(httpx.TransportError), plain_client(urls[place]) as http:
                answer = send(http, "/v1/batches", key, new_batch(file_id, metadata={"key": key}))
                if answer.status_code == 200:
                    return str(answer.json()["id"])
                assert answer.status_code in (409, 503), answer.text
            time.sleep(0.02)
        raise AssertionError(f"no answer for {key}")

    made: dict[str, set[str]] = {}
    with ExitStack() as running, ThreadPoolExecutor(20) as clients:
        processes = [running.enter_context(api_process(redis_url, store)) for _ in range(2)]
        for kill in range(6):
            urls[:] = [url for url, _ in processes]
            keys = [f"key {kill} {number}" for number in range(10)]
            asking = [(key, clients.submit(ask, key, place)) for key in keys for place in range(2)]
            place, most = rng.randrange(2), rng.randrange(12)
            wait_until(lambda most=most, asking=asking: answered(asking) >= most, 60, "some answers")
            processes[place][1].process.kill()
            processes[place][1].process.wait()
            processes[place] = running.enter_context(api_process(redis_url, store))
            urls[place] = processes[place][0]
            for key, future in asking:
                made.setdefault(key, set()).add(future.result())
    assert {len(ids) for ids in made.values()} == {1}, made
    manifests = [json.loads(path.read_text()) for path in store.glob("batches/*/manifest.json")]
    found = {manifest["spec"]["metadata"]["key"]: {manifest["batch_id"]} for manifest in manifests}
    assert (found, len(manifests)) == (made, len(made))


def answered(asking: list[tuple[str, Future[str]]]) -> int:
    return sum(future.done() for _, future in asking)
