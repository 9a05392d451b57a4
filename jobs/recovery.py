"""Progress counted again from what the parts hold, and parts that are not what was written."""

from typing import Any

from jobs.bitmap import Bitmap
from jobs.control import Slice
from jobs.manifest import Manifest
from jobs.parts import merge_parts, salvage, verify, write_records


def repair(manifest: Manifest) -> None:
    """Replaces damaged parts by what can be read of them; their other lines run again. Raises `StoreError`."""
    root = manifest.spec.root
    for index, part in enumerate(manifest.parts):
        if not verify(root, part):
            manifest.next_part += 1
            name = f"{manifest.next_part:06d}-repaired"
            manifest.parts[index] = write_records(root, name, salvage(root, part.name))


def restore_progress(held: Slice) -> dict[str, Any]:
    """Sets the done bitmap and the registered parts from the manifest; returns counts and usage as fields of the record."""
    manifest = held.manifest
    if not manifest.parts:
        return {}
    done = Bitmap()
    counts = {True: 0, False: 0}
    prompt, completion, cached = 0, 0, 0
    for record in merge_parts(held.root, manifest.parts):
        held.beat()
        done.add(record.line)
        result = record.result
        counts[result.succeeded] += 1
        prompt += result.usage.prompt_tokens
        completion += result.usage.completion_tokens
        cached += result.usage.cached_tokens
    held.queue.set_done(held.batch, bytes(done.bits))
    held.queue.set_parts(held.batch, {part.name: part.lines for part in manifest.parts})
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": cached}
    return {"completed": counts[True], "failed": counts[False], "restored": 1, **usage}
