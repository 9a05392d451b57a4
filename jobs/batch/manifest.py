"""The manifest: what a batch is and what is done of it, on disk, so that an empty Redis can be
rebuilt.
"""

import time
from typing import Any, Literal

import msgspec

from jobs.batch.completion_log import Extent
from jobs.batch.parts import Part
from jobs.batch.row_requests import RowOptions
from jobs.protocol.results import Usage
from jobs.protocol.states import EndState, State
from jobs.store.storage import (
    StoreError,
    delete,
    join,
    local_path,
    named,
    read_bytes,
    size_of,
    sync_folder,
    write_bytes,
)

NAME = "manifest.json"
# A file of its own, since a long job may hold the folder when a client cancels
_CANCEL_MARK = "cancelled"


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


class Manifest(msgspec.Struct, kw_only=True):
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
    generation: int = 0  # the highest of the record in Redis that a job has begun under
    # Names the record in Redis that may work here; of a server that was left behind, it is another
    # one
    owner: str = ""
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
    output: str | None = None  # this and the next: known once the outputs are written
    error_output: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether lines may be appended, as far as a job has noted."""
        return self.spec.streams_input and self.source_sha256 is None

    @property
    def logged(self) -> Extent:
        """How much of the completion log counts."""
        return Extent(self.logged_lines, self.logged_bytes)

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


class ManifestDamaged(StoreError):
    """The file is not a manifest of this version."""

    retry = False


def load_manifest(root: str) -> Manifest | None:
    """The manifest in a batch's root, None if there is none. Raises `StoreError`."""
    location = join(root, NAME)
    if size_of(location) is None:
        return None
    try:
        return msgspec.json.decode(read_bytes(location), type=Manifest)
    except msgspec.DecodeError as error:
        raise ManifestDamaged(
            f"{location} is not a batch manifest ({error}); remove the folder to start again"
        ) from error


def save_manifest(manifest: Manifest) -> None:
    """Replace the manifest durably; only for the holder of `storage.exclusive`.

    Raise `StoreError`.
    """
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    write_bytes(join(manifest.spec.root, NAME), encoded)


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
    path = local_path(join(root, _CANCEL_MARK))
    assert path is not None, "a batch's root is local"
    with named("cannot write", str(path)):
        path.touch()  # not by a temporary file: the holder of the folder sweeps those away
        sync_folder(path.parent)


def unmark_cancelled(root: str) -> None:
    """Take the note back."""
    delete(join(root, _CANCEL_MARK))


def is_marked_cancelled(root: str) -> bool:
    """Return whether the batch was cancelled."""
    return size_of(join(root, _CANCEL_MARK)) is not None
