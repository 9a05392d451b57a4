"""The manifest: a batch's settings and progress on disk, from which an empty Redis is rebuilt."""

import os
import secrets
import time
from pathlib import PurePath
from typing import Any, Literal

import msgspec

from jobs.batch.completion_log import Extent
from jobs.batch.log_segments import Segment
from jobs.batch.parts import Part
from jobs.batch.row_requests import RowOptions
from jobs.errors import JobsError
from jobs.protocol.default_parameters import DefaultParameters
from jobs.protocol.results import Usage
from jobs.protocol.states import EndState, State
from jobs.protocol.unknown_members import UnknownMember
from jobs.store.storage import (
    StoreError,
    delete,
    is_local,
    is_missing,
    join,
    named,
    path_of,
    read_version,
    replace_version,
    size_of,
    touch,
    write_new,
)

NAME = "manifest.json"
MADE = "made"  # with a suffix: name of a folder in a bucket with one validation's files
PROCESS = secrets.token_hex(8)
"""The name of this process in the manifests that it saves."""

# A separate file, since a long job may hold the folder when a client cancels.
_CANCEL_MARK = "cancelled"
# Fields of a spec and of a manifest.
_LOCATIONS = ("input", "root", "output", "error_output", "source")


class BatchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The caller's settings. Locations are paths or URIs; `root` is the batch's own folder."""

    input: str
    root: str
    output: str | None = None  # default: output.jsonl (or .parquet, like the input) in the root
    error_output: str | None = None  # default: errors.jsonl in the root
    # Inline: failures are in the output, at their place.
    error_file: Literal["separate", "inline"] = "separate"
    endpoint: str | None = None  # the only one allowed; None: any
    default_model: str | None = None  # for lines that name none; None: every line must
    # Served names that lines may use; None: those in the registry of models.
    models: tuple[str, ...] | None = None
    by_model: bool = False  # one model after another, for models that are not loaded together
    tenant: str = ""
    metadata: dict[str, str] | None = None
    priority: int = 0  # a lower one goes first among the tenant's batches
    completion_window_seconds: float | None = None  # None: it never expires
    seed: int = 0  # combined with the line number for the seed of a line that sets none
    rows: RowOptions | None = None  # of a table; None: its columns are members of the lines
    skip_invalid_requests: bool = False  # invalid lines get error lines, the others run
    strict_parameters: bool = False  # a line with an unknown member of its body is invalid
    streams_input: bool = False  # lines are appended to `input` while the batch runs (`open_requests`)
    # Set for a batch that came through the API, whose lines are checked like OpenAI's; the next
    # fields, too.
    input_file_id: str | None = None
    output_file_id: str | None = None  # this and the next: reserved when the batch is created
    error_file_id: str | None = None
    completion_window: str | None = None  # as requested
    # None: as long as the file store keeps a batch's files.
    output_expires_seconds: int | None = None
    max_lines: int | None = None
    queued_tokens: int | None = None  # limit for all open batches of the tenant together
    key_id: str = ""  # of the API key that created it

    @property
    def of_api(self) -> bool:
        """Return whether the batch came through the API."""
        return self.input_file_id is not None


class LineProblem(msgspec.Struct, frozen=True):
    """A reason why the file was refused; `line` counts from 1, None for the file as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class FixedOutputs(msgspec.Struct, frozen=True):
    """The written outputs of a batch in a bucket; they stay, whichever process continues."""

    completed: int
    failed: int
    usage: Usage
    output: str | None
    error_output: str | None
    ended_at: float  # unix seconds, from the files


class Superseded(JobsError):
    """Another job or another state has superseded this job; its work no longer counts."""


class Manifest(msgspec.Struct, kw_only=True, dict=True):
    """The content of manifest.json. `input_sha256` is None until the file is validated."""

    version: int = 1
    batch_id: str
    created_at: float  # unix seconds by the clock of Redis; start of the completion window
    spec: BatchSpec
    state: State = "validating"
    outcome: EndState = "completed"  # the end state, as far as known
    timestamps: dict[str, float] = msgspec.field(default_factory=dict)  # unix seconds by state
    input_bytes: int | None = None
    input_sha256: str | None = None
    source: str | None = None  # the JSONL file of the plan's offsets
    source_bytes: int = 0
    source_mtime_ns: int = 0
    source_sha256: str | None = None
    early_stamp: str = ""  # stamp of the validated source; early lines must have it
    plan_sha256: str | None = None
    total: int = 0
    models: list[str] = msgspec.field(default_factory=list)  # models that the lines name
    endpoints: list[str] = msgspec.field(default_factory=list)  # the lines' endpoints, by url
    unknown_members: list[UnknownMember] = msgspec.field(default_factory=list)  # of the lines' bodies
    # Each model's, as far as known; None for a batch of a version without, whose lines get none.
    defaults: dict[str, DefaultParameters] | None = None
    generation: int = 0  # the highest generation of the record that a job has begun under
    # The id of the record in Redis that may work here; a server with old data has another one.
    owner: str = ""
    holder: str = ""  # process that saved this, for a manifest in a bucket
    revision: int = 0  # number of saves
    parts: list[Part] = msgspec.field(default_factory=list)
    next_part: int = 0
    problems: list[LineProblem] = msgspec.field(default_factory=list)
    # This, `failed` and `usage` count lines on disk; final once the outputs are written.
    completed: int = 0
    failed: int = 0
    usage: Usage | None = None
    queued_tokens: int = 0  # estimate from the lines' bodies
    logged_lines: int = 0  # this and the next: the committed length of the completion log
    logged_bytes: int = 0
    log_segments: tuple[Segment, ...] = ()  # the same for a batch in a bucket
    made: str = ""  # the folder in the root with validation's files; "": the root itself
    fixed: FixedOutputs | None = None
    output: str | None = None  # this and the next: set once the outputs are written
    error_output: str | None = None

    @property
    def is_open(self) -> bool:
        """Return whether lines may be appended, according to the last job."""
        return self.spec.streams_input and self.source_sha256 is None

    @property
    def logged(self) -> Extent:
        """Return the committed length of the completion log."""
        return Extent(self.logged_lines, self.logged_bytes, self.log_segments)

    def note_logged(self, extent: Extent) -> None:
        """Set the committed length of the completion log."""
        self.logged_lines, self.logged_bytes, self.log_segments = extent

    @property
    def made_root(self) -> str:
        """Return the location of the plan, the line index and the spool."""
        return join(self.spec.root, self.made) if self.made else self.spec.root

    @property
    def stored_version(self) -> str | None:
        """Return the version of the file, or None for a new one."""
        return self.__dict__.get("stored_version")

    def enter(self, state: State) -> None:
        """Set the state and the time when it was entered."""
        self.state = state
        self.timestamps.setdefault(state, time.time())

    def end_cancelled(self) -> None:
        """Change an end that no client has seen to "cancelled"; the results stay."""
        self.timestamps.pop(self.state, None)
        self.outcome = "cancelled"
        self.enter("cancelling")
        self.enter("cancelled")


_decode = msgspec.json.Decoder(Manifest).decode
decode_spec = msgspec.json.Decoder(BatchSpec).decode


class ManifestDamaged(StoreError):
    """The file is not a manifest of this version."""

    retry = False


def load_manifest(root: str) -> Manifest | None:
    """Return the manifest in a batch's root, None if there is none. Raise `StoreError`.

    If the file store was restored to another folder, locations in that folder are returned.
    """
    location = join(root, NAME)
    try:
        found = read_version(location)
        if not found.data and not is_local(root):  # abandoned
            return None
        manifest = _moved(_decode(found.data), root)
    except StoreError as error:
        if is_missing(error):
            return None
        raise
    except msgspec.DecodeError as error:
        raise ManifestDamaged(
            f"{location} is not a batch manifest ({error}); remove the folder to start again"
        ) from error
    manifest.__dict__["stored_version"] = found.version
    return manifest


def give_up(root: str) -> bool:
    """Prevent a manifest from appearing in a bucket's root whose creator may still work.

    Return whether there was none. Raise `StoreError`.
    """
    return write_new(join(root, NAME), b"") is not None


def take_back(manifest: Manifest) -> bool:
    """Remove a new manifest in a bucket, also after a put without an answer.

    Return False if another process has continued with it. Raise `StoreError`.
    """
    root, version = manifest.spec.root, manifest.stored_version
    if version is None and not give_up(root) and (found := load_manifest(root)) is not None:
        if (found.holder, found.revision) != (manifest.holder, manifest.revision):
            return False
        version = found.stored_version
    return version is None or replace_version(join(root, NAME), b"", version) is not None


def _moved(manifest: Manifest, root: str) -> Manifest:
    spec = manifest.spec
    if spec.root == root or not spec.of_api:
        return manifest
    with named("cannot read", root):
        if is_local(root) and os.path.exists(spec.root) and os.path.samefile(spec.root, root):  # by another path
            return manifest
    if len(PurePath(spec.root).parts) < 3:
        raise ManifestDamaged(
            f"{join(root, NAME)} names {spec.root!r} as its folder, which is in no file store; restore it from a backup"
        )
    before, now = (f"{path_of(folder).parents[1]}/" for folder in (spec.root, root))

    def locations(holder: object) -> dict[str, str]:
        found = {name: getattr(holder, name, None) or "" for name in _LOCATIONS}
        return {name: now + found[name].removeprefix(before) for name in found if found[name].startswith(before)}

    spec, fixed = msgspec.structs.replace(spec, **locations(spec)), manifest.fixed
    if fixed is not None:
        fixed = msgspec.structs.replace(fixed, **locations(fixed))
    return msgspec.structs.replace(manifest, spec=spec, fixed=fixed, **locations(manifest))


def save_manifest(manifest: Manifest) -> None:
    """Replace the manifest durably; the caller must hold its folder (`leases.hold`).

    Raise `StoreError`, and in a bucket `Superseded` if another process has saved it since.
    """
    location, known = join(manifest.spec.root, NAME), manifest.stored_version
    manifest.holder, manifest.revision = PROCESS, manifest.revision + 1
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    if is_local(location):
        known = known or ""
    version = write_new(location, encoded) if known is None else replace_version(location, encoded, known)
    if version is None:
        raise Superseded(manifest.batch_id)
    manifest.__dict__["stored_version"] = version


def take_over(manifest: Manifest) -> None:
    """Invalidate later saves by a process that had this manifest before.

    Raise like `save_manifest`.
    """
    if manifest.holder != PROCESS and not is_local(manifest.spec.root):
        save_manifest(manifest)


def progress_fields(manifest: Manifest) -> dict[str, int]:
    """Return the record's fields about the lines on disk."""
    usage = manifest.usage or Usage()
    return {
        "stored_completed": manifest.completed,
        "stored_failed": manifest.failed,
        "logged_lines": manifest.logged_lines,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "reasoning_tokens": usage.reasoning_tokens or 0,
        "device_microseconds": usage.device_microseconds,
    }


def end_fields(manifest: Manifest) -> dict[str, Any]:
    """Return the record's fields of an ended batch."""
    return {
        "open": False, "outcome": manifest.outcome,
        "total": manifest.completed + manifest.failed, "completed": manifest.completed,
        "failed": manifest.failed, "output": manifest.output or "", "error_output": manifest.error_output or "",
        **progress_fields(manifest),
    }  # fmt: skip


def mark_cancelled(root: str) -> None:
    """Mark the batch as cancelled, durably; several callers may do so at once. Raise
    `StoreError`.
    """
    touch(join(root, _CANCEL_MARK))  # without a temporary file, which the holder of the folder would sweep


def unmark_cancelled(root: str) -> None:
    """Remove the mark."""
    delete(join(root, _CANCEL_MARK))


def is_marked_cancelled(root: str) -> bool:
    """Return whether the batch was cancelled."""
    return size_of(join(root, _CANCEL_MARK)) is not None
