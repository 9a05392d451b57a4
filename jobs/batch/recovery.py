"""Recovery: recount progress from the parts, and replace damaged parts."""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from jobs.batch.bitmap import Bitmap
from jobs.batch.manifest import Manifest, progress_fields, save_manifest
from jobs.batch.parts import Part, merge_parts, salvage, verify, write_records
from jobs.batch.stored_lines import save_stored
from jobs.protocol.results import Result, Usage
from jobs.queue.request_queue import Queue


class RestoredProgress(NamedTuple):
    """A record's fields and bitmap for the lines on disk; they are consistent and set at once."""

    fields: dict[str, Any]
    done: bytes | None  # the bitmap; None without parts


def repair(manifest: Manifest, known: Collection[str] = ()) -> bool:
    """Replace damaged parts, except the `known` ones, by their readable records.

    Their other lines run again. Return whether there were any. Raise `StoreError`.
    """
    root, repaired = manifest.spec.root, False
    for index, part in enumerate(manifest.parts):
        if part.name not in known and not verify(root, part):
            manifest.next_part += 1
            name = f"{manifest.next_part:06d}-repaired"
            manifest.parts[index] = write_records(root, name, salvage(root, part.name))
            repaired = True
    return repaired


def restore_progress(queue: Queue, manifest: Manifest, check: Callable[[], None]) -> RestoredProgress:
    """Set the registered parts from the manifest; return the changes for the move to
    `in_progress`.
    """
    done = _count_again(manifest, check)
    if not manifest.parts:
        return RestoredProgress(progress_fields(manifest), None)
    save_stored(manifest.spec.root, manifest.parts, done)
    queue.set_parts(manifest.batch_id, manifest.generation, {part.name: part.lines for part in manifest.parts})
    counts = {"completed": manifest.completed, "failed": manifest.failed, "restored": True}
    return RestoredProgress({**counts, **progress_fields(manifest)}, bytes(done.bits))


def restore_parts(queue: Queue, manifest: Manifest, check: Callable[[], None]) -> None:
    """Restore lines of the parts in Redis, after a loss of data or an interrupted drain.

    Lines on disk are marked done with their outcome. The last part is registered last. Damaged
    parts that Redis lacks are repaired first. Raise `StoreError`.
    """
    known: Collection[str] = queue.parts(manifest.batch_id)
    if all(part.name in known for part in manifest.parts):
        known = ()
    if repair(manifest, known):
        _count_again(manifest, check)
        save_manifest(manifest)
    for part in [part for part in manifest.parts if part.name not in known]:
        queue.restore(manifest.batch_id, part.name, part.lines, _outcomes(manifest.spec.root, part, check))


def _outcomes(root: str, part: Part, check: Callable[[], None]) -> Iterator[tuple[int, bool]]:
    for record in salvage(root, part.name):
        check()
        yield record.line, record.result.succeeded


def _count_again(manifest: Manifest, check: Callable[[], None]) -> Bitmap:
    """Return the readable lines, and set the manifest's counts from them."""
    manifest.completed, manifest.failed, manifest.usage = 0, 0, None
    lines = Bitmap()
    for record in merge_parts(manifest.spec.root, manifest.parts):
        check()
        lines.add(record.line)
        count_results(manifest, [record.result])
    return lines


def count_results(manifest: Manifest, results: Iterable[Result]) -> None:
    """Add results that were written to disk to the manifest's counts and usage."""
    usage = manifest.usage or Usage()
    for result in results:
        manifest.completed += result.succeeded
        manifest.failed += not result.succeeded
        usage = usage.plus(result.usage)
    manifest.usage = usage
