"""Batches as the API makes them, out of files in a store, for tests that drive the control plane themselves."""

from pathlib import Path
from typing import Any

import redis

from jobs import control
from jobs.batches import BatchRecord
from jobs.completion_log import read_log
from jobs.file_store import FileStore
from jobs.manifest import Manifest, load_manifest
from jobs.queue import Queue
from jobs.registry import WorkerRecord
from jobs.submission import NewBatch, submit_batch
from jobs.validation import CHAT
from tests.support.control_plane import chat_line


def store_of(client: redis.Redis, folder: Path) -> FileStore:
    """The store in a test's folder."""
    return FileStore(Queue(client), str(folder / "store"))


def serve(client: redis.Redis, url: str, *models: str) -> None:
    """This process runs the control plane's jobs of that server, which knows these models."""
    control.use_server(url)
    Queue(client).register_worker(WorkerRecord("w", list(models), "ready", 4096, 1.0, "test", 1))


def put(store: FileStore, data: bytes, filename: str = "in.jsonl", purpose: str = "batch", tenant: str = "") -> str:
    """Uploads a file and returns its id."""
    with store.begin(filename=filename, purpose=purpose, tenant=tenant) as upload:
        upload.write(data)
        return upload.commit().id


def lines_of(count: int, **parameters: Any) -> bytes:
    """`count` good lines; line n asks for n."""
    return b"".join(chat_line(f"c{number}", f"say {number}", **parameters) for number in range(1, count + 1))


def submit(client: redis.Redis, url: str, folder: Path, data: bytes, filename: str = "in.jsonl", **asked: Any) -> BatchRecord:
    """A new batch of a file that is uploaded first; `m` is served. `asked` are fields of `NewBatch`."""
    serve(client, url, "m")
    return submit_file(client, folder, put(store_of(client, folder), data, filename, tenant=asked.get("tenant", "")), **asked)


def submit_file(client: redis.Redis, folder: Path, file_id: str, **asked: Any) -> BatchRecord:
    """A new batch of a file that is there, or not."""
    asked = {"endpoint": CHAT, "completion_window": "24h", "seconds": 86400.0} | asked
    return submit_batch(Queue(client), store_of(client, folder), NewBatch(input_file_id=file_id, **asked))


def manifest_of(record: BatchRecord) -> Manifest:
    """What stands on disk."""
    manifest = load_manifest(record.spec.root)
    assert manifest is not None
    return manifest


def log_of(record: BatchRecord, offset: int = 0, limit: int | None = None) -> bytes:
    """What the completion log holds."""
    return b"".join(read_log(record.spec.root, manifest_of(record).logged, offset, limit)[0])


def content_of(client: redis.Redis, folder: Path, file_id: str | None, tenant: str = "") -> bytes:
    """A file's content; nothing for none."""
    if file_id is None:
        return b""
    store = store_of(client, folder)
    return store.content_path(store.get(tenant, file_id)).read_bytes()
