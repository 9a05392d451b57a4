"""The folder of a new or resumed batch: whether it can be used, and whether its progress is
kept.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from jobs.batch.bitmap import Bitmap
from jobs.batch.input_files import compression_of, is_parquet
from jobs.batch.manifest import BatchSpec, Manifest, load_manifest
from jobs.batch.open_requests import OpenRequests
from jobs.batch.parts import merge_parts, write_records
from jobs.batch.plan import PLAN_NAME
from jobs.batch.recovery import repair
from jobs.batch.row_requests import RowOptions
from jobs.batch.source import is_whole
from jobs.errors import JobsError
from jobs.protocol.states import JOBS
from jobs.queue.request_queue import Queue
from jobs.store.storage import StoreError, absolute, join, local_path, make_folder, open_input, sha256_of, size_of

_AGAIN = "remove that folder, or name another output"


class BatchRefused(JobsError):
    """The batch cannot be created; the text is one sentence."""

    exit_code = 2


class InputChanged(BatchRefused):
    """The folder has results of another input, or of other settings."""


def with_absolute_locations(spec: BatchSpec) -> BatchSpec:
    """Return the batch with locations that do not depend on the working directory."""
    names = [name for name in ("input", "root", "output", "error_output") if getattr(spec, name) is not None]
    return msgspec.structs.replace(spec, **{name: absolute(getattr(spec, name)) for name in names})


def check_locations(spec: BatchSpec) -> None:
    """Raise `BatchRefused` for problems that are known before anything runs."""
    if local_path(spec.root) is None:
        raise BatchRefused(f"the batch's folder {spec.root} is remote: it must be on a file system that has locks")
    try:
        if spec.streams_input:
            OpenRequests(spec).create()
        if size_of(spec.input) is None:
            raise BatchRefused(f"there is no file {spec.input}")
        open_input(spec.input).close()
        make_folder(spec.root)
        for location in filter(None, (spec.output, spec.error_output)):
            _check_output(location, spec.input)
    except StoreError as error:
        raise BatchRefused(str(error)) from error


def running_in(queue: Queue, spec: BatchSpec, retry_failed: bool) -> str | None:
    """Return the id of the batch in the root while the queue works on it.

    A record that a killed start was about to remove does not count. Raise `BatchRefused` if the
    running batch differs from the requested one.
    """
    found = load_manifest(spec.root)
    if found is None or queue.batch_fields(found.batch_id).state not in JOBS:
        return None
    check_same(found, spec)
    if retry_failed:
        raise BatchRefused(
            f"{found.batch_id} is running in {spec.root}: failed lines can be run again when it has ended"
        )
    return found.batch_id


def taken_up(found: Manifest, spec: BatchSpec, retry_failed: bool, now: float) -> Manifest | None:
    """Return the manifest to resume from, or None if the folder has no usable progress."""
    _check_kind(found, spec)
    if not found.parts:
        return None
    check_same(found, spec)
    manifest = msgspec.structs.replace(found, spec=spec, outcome="completed", problems=[], created_at=now)
    repair(manifest)
    # The models decide which lines are invalid; a fleet's models may have changed
    as_strict = found.spec.strict_parameters == spec.strict_parameters
    same_models = spec.models is not None and found.spec.models == spec.models
    same = found.spec.skip_invalid_requests and same_models and as_strict
    judged = spec.skip_invalid_requests and not spec.streams_input and not same
    _drop_failures(manifest, 400 if retry_failed or judged else 500)
    served = spec.models is None or set(found.models) <= set(spec.models)
    planned = as_strict and _is_planned(found)
    if spec.streams_input:  # each line was checked when it arrived
        planned = served = True
    if judged or not served or not planned or (manifest.source != spec.input and not is_whole(manifest)):
        manifest.plan_sha256 = None
    manifest.timestamps = {}
    manifest.enter("validating")
    return manifest


def _is_planned(found: Manifest) -> bool:
    """Return whether the plan is there as it was made."""
    plan = join(found.spec.root, PLAN_NAME)
    return found.plan_sha256 is not None and size_of(plan) is not None and sha256_of(plan) == found.plan_sha256


def _check_output(location: str, source: str) -> None:
    path = local_path(location)
    if (codec := compression_of(location)) is not None and is_parquet(location[: location.rindex(".")]):
        raise BatchRefused(f"the output {location} cannot be compressed by {codec}: Parquet is compressed as it is")
    if path is None:
        return
    if path.is_dir():
        raise BatchRefused(f"the output {location} is a folder")
    if path.resolve() == (local_path(source) or Path()).resolve():
        raise BatchRefused(f"the output {location} is the input itself")
    make_folder(str(path.parent))
    probe = path.with_name(f".{path.name}.probe")
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise BatchRefused(f"cannot write {location}: {error.strerror}") from error


def check_same(found: Manifest, spec: BatchSpec, place: str = "", again: str = "") -> None:
    """Raise `InputChanged` if existing results do not fit the request.

    The results are in `place`, by default the folder; `again` says how to replace them.
    """
    place, again = place or spec.root, again or _AGAIN
    _check_kind(found, spec)
    size = size_of(spec.input)
    if found.input_sha256 is not None and (size != found.input_bytes or sha256_of(spec.input) != found.input_sha256):
        raise InputChanged(f"{spec.input} has changed since {place} was begun; {again}")
    differences = [
        *_differences(found.spec, spec, ("default_model", "endpoint", "seed")),
        *_differences(found.spec, spec, ("skip_invalid_requests",) if found.spec.skip_invalid_requests else ()),
        *_differences(found.spec.rows or RowOptions(), spec.rows or RowOptions(), RowOptions.__struct_fields__),
    ]
    if differences:
        name, before, now = differences[0]
        raise InputChanged(f"{place} was begun with {name} {before}, not {now}; {again}")


def _check_kind(found: Manifest, spec: BatchSpec) -> None:
    """Raise `InputChanged` if the batch had a file and now has arriving lines, or vice versa."""
    if found.spec.streams_input != spec.streams_input:
        raise InputChanged(f"{spec.root} was begun with {_kind(found.spec)}, not with {_kind(spec)}; {_AGAIN}")


def _kind(spec: BatchSpec) -> str:
    return "lines that arrive" if spec.streams_input else "a file"


def _differences(found: object, asked: object, names: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    for name in names:
        before, now = getattr(found, name), getattr(asked, name)
        if before != now:
            yield name, before, now


def _drop_failures(manifest: Manifest, status: int) -> None:
    """Remove results of `status` and above from the parts, so that their lines run again."""
    root = manifest.spec.root
    failed = Bitmap()
    for record in merge_parts(root, manifest.parts):
        if record.result.status >= status:
            failed.add(record.line)
    if not failed.bits:
        return
    kept = (record for record in merge_parts(root, manifest.parts) if record.line not in failed)
    manifest.next_part += 1
    manifest.parts = [write_records(root, f"{manifest.next_part:06d}-kept", kept)]
