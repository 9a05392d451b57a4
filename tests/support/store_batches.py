"""Batches as the API makes them, out of files in a store, for tests that drive the control plane
themselves.
"""

import json
from pathlib import PurePath
from typing import Any

import redis

from jobs.batch.client import BatchRecord
from jobs.batch.completion_log import read_log
from jobs.batch.manifest import Manifest, load_manifest
from jobs.batch.retention import forget_output
from jobs.batch.submit import BatchSubmission, submit_batch
from jobs.protocol.chat import CHAT
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from jobs.store.file_store import FileStore
from jobs.store.storage import read_bytes
from tests.support.batch_steps import answer_all, step
from tests.support.control_plane import chat_line, failing
from tests.support.integrity import faults


def store_of(client: redis.Redis, folder: PurePath) -> FileStore:
    """The store in a test's folder."""
    return FileStore(Queue(client), str(folder / "store"), forget_output)


def serve(client: redis.Redis, *models: str) -> None:
    """This process runs the control plane's jobs of that server, which knows these models."""
    Queue(client).register_worker(WorkerRecord("w", list(models), "ready", 4096, 1.0, "test", 1))


def put(store: FileStore, data: bytes, filename: str = "in.jsonl", purpose: str = "batch", tenant: str = "") -> str:
    """Uploads a file and returns its id."""
    with store.begin(filename=filename, purpose=purpose, tenant=tenant) as upload:
        upload.write(data)
        return upload.commit().id


def lines_of(count: int, **parameters: Any) -> bytes:
    """`count` good lines; line n asks for n."""
    return b"".join(chat_line(f"c{number}", f"say {number}", **parameters) for number in range(1, count + 1))


def submit(client: redis.Redis, folder: PurePath, data: bytes, filename: str = "in.jsonl", **asked: Any) -> BatchRecord:
    """A new batch of a file that is uploaded first; `m` is served.

    `asked` are fields of `BatchSubmission`.
    """
    serve(client, "m")
    return submit_file(
        client, folder, put(store_of(client, folder), data, filename, tenant=asked.get("tenant", "")), **asked
    )


def submit_file(client: redis.Redis, folder: PurePath, file_id: str, **asked: Any) -> BatchRecord:
    """A new batch of a file that is there, or not."""
    asked = {"endpoint": CHAT, "completion_window": "24h", "seconds": 86400.0} | asked
    return submit_batch(Queue(client), store_of(client, folder), BatchSubmission(input_file_id=file_id, **asked))


def manifest_of(record: BatchRecord) -> Manifest:
    """What is on disk."""
    manifest = load_manifest(record.spec.root)
    assert manifest is not None
    return manifest


def log_of(record: BatchRecord, offset: int = 0, limit: int | None = None) -> bytes:
    """What the completion log holds."""
    return b"".join(read_log(record.spec.root, manifest_of(record).logged, offset, limit)[0])


def content_of(client: redis.Redis, folder: PurePath, file_id: str | None, tenant: str = "") -> bytes:
    """A file's content; nothing for none."""
    if file_id is None:
        return b""
    store = store_of(client, folder)
    return read_bytes(str(store.content_path(store.get(tenant, file_id))))


def custom_ids(content: bytes) -> list[str]:
    """Of the lines of a result file."""
    return [json.loads(line)["custom_id"] for line in content.splitlines()]


def check_every_line_once(client: redis.Redis, folder: PurePath, record: BatchRecord, count: int) -> None:
    """Each line in one of the two files, as the counts say; and the log holds the successes."""
    tenant = record.spec.tenant
    good = content_of(client, folder, record.output_file_id, tenant)
    bad = content_of(client, folder, record.error_file_id, tenant)
    assert (len(custom_ids(good)), len(custom_ids(bad))) == (record.completed, record.failed)
    assert record.completed + record.failed == record.total == count
    assert sorted(custom_ids(good) + custom_ids(bad)) == sorted(f"c{number}" for number in range(1, count + 1))
    assert sorted(log_of(record).splitlines()) == sorted(good.splitlines())
    assert faults(client) == []


def under_way(client: redis.Redis, folder: PurePath, count: int = 20, done: int = 8, **asked: Any) -> BatchRecord:
    """A batch of which some lines are done and on disk."""
    record = submit(client, folder, lines_of(count), **asked)
    step(client, record.id)
    step(client, record.id)
    answer_all(client, failing(3), most=done)
    step(client, record.id)
    return record


def finished(client: redis.Redis, folder: PurePath, failures: tuple[int, ...] = (3,), **asked: Any) -> BatchRecord:
    """A batch of 20 lines whose results are still to be written."""
    record = submit(client, folder, lines_of(20), **asked)
    while (record := step(client, record.id)).state != "finalizing":
        answer_all(client, failing(*failures))
    return record
