"""The manifest: what a batch is and what is done of it, on disk, so that an empty Redis can be
rebuilt.
"""

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
MADE = "made"  # with a suffix: what the folders in a bucket are called that validations make
PROCESS = secrets.token_hex(8)
"""Names this process in the manifests that it saves."""

# A file of its own, since a long job may hold the folder when a client cancels
_CANCEL_MARK = "cancelled"
# Fields of a spec and of a manifest
_LOCATIONS = ("input", "root", "output", "error_output", "source")


class BatchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller asks for. Locations are paths or URIs; `root` is the batch's own folder."""

    input: str
    root: str
    output: str | None = None  # default: output.jsonl (or .parquet, as the input) in the root
    error_output: str | None = None  # default: errors.jsonl in the root
    # Inline: failures are in the output, in their place
    error_file: Literal["separate", "inline"] = "separate"
    endpoint: str | None = None  # the only one allowed; None: either
    default_model: str | None = None  # for lines that name none; None: every line must
    # Served names that lines may use; None: those in the registry of models
    models: tuple[str, ...] | None = None
    by_model: bool = False  # one model's lines after another's, where they are not loaded together
    tenant: str = ""
    metadata: dict[str, str] | None = None
    priority: int = 0  # a lower one goes first among the tenant's batches
    completion_window_seconds: float | None = None  # None: it never expires
    seed: int = 0  # from it and the line number comes the seed of a line that names none
    rows: RowOptions | None = None  # of a table; None: its columns are members of the lines
    skip_invalid_requests: bool = False  # they get error lines, and the others run
    strict_parameters: bool = False  # a line with an unknown member of its body is invalid
    streams_input: bool = False  # lines are appended to `input` while the batch runs (`open_requests`)
    # Set for a batch that came through the API, whose lines are checked as OpenAI's are; so are the
    # next fields
    input_file_id: str | None = None
    output_file_id: str | None = None  # this and the next are set aside when the batch is made
    error_file_id: str | None = None
    completion_window: str | None = None  # as it was asked for
    # None: as long as the file store keeps a batch's files
    output_expires_seconds: int | None = None
    max_lines: int | None = None
    queued_tokens: int | None = None  # that all open batches of the tenant together may hold
    key_id: str = ""  # of the API key that made it

    @property
    def of_api(self) -> bool:
        """Whether the batch came through the API."""
        return self.input_file_id is not None


class LineProblem(msgspec.Struct, frozen=True):
    """Why the file was refused; `line` counts from 1, None for the file as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class FixedOutputs(msgspec.Struct, frozen=True):
    """What was written of a batch in a bucket, and stays so, whichever process goes on with it."""

    completed: int
    failed: int
    usage: Usage
    output: str | None
    error_output: str | None
    ended_at: float  # unix seconds, of the files


class Superseded(JobsError):
    """The batch moved on under another job, or to another state; what this one does no longer
    counts.
    """


class Manifest(msgspec.Struct, kw_only=True, dict=True):
    """The content of manifest.json. `input_sha256` is None until the file was validated."""

    version: int = 1
    batch_id: str
    created_at: float  # unix seconds by the clock of Redis, from which the completion window counts
    spec: BatchSpec
    state: State = "validating"
    outcome: EndState = "completed"  # what the batch ends as
    timestamps: dict[str, float] = msgspec.field(default_factory=dict)  # unix seconds by state
    input_bytes: int | None = None
    input_sha256: str | None = None
    source: str | None = None  # JSONL that the plan's offsets point into
    source_bytes: int = 0
    source_mtime_ns: int = 0
    source_sha256: str | None = None
    early_stamp: str = ""  # of the source as it was validated, which early lines must be of
    plan_sha256: str | None = None
    total: int = 0
    models: list[str] = msgspec.field(default_factory=list)  # that the lines name
    endpoints: list[str] = msgspec.field(default_factory=list)  # the same, by url
    unknown_members: list[UnknownMember] = msgspec.field(default_factory=list)  # of the lines' bodies
    generation: int = 0  # the highest of the record in Redis that a job has begun under
    # Names the record in Redis that may work here; of a server that was left behind, it is another
    # one
    owner: str = ""
    holder: str = ""  # the process that saved this, of a manifest in a bucket
    revision: int = 0  # how often it was saved
    parts: list[Part] = msgspec.field(default_factory=list)
    next_part: int = 0
    problems: list[LineProblem] = msgspec.field(default_factory=list)
    # This, `failed` and `usage` are of the lines on disk; final once the outputs are written
    completed: int = 0
    failed: int = 0
    usage: Usage | None = None
    queued_tokens: int = 0  # an estimate from the lines' bodies
    logged_lines: int = 0  # this and the next: how much of the completion log counts
    logged_bytes: int = 0
    log_segments: tuple[Segment, ...] = ()  # of a batch in a bucket, the same
    made: str = ""  # the folder in the root with what validation made; "": the root itself
    fixed: FixedOutputs | None = None
    output: str | None = None  # this and the next: known once the outputs are written
    error_output: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether lines may be appended, as far as a job has noted."""
        return self.spec.streams_input and self.source_sha256 is None

    @property
    def logged(self) -> Extent:
        """How much of the completion log counts."""
        return Extent(self.logged_lines, self.logged_bytes, self.log_segments)

    def note_logged(self, extent: Extent) -> None:
        """Count so much of the completion log."""
        self.logged_lines, self.logged_bytes, self.log_segments = extent

    @property
    def made_root(self) -> str:
        """Where the plan, the line index and the spool are."""
        return join(self.spec.root, self.made) if self.made else self.spec.root

    @property
    def stored_version(self) -> str | None:
        """Which version of the file this is, None for a new one."""
        return self.__dict__.get("stored_version")

    def enter(self, state: State) -> None:
        """Notes a state and when it was entered."""
        self.state = state
        self.timestamps.setdefault(state, time.time())

    def end_cancelled(self) -> None:
        """Turn an end that no client has seen into "cancelled"; the results stay as they are."""
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
    """The manifest in a batch's root, None if there is none. Raises `StoreError`.

    Where the file store was restored in another folder, the locations in it are of that folder.
    """
    location = join(root, NAME)
    try:
        found = read_version(location)
        if not found.data and not is_local(root):  # given up
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
    """See to it that no manifest comes into a root in a bucket whose maker may be at work; return
    whether there was none. Raise `StoreError`.
    """
    return write_new(join(root, NAME), b"") is not None


def take_back(manifest: Manifest) -> bool:
    """See to it that nothing comes of a new manifest in a bucket, also where it was put and the
    answer was lost. Return False where another process has gone on with it. Raise `StoreError`.
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
        if is_local(root) and os.path.exists(spec.root) and os.path.samefile(spec.root, root):  # by another name
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
    """Replace the manifest durably; only for who holds its folder (`leases.hold`).

    Raise `StoreError`, and `Superseded` in a bucket where another process has saved it since.
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
    """Refuse, from now on, what a process saves that had this manifest before. Raise as
    `save_manifest`.
    """
    if manifest.holder != PROCESS and not is_local(manifest.spec.root):
        save_manifest(manifest)


def progress_fields(manifest: Manifest) -> dict[str, int]:
    """What the record says of the lines on disk."""
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
    """What the record of an ended batch says."""
    return {
        "open": False, "outcome": manifest.outcome,
        "total": manifest.completed + manifest.failed, "completed": manifest.completed,
        "failed": manifest.failed, "output": manifest.output or "", "error_output": manifest.error_output or "",
        **progress_fields(manifest),
    }  # fmt: skip


def mark_cancelled(root: str) -> None:
    """Notes durably that the batch is to end; several callers may, at once. Raises `StoreError`."""
    touch(join(root, _CANCEL_MARK))  # without a temporary file: the holder of the folder sweeps those away


def unmark_cancelled(root: str) -> None:
    """Take the note back."""
    delete(join(root, _CANCEL_MARK))


def is_marked_cancelled(root: str) -> bool:
    """Return whether the batch was cancelled."""
    return size_of(join(root, _CANCEL_MARK)) is not None
