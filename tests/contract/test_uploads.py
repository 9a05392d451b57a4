"""Uploads in parts through the official client: what each call gives, and a batch of the file."""

import hashlib
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Upload

from tests.contract.calls import CHAT, WINDOW, lines, results, said, wait
from tests.contract.test_files import DAY

CONTENT = lines("one", "two", "three")


def create(client: openai.OpenAI, **changes: Any) -> Upload:
    """An upload for `CONTENT`."""
    new: Any = {"bytes": len(CONTENT), "filename": "in.jsonl", "mime_type": "application/jsonl", "purpose": "batch"}
    return client.uploads.create(**(new | changes))


def test_a_batch_of_a_file_in_parts(client: openai.OpenAI) -> None:
    before = int(time.time())
    upload = create(client)
    assert (upload.status, upload.bytes, upload.file) == ("pending", len(CONTENT), None)
    assert before <= upload.created_at == upload.expires_at - 3600
    ids = [client.uploads.parts.create(upload.id, data=CONTENT[at : at + 100]).id for at in range(0, len(CONTENT), 100)]
    done = client.uploads.complete(upload.id, part_ids=ids, md5=hashlib.md5(CONTENT).hexdigest())
    assert (done.status, done.id) == ("completed", upload.id)
    assert done.file is not None
    assert (done.file.filename, done.file.purpose, done.file.status) == ("in.jsonl", "batch", "processed")
    assert done.file.expires_at == done.file.created_at + 30 * DAY
    assert client.files.retrieve(done.file.id) == done.file
    batch = client.batches.create(input_file_id=done.file.id, endpoint=CHAT, completion_window=WINDOW)
    found = results(client, wait(client, batch.id).output_file_id)
    assert list(map(said, found)) == ["one", "two", "three"]


@pytest.mark.parametrize("kind", ["path", "bytes"])
def test_the_clients_own_chunks(client: openai.OpenAI, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(CONTENT)
    given: dict[str, Any] = {"mime_type": "application/jsonl", "purpose": "batch", "part_size": 64}
    if kind == "path":
        done = client.uploads.upload_file_chunked(file=path, **given)
    else:
        done = client.uploads.upload_file_chunked(file=CONTENT, filename="in.jsonl", bytes=len(CONTENT), **given)
    assert done.file is not None
    assert client.files.content(done.file.id).content == CONTENT


def test_a_cancelled_upload_takes_nothing_more(client: openai.OpenAI) -> None:
    upload = create(client)
    part = client.uploads.parts.create(upload.id, data=CONTENT)
    assert client.uploads.cancel(upload.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError):
        client.uploads.complete(upload.id, part_ids=[part.id])
    with pytest.raises(openai.BadRequestError):
        client.uploads.parts.create(upload.id, data=CONTENT)


def test_an_upload_of_another_size_is_refused(client: openai.OpenAI) -> None:
    upload = create(client, bytes=len(CONTENT) + 1)
    part = client.uploads.parts.create(upload.id, data=CONTENT)
    with pytest.raises(openai.BadRequestError) as caught:
        client.uploads.complete(upload.id, part_ids=[part.id])
    assert (caught.value.param, caught.value.type) == ("part_ids", "invalid_request_error")
    assert client.uploads.cancel(upload.id).status == "cancelled"


def test_unknown_uploads(client: openai.OpenAI) -> None:
    for upload_id in ("upload_0123456789abcdef01234567", "upload_", "nonsense"):
        with pytest.raises(openai.NotFoundError):
            client.uploads.cancel(upload_id)
        with pytest.raises(openai.NotFoundError):
            client.uploads.complete(upload_id, part_ids=["part_1"])
        with pytest.raises(openai.NotFoundError):
            client.uploads.parts.create(upload_id, data=b"x")
