"""Retry: a new batch of the lines of an ended one that have no answer in its output file.

These lines are in its error file, each with its number in its id. They are copied from the input
file in one pass with one line at a time in memory, and one bit per line.
"""

import contextlib
from collections.abc import Callable

import msgspec

from jobs.batch.bitmap import Bitmap
from jobs.batch.client import BatchRecord, BatchRefused
from jobs.batch.input_files import SPOOL_NAME, InputError, api_bounds, read_lines, write_spool
from jobs.batch.invalid_lines import is_placeholder
from jobs.batch.queued_tokens import others_tokens
from jobs.batch.submit import BatchSubmission, NotBegun, TooManyBatches, check_open, submit_batch
from jobs.protocol.results import ApiError, line_of
from jobs.queue.request_queue import Queue, QueueFull
from jobs.queue.scripts import QueueUnavailable
from jobs.store.file_store import FileRecord, FileStore, Upload
from jobs.store.input_formats import HEAD_BYTES, JSONL, format_of_content
from jobs.store.storage import StoreError, delete, open_input

_COPY_BYTES = 1 << 20


class _ErrorLine(msgspec.Struct):
    id: str


_decode = msgspec.json.Decoder(_ErrorLine).decode


def retry_batch(
    queue: Queue, files: FileStore, record: BatchRecord, new: BatchSubmission, batch_id: str | None = None
) -> BatchRecord:
    """Create the batch `new`, of an unused id, from the unanswered lines of an ended one.

    Its input is a new file. Raise `BatchRefused` if there are no such lines, or if they are no
    longer known, `ApiError` 429 if the tenant's open batches leave no room for their tokens, and
    what `submit_batch` raises. If certainly no batch was created, the file is removed.
    """
    _check_any_unanswered(record)
    # This and the next are checked again for the batch, after a copy that may take long.
    check_open(queue, new)
    _check_tokens(queue, record, new)
    file = _copy_unanswered(files, record)
    try:
        return submit_batch(queue, files, msgspec.structs.replace(new, input_file_id=file.id), batch_id)
    except (StoreError, QueueFull, TooManyBatches, NotBegun):
        with contextlib.suppress(KeyError, StoreError, QueueUnavailable):
            files.delete(file.tenant, file.id)
        raise


def _check_any_unanswered(record: BatchRecord) -> None:
    if record.state == "failed":
        raise BatchRefused(
            f"The batch {record.id} failed as a whole, as its errors say: create a batch of its file once that is"
            " corrected."
        )
    if record.output is not None and record.error_output is None:
        raise BatchRefused(f"Every request of the batch {record.id} was answered, so there is nothing to retry.")


def _check_tokens(queue: Queue, record: BatchRecord, new: BatchSubmission) -> None:
    """Raise `ApiError` 429 if the new batch and the tenant's open ones would exceed the token
    limit.

    Its tokens are estimated from the share of unanswered lines in the ended batch. If it exceeds
    the limit alone, waiting is no use, and the validation refuses it.
    """
    if new.queued_tokens is None:
        return
    tokens = queue.batch_fields(record.id).queued_tokens
    own = tokens if record.output is None else -(-tokens * record.failed // max(record.total, 1))
    others = others_tokens(queue, new.tenant, record.id)
    if own <= new.queued_tokens < own + others:
        message = (
            f"About {own} tokens in the lines to retry and {others} in batches that have not ended are more than the"
            f" {new.queued_tokens} that may be queued; try again when one has ended."
        )
        raise ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded")


def _copy_unanswered(files: FileStore, record: BatchRecord) -> FileRecord:
    """Create the new input file, which is listed once it is complete.

    After a kill it is removed like any upload.
    """
    lines, source = _unanswered(files, record), _input(files, record)
    location = str(files.content_path(source))
    kept = None if source.expires_at is None else source.expires_at - source.created_at
    name = f"{record.id}_retry{_format(location) if lines is None else JSONL}"
    with files.begin(filename=name, purpose="batch", tenant=source.tenant, expires_seconds=kept) as upload:
        if record.spec.streams_input:
            _copy_jsonl(location, lines, upload, is_placeholder)
        elif lines is None:
            _copy_whole(location, upload)
        else:
            _copy_lines(location, lines, record.spec.max_lines, upload)
        if not upload.bytes:
            raise BatchRefused(f"No request of the batch {record.id} without an answer is valid.")
        return upload.commit()


def _input(files: FileStore, record: BatchRecord) -> FileRecord:
    file_id = record.spec.input_file_id or ""
    try:
        return files.get(record.spec.tenant, file_id)
    except KeyError:
        raise BatchRefused(
            f"The input file {file_id} of the batch {record.id} is gone, so none of its requests can be run again:"
            " upload the file again, and create a batch of it."
        ) from None


def _unanswered(files: FileStore, record: BatchRecord) -> Bitmap | None:
    """Return the lines without an answer, counting from 1.

    None means all of the file, for example after a cancellation during validation.
    """
    if record.output is None:
        return None
    file_id = record.error_file_id or ""
    try:
        location = str(files.content_path(files.get(record.spec.tenant, file_id)))
    except KeyError:
        raise BatchRefused(
            f"The error file {file_id} of the batch {record.id} is gone, so the requests to run again are not known:"
            " create a batch of a file with these requests."
        ) from None
    return _numbers(location)


def _numbers(location: str) -> Bitmap:
    numbers = Bitmap()
    with open_input(location) as file:
        for line in file:
            numbers.add(line_of(_decode(line).id))
    return numbers


def _format(location: str) -> str:
    with open_input(location) as file:
        return format_of_content(file.read(HEAD_BYTES))


def _copy_whole(location: str, upload: Upload) -> None:
    with open_input(location) as file:
        while data := file.read(_COPY_BYTES):
            upload.write(data)


def _copy_lines(location: str, lines: Bitmap, max_lines: int | None, upload: Upload) -> None:
    """Copy lines unchanged; lines of a packed file become JSONL."""
    if _format(location) == JSONL:
        _copy_jsonl(location, lines, upload)
        return
    spool = str(upload.folder / SPOOL_NAME)
    try:
        write_spool(location, spool, api_bounds(location, max_lines))
    except InputError as error:
        raise BatchRefused(str(error)) from None
    _copy_jsonl(spool, lines, upload)
    delete(spool)


def _copy_jsonl(
    location: str, lines: Bitmap | None, upload: Upload, omits: Callable[[bytes], bool] = lambda raw: False
) -> None:
    group = bytearray()
    with open_input(location) as file:
        for line in read_lines(file):
            if (lines is None or line.number in lines) and not omits(line.raw or b""):
                group += (line.raw or b"").removesuffix(b"\n") + b"\n"
            if len(group) >= _COPY_BYTES:
                upload.write(bytes(group))
                group.clear()
    upload.write(bytes(group))
