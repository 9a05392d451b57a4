"""The result files of an API batch: the completion log while it runs, and files of the store."""

import contextlib
import os
import time

import msgspec

from jobs.batch.bitmap import Bitmap
from jobs.batch.completion_log import Extent, adopt_log, append_log, logged_lines, sound_extent
from jobs.batch.input_files import compression_of, is_parquet
from jobs.batch.line_index import LineIndex
from jobs.batch.log_segments import Entry
from jobs.batch.manifest import BatchSpec, Manifest
from jobs.batch.parts import merge_parts
from jobs.batch.retention import forget_output
from jobs.batch.source import open_lines
from jobs.protocol.ids import FILE, micros_of
from jobs.protocol.results import Result, batch_request_id, output_line
from jobs.queue.request_queue import Queue
from jobs.store.compression import CompressedWriter
from jobs.store.file_store import BATCH_FILE_SECONDS, RESULT_PURPOSE, FileRecord, FileStore
from jobs.store.storage import AtomicWriter, StoreError, is_local, join, link, make_folder, new_name, size_of

ResultFile = AtomicWriter | CompressedWriter


class LoggedLines:
    """The lines in the completion log, as far as this process has read its index."""

    def __init__(self) -> None:
        self._lines = Bitmap()
        self._known = 0

    def read(self, root: str, extent: Extent) -> None:
        """Read the rest of the index; committed entries never change. Raise `StoreError`."""
        if extent.lines < self._known:
            self._lines, self._known = Bitmap(), 0
        for line in logged_lines(root, self._known, extent.lines, extent.segments):
            self._lines.add(line)
        self._known = extent.lines

    def __contains__(self, line: int) -> bool:
        return line in self._lines


def log_successes(queue: Queue, manifest: Manifest, results: list[tuple[int, Result]], logged: LoggedLines) -> None:
    """Append the successes that the log lacks; the manifest's save commits them.

    Lines that were lost with a damaged part and ran again are in the log already. Raise
    `StoreError`.
    """
    root = manifest.spec.root
    extent = sound_extent(root, manifest.logged)
    logged.read(root, extent)
    if manifest.completed and not manifest.logged_lines:  # all drained at once, and a part was damaged since
        results = [*((record.line, record.result) for record in merge_parts(root, manifest.parts)), *results]
    successes = [(line, result) for line, result in results if result.succeeded and line not in logged]
    if successes:
        if not extent.lines:
            _store(queue, manifest).begin_result(_partial(manifest))
        assert manifest.source is not None, "validate names it"
        with open_lines(manifest) as index:
            entries = (Entry(line, _output_line(manifest, index, line, result)) for line, result in successes)
            extent = append_log(root, extent, entries)
    manifest.note_logged(extent)


def may_become_log(manifest: Manifest) -> bool:
    """Return whether the output file can become the completion log.

    It must have the same format, and the log must be empty.
    """
    return not manifest.logged_lines and not is_parquet(manifest.spec.output or "")


def log_output(manifest: Manifest, output: str) -> None:
    """Make the output file the log as well; the manifest's save commits it.

    Raise `StoreError`.
    """
    records = merge_parts(manifest.spec.root, manifest.parts)
    lines = (record.line for record in records if record.result.succeeded)
    manifest.note_logged(adopt_log(manifest.spec.root, output, lines))


def location_to_write(manifest: Manifest, location: str) -> str:
    """Return where to write an output.

    In a bucket the name is unique, since another process that was presumed dead may still write.
    """
    folder, name = os.path.split(location)
    stem, dot, suffix = name.partition(".")
    return location if is_local(manifest.spec.root) else join(folder, new_name(folder, stem) + dot + suffix)


def open_uncompressed(manifest: Manifest, location: str) -> AtomicWriter:
    """Begin an output file.

    An API batch's output is in a folder of the file store, which is created if missing. Raise
    `StoreError`.
    """
    if manifest.spec.of_api:
        make_folder(os.path.dirname(location))
    return AtomicWriter(location, manifest.spec.root)


def open_output(manifest: Manifest, location: str) -> ResultFile:
    """Begin an output file that is compressed if its name says so."""
    writer, codec = open_uncompressed(manifest, location), compression_of(location)
    return writer if codec is None else CompressedWriter(writer, codec)


def publish_result_files(
    queue: Queue, manifest: Manifest, output: str | None, error_output: str | None, ended_at: float
) -> None:
    """Publish the written files to clients, and remove the record of a file without lines.

    Raise `StoreError`.
    """
    store = _store(queue, manifest)
    for file_id, kind, location in zip(_file_ids(manifest), ("output", "error"), (output, error_output), strict=True):
        if location is None:
            store.drop(file_id)
        else:
            store.put(_complete(manifest, file_id, kind, location, int(ended_at)))


def publish_input(queue: Queue, manifest: Manifest) -> None:
    """Publish the lines of a batch that was open as a file for batches. Raise `StoreError`."""
    spec = manifest.spec
    store, file_id = _store(queue, manifest), spec.input_file_id or ""
    created = micros_of(FILE, file_id) // 1_000_000
    record = FileRecord(
        id=file_id,
        bytes=manifest.source_bytes,
        created_at=created,
        filename=f"{manifest.batch_id}_input.jsonl",
        purpose="batch",
        expires_at=int(time.time()) + BATCH_FILE_SECONDS,
        tenant=spec.tenant,
        suffix=".jsonl",
    )
    content = str(store.content_path(record))
    make_folder(os.path.dirname(content))
    if size_of(content) is None:
        link(spec.input, content)
    store.put(record)


def drop_partial_output(queue: Queue, spec: BatchSpec) -> None:
    """Remove the record of an unreadable output, with its log."""
    if spec.output_file_id is None:
        return
    store = FileStore(queue, os.path.dirname(os.path.dirname(spec.root)), forget_output)
    with contextlib.suppress(KeyError, StoreError):
        if not store.get(spec.tenant, spec.output_file_id).complete:
            store.drop(spec.output_file_id)


def result_locations(store: FileStore, output_file_id: str, error_file_id: str, source: str) -> tuple[str, str]:
    """Return the locations of a batch's outputs; a Parquet input gives Parquet outputs."""
    suffix = ".parquet" if is_parquet(source) else ".jsonl"
    return str(store.folder(output_file_id) / f"content{suffix}"), str(store.folder(error_file_id) / "content.jsonl")


def _store(queue: Queue, manifest: Manifest) -> FileStore:
    """Return the store that contains the batch's root."""
    return FileStore(queue, os.path.dirname(os.path.dirname(manifest.spec.root)), forget_output)


def _file_ids(manifest: Manifest) -> tuple[str, str]:
    spec = manifest.spec
    assert spec.output_file_id is not None
    assert spec.error_file_id is not None
    return spec.output_file_id, spec.error_file_id


def _output_line(manifest: Manifest, index: LineIndex, line: int, result: Result) -> bytes:
    return output_line(index.custom_id(line), result, batch_request_id(manifest.batch_id, line))


def _partial(manifest: Manifest) -> FileRecord:
    return _record(
        manifest, _file_ids(manifest)[0], "output", ".jsonl", int(manifest.timestamps["in_progress"]), complete=False
    )


def _complete(manifest: Manifest, file_id: str, kind: str, location: str, now: int) -> FileRecord:
    kept = manifest.spec.output_expires_seconds or BATCH_FILE_SECONDS
    suffix = location[location.rindex(".") :]
    record = _record(manifest, file_id, kind, suffix, now, bytes=size_of(location) or 0, expires_at=now + kept)
    return record if is_local(location) else msgspec.structs.replace(record, content=os.path.basename(location))


def _record(
    manifest: Manifest,
    file_id: str,
    kind: str,
    suffix: str,
    now: int,
    bytes: int = 0,
    expires_at: int | None = None,
    complete: bool = True,
) -> FileRecord:
    return FileRecord(
        id=file_id,
        bytes=bytes,
        created_at=now,
        filename=f"{manifest.batch_id}_{kind}{suffix}",
        purpose=RESULT_PURPOSE,
        expires_at=expires_at,
        tenant=manifest.spec.tenant,
        suffix=suffix,
        batch_id=manifest.batch_id,
        complete=complete,
    )
