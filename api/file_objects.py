"""Files and uploads in OpenAI's shape."""

import time
from typing import Any

from api.answer_objects import FileObject, UploadObject
from jobs.store.file_store import FileRecord
from jobs.store.upload_store import UploadRecord


def file_object(record: FileRecord) -> dict[str, Any]:
    """Return a file as clients read it."""
    return _file(record).as_dict()


def upload_object(record: UploadRecord) -> dict[str, Any]:
    """Return an upload as clients read it."""
    return UploadObject(
        id=record.id,
        bytes=record.bytes,
        created_at=record.created_at,
        expires_at=record.expires_at,
        filename=record.filename,
        object="upload",
        purpose=record.purpose,
        status=record.status_at(time.time()),
        file=None if record.file is None else _file(record.file),
    ).as_dict()


def _file(record: FileRecord) -> FileObject:
    return FileObject(
        id=record.id,
        bytes=record.bytes,
        created_at=record.created_at,
        filename=record.filename,
        object="file",
        purpose=record.purpose,
        status="processed",
        expires_at=record.expires_at,
        status_details=None,
    )
