"""The record of a batch in Redis: a hash of text fields."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, Self

import msgspec

from jobs.protocol.default_parameters import DefaultParameters
from jobs.protocol.states import EndState
from jobs.protocol.unknown_members import UnknownMember

URGENT: Final = "urgent"
LATE: Final = "late"
RISKS = (URGENT, LATE)
"""Risk that a batch misses its window: its lines go first, or it is late in any case."""
Risk = Literal["", "urgent", "late"]
FORGOTTEN = "forgotten"
"""Stored in place of a state while the batch's keys are being removed."""


class BatchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a batch's record that the control plane reads of all batches each second.

    Counts are lines; times are unix seconds. `state` is "" if there is no record.
    """

    state: str = ""
    generation: int = 0  # of the job that may work on the batch; rises when a job is presumed dead
    driver: str = ""  # the process that runs the batch's jobs
    expires_at: float = math.inf  # the end of the completion window
    open: bool = False  # lines may be appended
    appended_at: float = 0.0  # when the last were; 0: never
    total: int = 0
    completed: int = 0
    failed: int = 0
    cursor: int = 0  # lines of the plan that were ingested
    line_models: list[str] = []  # models that the lines name
    open_models: list[str] | None = None  # models of this pass over the plan; None: all
    passed_over: list[str] = []  # models whose lines wait for the next pass
    low_water: int = 0  # a claim that leaves a ready list this short asks for more lines; -1: never
    result_bytes: int = 0  # bytes of the results that are in no part yet
    tenant: str = ""
    priority: int = 0  # a lower one goes first among the tenant's batches
    queued_tokens: int = 0  # estimate, set by validation
    appended_tokens: int = 0  # the same estimate for an open batch, from its appends
    early_tokens: int = 0  # the same estimate for the lines up to the last early one
    used_lines: int = 0  # this and the next two: lines that finished since the record was created, their tokens,
    used_tokens: int = 0
    used_bytes: int = 0  # and their bytes in Redis
    risk: Risk = ""

    @property
    def exists(self) -> bool:
        """Return whether the batch has a record that is not being removed."""
        return self.state not in ("", FORGOTTEN)

    @property
    def shows_lines(self) -> bool:
        """Return whether clients see lines; early lines are shown only once there is a plan."""
        return self.open or self.total > 0

    @property
    def finished(self) -> int:
        """Return the number of lines that have a result."""
        return self.completed + self.failed

    @property
    def shown_risk(self) -> Risk:
        """Return the risk, or "" once it no longer counts."""
        return self.risk if self.state == "in_progress" else ""

    @property
    def all_done(self) -> bool:
        """Return whether every line has a result and no line can be added."""
        return not self.open and self.finished == self.total

    @classmethod
    def read(cls, names: Iterable[str], values: Iterable[bytes | None]) -> Self:
        """Read the values that HMGET returned for these names; skip names that are no fields."""
        found: dict[str, Any] = {name: value.decode() for name, value in zip(names, values, strict=True) if value}
        for name in _JSON & found.keys():
            found[name] = msgspec.json.decode(found[name])
        status = msgspec.convert(found, cls, strict=False)
        return status if status.shows_lines else msgspec.structs.replace(status, **_COUNTS_OF_NONE)


class BatchFields(BatchStatus, frozen=True, kw_only=True):
    """All fields of a record."""

    token: str = ""  # token of the last transition
    owner: str = ""  # as in the manifest, whose owner is the only record that may work on the batch
    root: str = ""  # the batch's folder
    spec: str = ""  # JSON of `manifest.BatchSpec`
    input_bytes: int = 0  # 0: unknown
    outcome: EndState = "completed"  # the end state, as far as known
    problem: str = ""  # why the batch makes no progress, or why a lost batch cannot continue
    lost: bool = False  # it ended because its folder is gone
    lost_since: float = 0.0  # since when its folder is missing, unix seconds; 0: it is there
    timestamps: dict[str, float] = {}  # by name: created, expires, and the start of each state
    stored_completed: int = 0  # this and the next: lines on disk
    stored_failed: int = 0
    logged_lines: int = 0  # lines in the completion log
    prompt_tokens: int = 0  # this and the next four: of the lines on disk
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    device_microseconds: int = 0
    key_id: str = ""  # of the API key that created the batch
    unknown_members: list[UnknownMember] = []  # of the lines' bodies
    output: str = ""  # this and the next: locations, once written
    error_output: str = ""
    restored: bool = False  # lines of the plan may be done already
    body_bytes: int = 0  # of the request bodies in Redis
    early: str = ""  # stamp of the input whose lines were ingested during validation
    defaults: dict[str, DefaultParameters] = {}  # by model, as in the manifest

    @classmethod
    def read_hash(cls, hash_fields: Mapping[bytes, bytes]) -> Self:
        """Read the hash that HGETALL returned."""
        names = [name.decode() for name in hash_fields]
        times = {name.removesuffix(_TIME): float(hash_fields[name.encode()]) for name in names if name.endswith(_TIME)}
        return msgspec.structs.replace(cls.read(names, hash_fields.values()), timestamps=times)

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return the record with `changes` applied as `written` writes them."""
        times = {"timestamps": {**self.timestamps, **changes.get("timestamps", {})}}
        return msgspec.structs.replace(self, **{**changes, **times})


for _kind in (BatchStatus, BatchFields):
    msgspec.json.Decoder(_kind)  # fills msgspec's type cache for `msgspec.convert` (see tests/test_layout.py)

_TIME = "_at"  # suffix of each timestamp's name in the hash
_COUNTS_OF_NONE = {"completed": 0, "failed": 0}  # counts of a batch that shows no lines
_JSON = frozenset({"line_models", "open_models", "passed_over", "unknown_members", "defaults"})
_NAMES = frozenset(BatchFields.__struct_fields__)


def written(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of a record as fields of the hash.

    Raise TypeError for a name that is not a field of `BatchFields`.
    """
    if unknown := changes.keys() - _NAMES:
        raise TypeError(f"unknown fields of a batch's record: {', '.join(sorted(unknown))}")
    found = {name: _text(value) for name, value in changes.items() if name != "timestamps"}
    return found | {f"{name}{_TIME}": moment for name, moment in changes.get("timestamps", {}).items()}


def _text(value: Any) -> Any:
    if isinstance(value, list | dict):
        return msgspec.json.encode(value)
    return int(value) if isinstance(value, bool) else value
