"""Files and uploads in OpenAI's shape."""

import time
from typing import Any

from openai.types import FileObject, Upload

from jobs.store.file_store import FileRecord
from jobs.store.upload_store import UploadRecord


def file_object(record: FileRecord) -> dict[str, Any]:
    """Every field of `openai.types.FileObject`."""
    # Not validated: "evals" is a purpose of uploads that the package's type does not list.
    shaped = FileObject.model_construct(
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
    return shaped.model_dump(warnings=False)


def upload_object(record: UploadRecord) -> dict[str, Any]:
    """Every field of `openai.types.Upload`."""
    shaped = Upload(
        id=record.id,
        bytes=record.bytes,
        created_at=record.created_at,
        expires_at=record.expires_at,
        filename=record.filename,
        object="upload",
        purpose=record.purpose,
        status=record.status_at(time.time()),
    )
    return shaped.model_dump() | {"file": None if record.file is None else file_object(record.file)}
