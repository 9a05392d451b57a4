"""Progress counted again from what the parts hold, and parts that are not what was written."""

from collections.abc import Callable, Iterable
from typing import Any

from jobs.batch.bitmap import Bitmap
from jobs.batch.manifest import Manifest, progress_fields
from jobs.batch.parts import merge_parts, salvage, verify, write_records
from jobs.protocol.results import Result, Usage
from jobs.queue.request_queue import Queue


def repair(manifest: Manifest) -> None:
    """Replace damaged parts by what can be read of them; their other lines run again.

    Raise `StoreError`.
    """
    root = manifest.spec.root
    for index, part in enumerate(manifest.parts):
        if not verify(root, part):
            manifest.next_part += 1
            name = f"{manifest.next_part:06d}-repaired"
            manifest.parts[index] = write_records(root, name, salvage(root, part.name))


def restore_progress(queue: Queue, manifest: Manifest, check: Callable[[], None]) -> dict[str, Any]:
    """Set the done bitmap and the registered parts from the manifest; return counts and usage as
    fields of the record.
    """
    manifest.completed = manifest.failed = 0
    manifest.usage = None
    if not manifest.parts:
        return progress_fields(manifest)
    done = Bitmap()
    for record in merge_parts(manifest.spec.root, manifest.parts):
        check()
        done.add(record.line)
        count_results(manifest, [record.result])
    queue.set_done(manifest.batch_id, bytes(done.bits))
    queue.set_parts(manifest.batch_id, {part.name: part.lines for part in manifest.parts})
    return {"completed": manifest.completed, "failed": manifest.failed, "restored": True, **progress_fields(manifest)}


def count_results(manifest: Manifest, results: Iterable[Result]) -> None:
    """Add results that came to disk to the manifest's counts and usage."""
    usage = manifest.usage or Usage()
    prompt, completion, cached = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
    for result in results:
        manifest.completed += result.succeeded
        manifest.failed += not result.succeeded
        prompt += result.usage.prompt_tokens
        completion += result.usage.completion_tokens
        cached += result.usage.cached_tokens
    manifest.usage = Usage(prompt, completion, cached)
