"""Progress counted again from what the parts hold, and parts that are not what was written."""

from collections.abc import Iterable
from typing import Any

from jobs.bitmap import Bitmap
from jobs.control import Slice
from jobs.manifest import Manifest, progress_fields
from jobs.parts import merge_parts, salvage, verify, write_records
from jobs.results import Result, Usage


def repair(manifest: Manifest) -> None:
    """Replaces damaged parts by what can be read of them; their other lines run again.

    Raises `StoreError`.
    """
    root = manifest.spec.root
    for index, part in enumerate(manifest.parts):
        if not verify(root, part):
            manifest.next_part += 1
            name = f"{manifest.next_part:06d}-repaired"
            manifest.parts[index] = write_records(root, name, salvage(root, part.name))


def restore_progress(held: Slice) -> dict[str, Any]:
    """Sets the done bitmap and the registered parts from the manifest; returns counts and usage as
    fields of the record.
    """
    manifest = held.manifest
    manifest.completed = manifest.failed = 0
    manifest.usage = None
    if not manifest.parts:
        return progress_fields(manifest)
    done = Bitmap()
    for record in merge_parts(held.root, manifest.parts):
        held.beat()
        done.add(record.line)
        count_results(manifest, [record.result])
    held.queue.set_done(held.batch, bytes(done.bits))
    held.queue.set_parts(held.batch, {part.name: part.lines for part in manifest.parts})
    return {"completed": manifest.completed, "failed": manifest.failed, "restored": 1, **progress_fields(manifest)}


def count_results(manifest: Manifest, results: Iterable[Result]) -> None:
    """Adds results that came to disk to the manifest's counts and usage."""
    usage = manifest.usage or Usage()
    prompt, completion, cached = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
    for result in results:
        manifest.completed += result.succeeded
        manifest.failed += not result.succeeded
        prompt += result.usage.prompt_tokens
        completion += result.usage.completion_tokens
        cached += result.usage.cached_tokens
    manifest.usage = Usage(prompt, completion, cached)
