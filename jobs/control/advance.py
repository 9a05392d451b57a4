"""Advance: ingest the next lines of the plan, and drain finished results into part files.

A slice lasts about a second, may be killed anywhere and run again. A drain writes the part and (for
an API batch) the completion log, then the manifest, which commits both, then updates Redis. After a
kill before the update, or when Redis returns to an earlier state, Redis has results that are in
parts already; each drain first corrects that, and writes no line twice.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from functools import partial
from typing import Any, BinaryIO

from jobs.batch.appending import take_appended
from jobs.batch.bitmap import Bitmap
from jobs.batch.manifest import BatchSpec, Manifest, Superseded, progress_fields, save_manifest
from jobs.batch.parts import (
    Part,
    PartDamaged,
    Record,
    drop_unlisted,
    merge_parts,
    read_part,
    to_compact,
    verify,
    write_part,
    write_records,
)
from jobs.batch.plan import PlanEntry, read_plan
from jobs.batch.recovery import count_results, restore_parts
from jobs.batch.register import register
from jobs.batch.result_files import LoggedLines, log_successes, may_become_log
from jobs.batch.source import open_plan, open_source
from jobs.batch.stored_lines import are_small, read_stored, save_stored
from jobs.control.model_defaults import settle_defaults
from jobs.control.slices import Slice
from jobs.daemon_threads import run_beside
from jobs.protocol.default_parameters import DefaultParameters, with_defaults
from jobs.protocol.endpoints import BATCH_URLS
from jobs.protocol.lines import decode_json, encode_body, read_line
from jobs.protocol.requests import Request
from jobs.protocol.results import Result
from jobs.queue import keys
from jobs.queue.batch_fields import BatchFields, BatchStatus
from jobs.queue.batch_records import MAX_PART_LINES
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import MAX_ITEMS
from jobs.store.storage import StoreError, is_local

SLICE_SECONDS = 1.0
FEED_SECONDS = 0.25
"""Longest ingest in a slice before results are drained; they would pile up in Redis otherwise."""
FOLLOW_SECONDS = 30.0
"""An open batch has a slice at least this often: Redis may have lost the notice of an append."""
DRAIN_SECONDS = 1.0
"""Results wait at least this long for more, unless there are many or they are the last ones."""

_DRAIN_BYTES = 2 * 1024 * 1024
_MOST_DRAINED_BYTES = 32 * 1024 * 1024
CHUNK_BYTES = 2 * 1024 * 1024
_WINDOW_SECONDS = 20.0
WINDOW_LINES = 4096  # at least, at any rate of finished lines
_MOST_WINDOW_LINES = 32_768  # at most: as many as Redis dispatches in about 2 s
_ALL_WINDOWS = 8  # limit for all batches together, as a multiple of one window's bytes
_SMALLEST_WINDOW = 256 * 1024
_MOST_REMEMBERED = 10_000
_MASK64 = (1 << 64) - 1

logger = logging.getLogger(__name__)


class BatchProgress:
    """State of a batch that this process keeps between slices; losing it costs only a little
    speed.
    """

    def __init__(self) -> None:
        self.settled: str | None = None  # the last part when unlisted ones were removed
        self.stored: tuple[set[str], Bitmap] = set(), Bitmap()  # parts and their lines, which are skipped
        self.logged = LoggedLines()
        self.drained_at = 0.0  # monotonic seconds
        self.measured_at = 0.0
        self.finished = 0
        self.rate = 0.0  # lines per second
        self.followed_at = -math.inf  # when the appends of the open batch were last read, monotonic seconds

    def measure(self, finished: int) -> None:
        """Update the rate at which lines finish."""
        now = time.monotonic()
        elapsed = now - self.measured_at
        if elapsed >= 0.5:
            if self.measured_at:
                self.rate = 0.5 * self.rate + 0.5 * (finished - self.finished) / elapsed
            self.measured_at, self.finished = now, finished


_progress: dict[str, BatchProgress] = {}


def advance(held: Slice) -> bool:
    """Run one slice; return whether there is more to do at once.

    Moves the batch to `finalizing` when every line is done. Raise `StoreError`.
    """
    deadline = time.monotonic() + SLICE_SECONDS
    progress = batch_progress(held.batch)
    while True:
        held.check_current()
        if held.manifest.spec.streams_input:
            follow_appends(held, progress)
        drained = drain(held, progress)  # first, since a full Redis accepts no lines
        fields = held.record()
        while drained and fields.result_bytes and time.monotonic() < deadline and drain(held, progress):
            fields = held.record()
        if fed := feed(held, progress, fields, min(deadline, time.monotonic() + FEED_SECONDS)):
            fields = held.record()
        if fields.all_done and not fields.result_bytes:
            _progress.pop(held.batch, None)
            held.move("finalizing", {"outcome": "completed"})
            return True
        if not fed and not drained:
            return False
        if time.monotonic() >= deadline:
            return True


def batch_progress(batch: str) -> BatchProgress:
    """Return this process' state of the batch."""
    if len(_progress) > _MOST_REMEMBERED:
        _progress.clear()
    return _progress.setdefault(batch, BatchProgress())


def follow_appends(held: Slice, progress: BatchProgress) -> None:
    """Process new appends to an open batch, and its close."""
    manifest, fields = held.manifest, held.record()
    if manifest.is_open:
        take_appended(manifest, held.check_current)
        if not manifest.is_open:
            save_manifest(manifest)
    progress.followed_at = time.monotonic()
    if manifest.total < fields.total:
        _begin_again(held, fields.total)
    if (manifest.total, manifest.is_open) != (fields.total, fields.open):
        # In the current pass over the plan, new lines may be of any model.
        held.note({**plan_fields(manifest), "open_models": manifest.models})


def _begin_again(held: Slice, total: int) -> None:
    """Drop Redis' data of a batch whose folder was restored to an older state.

    It would be taken for lines appended since. Raise `Superseded`.
    """
    message = "batch %s has %d lines in its folder, fewer than the %d before; running it again from the folder"
    logger.warning(message, held.batch, held.manifest.total, total)
    held.queue.forget(held.batch)
    register(held.queue, held.manifest)
    raise Superseded(held.batch)


def plan_fields(manifest: Manifest) -> dict[str, Any]:
    """Return the record's fields about the plan."""
    appended = manifest.timestamps.get("appended")
    unknown = {"unknown_members": manifest.unknown_members} if manifest.unknown_members else {}
    return {
        "open": manifest.is_open, "total": manifest.total, "line_models": manifest.models,
        "queued_tokens": manifest.queued_tokens, "timestamps": {} if appended is None else {"appended": appended},
        **unknown,
    }  # fmt: skip


def drain_all(held: Slice) -> None:
    """Drain all finished results. Raise `StoreError`."""
    progress = BatchProgress()
    while drain(held, progress, everything=True):
        pass


def needs_slice(queue: Queue, batch: str, fields: BatchStatus) -> bool:
    """Return whether a slice has something to do."""
    if fields.result_bytes > 0 or fields.all_done:
        return True
    if fields.open and batch_progress(batch).followed_at < time.monotonic() - FOLLOW_SECONDS:
        return True
    return feed_needed(queue, batch, fields)


def feed_needed(queue: Queue, batch: str, fields: BatchStatus) -> bool:
    """Return whether the plan has more lines and a ready list is low."""
    models = _feeding(queue, fields)
    return bool(models) and min(ready_lengths(queue, batch, models).values()) <= max(0, fields.low_water)


def feed(held: Slice, progress: BatchProgress, fields: BatchFields, deadline: float) -> bool:
    """Fill the batch's window from the plan; return False if there was nothing to add.

    Lines of a model without a worker may use their share of the window. Further ones are skipped,
    so that they do not block others; they are added in another pass over the plan, when that
    model's list is low.
    """
    queue, batch = held.queue, held.batch
    progress.measure(fields.finished)
    window = min(max(WINDOW_LINES, int(progress.rate * _WINDOW_SECONDS)), _MOST_WINDOW_LINES)
    left = fields.total - fields.cursor
    if fields.low_water < 0 < left and (fields.open or left > MAX_ITEMS):
        # More lines than are added at once. Claims may shorten the lists as soon as these are read.
        held.note({"low_water": window // 2})
        fields = held.record()
    models = _feeding(queue, fields)
    if not models or (shortest := min(ready_lengths(queue, batch, models).values())) > window // 2:
        return False
    if fields.cursor >= fields.total:
        held.note({"cursor": 0, "restored": True, "open_models": fields.passed_over, "passed_over": []})
        fields = held.record()
    cursor, total = fields.cursor, fields.total
    done = _lines_to_pass_over(held, progress) if fields.restored else Bitmap()
    most_bytes = most_window_bytes(queue)
    start, size = cursor, fields.body_bytes
    settle_defaults(held)
    with open_plan(held.manifest) as plan, open_source(held.manifest, buffered=False) as source:
        while cursor < total and shortest < window and size < most_bytes:
            held.check_current()
            entries = read_plan(plan, cursor, min(MAX_ITEMS, total - cursor))
            if not entries:
                raise StoreError(f"the plan of {batch} ends at line {cursor} of {total}")
            rows, taken = _read_rows(held, source, entries, done)
            rows = _without_full(held, rows, models, window, most_bytes)
            if not queue.ingest(batch, rows, cursor, cursor + taken):
                break
            cursor += taken
            if cursor == total or time.monotonic() >= deadline:
                break
            shortest, size = min(ready_lengths(queue, batch, models).values()), queue.window_bytes(batch)
    if cursor > start:
        # At this length the next claim asks for another slice, if there is more. It is half of the
        # lines that fit, if large bodies fill the window early.
        more = cursor < total or bool(held.fields.passed_over)
        lengths = [length for length in ready_lengths(queue, batch, models).values() if length] if more else []
        low_water = min(window, *lengths) // 2 if lengths else 0 if more else -1
        if low_water != fields.low_water:
            held.note({"low_water": low_water})
    return cursor > start


def _lines_to_pass_over(held: Slice, progress: BatchProgress) -> Bitmap:
    """Return lines on disk, which are done in Redis; read again after parts were replaced.

    Redis may list more lines as done, but it can lose results that are in no part, and such lines
    must be ingested again.
    """
    settle(held, progress)
    names = {part.name for part in held.manifest.parts}
    known, lines = progress.stored
    if not known or not known <= names:
        lines = read_stored(held.root, held.manifest.parts, held.check_current)
        progress.stored = names, lines
    return lines


def ready_lengths(queue: Queue, batch: str, models: list[str]) -> dict[str, int]:
    """Return how many lines wait for each model."""
    with queue.redis.pipeline(transaction=False) as pipeline:
        for model in models:
            pipeline.llen(keys.ready(batch, model))
        return dict(zip(models, pipeline.execute(), strict=True))


def _feeding(queue: Queue, fields: BatchStatus) -> list[str]:
    """Return the models whose ready lists limit the ingest.

    They are the served models among those with more lines in the plan; all of these if none is
    served.
    """
    if fields.cursor >= fields.total:
        return fields.passed_over
    models = fields.line_models if fields.open_models is None else fields.open_models
    served = [model for model in models if len(models) == 1 or queue.redis.exists(keys.serving(model))]
    return served or models


def _without_full(
    held: Slice, rows: list[tuple[int, Request]], models: list[str], window: int, most_bytes: int
) -> list[tuple[int, Request]]:
    """Return the rows without skipped ones; the record has their models before the cursor passes
    them.
    """
    queue, batch = held.queue, held.batch
    idle = sorted({request.model for _, request in rows} - set(models))
    if not idle:
        return rows
    size = queue.window_bytes(batch) / max(1, queue.window_lines(batch))
    share = most_bytes / len(held.fields.line_models)
    full = {
        model
        for model, length in ready_lengths(queue, batch, idle).items()
        if length >= window or length * size >= share
    }
    noted = set(held.record().passed_over)
    if full - noted:
        held.note({"passed_over": sorted(full | noted)})
    return [(line, request) for line, request in rows if request.model not in full]


def drain(held: Slice, progress: BatchProgress, everything: bool = False) -> bool:
    """Write finished results to a part and remove them from Redis.

    Return False if there were none, or too few yet.
    """
    queue, batch, manifest = held.queue, held.batch, held.manifest
    settle(held, progress)
    fields = held.record()
    waiting = fields.result_bytes
    due = time.monotonic() - progress.drained_at >= DRAIN_SECONDS
    if not waiting or not (everything or due or waiting >= _DRAIN_BYTES or fields.all_done):
        return False
    most = _lines_at_once(queue, batch, waiting)
    found = queue.results(batch, most)
    if not found:
        return False
    held.check_current()
    stored = read_stored(held.root, manifest.parts, held.check_current)
    results = [(line, result) for line, result in found if line not in stored]
    if len(results) < len(found):  # Redis lost data after the settle
        _restore(held)
        return True
    at_once = fields.all_done and not manifest.parts and len(found) < most
    is_logged = manifest.spec.of_api and not (at_once and may_become_log(manifest))
    part = _store(held, progress, results, is_logged)
    manifest.parts.append(part)
    count_results(manifest, (result for _, result in results))
    compacted = compact(held)
    save_manifest(manifest)
    if compacted or not are_small(held.root, [part.bytes]):
        for line, _ in results:
            stored.add(line)
        save_stored(held.root, manifest.parts, stored)
    stored_fields = progress_fields(manifest)
    if not queue.drained(batch, part.name, [line for line, _ in results], stored_fields):  # Redis lost data since
        _restore(held)
        return True
    progress.settled, progress.drained_at = part.name, time.monotonic()
    if compacted:
        drop_unlisted(held.root, manifest.parts, manifest.next_part)
        queue.set_parts(batch, held.generation, {part.name: part.lines for part in manifest.parts})
    return True


def _store(held: Slice, progress: BatchProgress, results: list[tuple[int, Result]], is_logged: bool) -> Part:
    """Write a part and the completion log to a bucket concurrently; the manifest commits both."""
    if not is_logged or is_local(held.root):
        part = write_part(held.root, _next_name(held), results)
        if is_logged:
            log_successes(held.queue, held.manifest, results, progress.logged)
        return part
    writing = run_beside(partial(write_part, held.root, _next_name(held), results))
    try:
        log_successes(held.queue, held.manifest, results, progress.logged)
    finally:
        wait([writing])
    return writing.result()


def _lines_at_once(queue: Queue, batch: str, waiting: int) -> int:
    """Return the number of results for one part; it limits a part to some megabytes in memory.

    Above the limit of undrained results there may be as many more as the workers run.
    """
    if waiting <= _MOST_DRAINED_BYTES:
        return MAX_PART_LINES
    lines = queue.undrained_lines(batch) * _MOST_DRAINED_BYTES // waiting
    return min(max(1, lines), MAX_PART_LINES)


def settle(held: Slice, progress: BatchProgress) -> None:
    """Restore the results of the parts in Redis, if it lacks the last part.

    The process that wrote that part died before it updated Redis, or Redis lost data. If this
    process is new to the batch, it also removes unlisted parts of such a process.
    """
    manifest = held.manifest
    last = _last(manifest)
    remembered = progress.settled == last
    if last is not None and not held.queue.has_part(held.batch, last):
        _restore(held)
    if not remembered:
        _drop_left_parts(manifest)
        progress.settled = _last(manifest)


def _drop_left_parts(manifest: Manifest) -> None:
    """Remove parts of a process that died before it listed them.

    Only the process that holds the batch can replace the manifest, and later numbers continue after
    those in it.
    """
    highest = drop_unlisted(manifest.spec.root, manifest.parts, manifest.next_part)
    if highest > manifest.next_part:
        manifest.next_part = highest
        save_manifest(manifest)
        drop_unlisted(manifest.spec.root, manifest.parts, manifest.next_part)


def _last(manifest: Manifest) -> str | None:
    return manifest.parts[-1].name if manifest.parts else None


def _restore(held: Slice) -> None:
    restore_parts(held.queue, held.manifest, held.check_current)
    held.note({"restored": True, **progress_fields(held.manifest)})


def compact(held: Slice) -> bool:
    """Merge many small parts into one, at the place of the first.

    The last part is not merged, since Redis may not have it yet. Damaged parts stay for
    `recovery.repair`: their lines must not disappear unnoticed. If one turns out to be damaged, all
    stay. Raise `StoreError`.
    """
    parts = held.manifest.parts
    tier = [part for part in to_compact(parts[:-1]) if verify(held.root, part)]
    if len(tier) < 2:
        return False
    records = _checking(held, merge_parts(held.root, tier, read=read_part))
    try:
        merged = write_records(held.root, _next_name(held), records)
    except PartDamaged:
        return False
    names = {part.name for part in tier[1:]}
    held.manifest.parts = [merged if part.name == tier[0].name else part for part in parts if part.name not in names]
    return True


def _checking(held: Slice, records: Iterator[Record]) -> Iterator[Record]:
    for record in records:
        held.check_current()
        yield record


def _next_name(held: Slice) -> str:
    """Return a name that is never reused, not even by a stopped process that resumes later."""
    held.manifest.next_part += 1
    return f"{held.manifest.next_part:06d}-{held.generation}"


def _read_rows(
    held: Slice, source: BinaryIO, entries: list[PlanEntry], done: Bitmap
) -> tuple[list[tuple[int, Request]], int]:
    """Return requests for the plan's next entries that are not done, and the number of entries
    read.

    The requests have up to some megabytes.
    """
    rows: list[tuple[int, Request]] = []
    manifest, size, taken = held.manifest, 0, 0
    now = time.time()
    for entry in entries:
        if size > CHUNK_BYTES:
            break
        taken += 1
        if entry.line in done:
            continue
        source.seek(entry.offset)
        raw = source.read(entry.length)
        if len(raw) < entry.length:
            raise StoreError(f"{manifest.source} ends within line {entry.line}")
        rows.append((entry.line, request_of(manifest.spec, entry.line, raw, now, manifest.defaults)))
        size += entry.length
    return rows, taken


def request_of(
    spec: BatchSpec, number: int, raw: bytes, now: float, defaults: Mapping[str, DefaultParameters] | None
) -> Request:
    """Return the request of one line of the source; `defaults` are the manifest's."""
    line = read_line(raw)
    model, body = line.model, line.body
    if not model:
        assert spec.default_model is not None, "validate lets no other line pass"
        model = spec.default_model
        body = encode_body(decode_json(body) | {"model": model})
    url = BATCH_URLS[line.url]
    request = Request(url, model, body, seed_of(spec.seed, number), line.custom_id, now)
    if defaults is not None:
        request.body, request.defaults = with_defaults(body, url, defaults.get(model))
    return request


def seed_of(seed: int, line: int) -> int:
    """Return the seed of a line that sets none.

    It has 63 bits and is the same in every run (splitmix64, Steele et al. 2014).
    """
    mixed = (seed + line * 0x9E3779B97F4A7C15) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (mixed ^ (mixed >> 31)) >> 1


def most_window_bytes(queue: Queue, active: int | None = None) -> int:
    """Return how many bytes of lines a batch may have in Redis, given the number of active
    batches.
    """
    batches: Any = queue.redis.scard(keys.ACTIVE) if active is None else active
    window = queue.settings.window_bytes
    share: int = _ALL_WINDOWS * window // max(1, batches)
    return min(window, max(_SMALLEST_WINDOW, share))
