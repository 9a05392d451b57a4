"""The record of a batch in Redis: a hash of text fields."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, Self

import msgspec

from jobs.protocol.states import EndState
from jobs.protocol.unknown_members import UnknownMember

URGENT: Final = "urgent"
LATE: Final = "late"
RISKS = (URGENT, LATE)
"""Of a batch that may miss the end of its window: it goes first, or cannot be saved."""
Risk = Literal["", "urgent", "late"]
FORGOTTEN = "forgotten"
"""In place of a state: the batch's keys are being removed."""


class BatchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch needs next: the fields of its record that are read of all batches each second.

    Counts are lines; times are unix seconds. `state` is "" where there is no record.
    """

    state: str = ""
    generation: int = 0  # of the job that may work on the batch; rises when one is taken for dead
    driver: str = ""  # the process that runs the batch's jobs
    expires_at: float = math.inf  # the end of the completion window
    open: bool = False  # lines may be appended
    appended_at: float = 0.0  # when the last were; 0: never
    total: int = 0
    completed: int = 0
    failed: int = 0
    cursor: int = 0  # lines of the plan that were fed
    line_models: list[str] = []  # that the lines name
    open_models: list[str] | None = None  # those of this pass over the plan; None: all
    passed_over: list[str] = []  # models whose lines wait for the next pass
    low_water: int = 0  # length of a ready list at which a claim asks for more lines; -1: at none
    result_bytes: int = 0  # of the results that no part holds yet
    tenant: str = ""
    priority: int = 0  # a lower one goes first among the tenant's batches
    queued_tokens: int = 0  # an estimate, once validated
    appended_tokens: int = 0  # the same of an open batch, from its appends
    early_tokens: int = 0  # the same of the lines up to the last early one
    used_lines: int = 0  # this and the next two: what finished since the record was made, its tokens,
    used_tokens: int = 0
    used_bytes: int = 0  # and its bytes as they were in Redis
    risk: Risk = ""

    @property
    def exists(self) -> bool:
        """Whether the batch has a record that is not being removed."""
        return self.state not in ("", FORGOTTEN)

    @property
    def shows_lines(self) -> bool:
        """Whether clients see lines: early ones only once there is a plan."""
        return self.open or self.total > 0

    @property
    def finished(self) -> int:
        """Lines that have a result."""
        return self.completed + self.failed

    @property
    def shown_risk(self) -> Risk:
        """The risk as far as it still counts."""
        return self.risk if self.state == "in_progress" else ""

    @property
    def all_done(self) -> bool:
        """Whether every line has a result, and no more come."""
        return not self.open and self.finished == self.total

    @classmethod
    def read(cls, names: Iterable[str], values: Iterable[bytes | None]) -> Self:
        """Read what HMGET returned for these names; those that are no fields are left out."""
        found: dict[str, Any] = {name: value.decode() for name, value in zip(names, values, strict=True) if value}
        for name in _LISTS & found.keys():
            found[name] = msgspec.json.decode(found[name])
        status = msgspec.convert(found, cls, strict=False)
        return status if status.shows_lines else msgspec.structs.replace(status, **_COUNTS_OF_NONE)


class BatchFields(BatchStatus, frozen=True, kw_only=True):
    """All fields of a record."""

    token: str = ""  # of the last transition
    owner: str = ""  # as in the manifest, which names the record that may work on it
    root: str = ""  # the batch's folder
    spec: str = ""  # JSON of `manifest.BatchSpec`
    input_bytes: int = 0  # 0: unknown
    outcome: EndState = "completed"  # what the batch ends as, as far as is known
    problem: str = ""  # why it makes no progress; of a lost batch, why it can never go on
    lost: bool = False  # it ended because its folder is gone
    lost_since: float = 0.0  # since when its folder is gone, unix seconds; 0: it is there
    timestamps: dict[str, float] = {}  # by name: created, expires, and each state for its beginning
    stored_completed: int = 0  # this and the next: lines on disk
    stored_failed: int = 0
    logged_lines: int = 0  # in the completion log
    prompt_tokens: int = 0  # this and the next four: of the lines on disk
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    device_microseconds: int = 0
    key_id: str = ""  # of the API key that made it
    unknown_members: list[UnknownMember] = []  # of the lines' bodies
    output: str = ""  # this and the next: locations, once written
    error_output: str = ""
    restored: bool = False  # lines of the plan may be done already
    body_bytes: int = 0  # of the lines in Redis
    early: str = ""  # stamp of the input whose lines were fed while it was validated

    @classmethod
    def read_hash(cls, hash_fields: Mapping[bytes, bytes]) -> Self:
        """Read what HGETALL returned."""
        names = [name.decode() for name in hash_fields]
        times = {name.removesuffix(_TIME): float(hash_fields[name.encode()]) for name in names if name.endswith(_TIME)}
        return msgspec.structs.replace(cls.read(names, hash_fields.values()), timestamps=times)

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return the record with `changes` made as `written` writes them."""
        times = {"timestamps": {**self.timestamps, **changes.get("timestamps", {})}}
        return msgspec.structs.replace(self, **{**changes, **times})


for _kind in (BatchStatus, BatchFields):
    msgspec.json.Decoder(_kind)  # makes what `msgspec.convert` needs of the type (tests/test_layout.py says why)

_TIME = "_at"  # ends the name of each timestamp in the hash
_COUNTS_OF_NONE = {"completed": 0, "failed": 0}  # of a batch that shows no lines
_LISTS = frozenset({"line_models", "open_models", "passed_over", "unknown_members"})
_NAMES = frozenset(BatchFields.__struct_fields__)


def written(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of a record as fields of the hash.

    Raise TypeError for a name that is no field of `BatchFields`.
    """
    if unknown := changes.keys() - _NAMES:
        raise TypeError(f"no fields of a batch's record: {', '.join(sorted(unknown))}")
    found = {name: _text(value) for name, value in changes.items() if name != "timestamps"}
    return found | {f"{name}{_TIME}": moment for name, moment in changes.get("timestamps", {}).items()}


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return msgspec.json.encode(value)
    return int(value) if isinstance(value, bool) else value
