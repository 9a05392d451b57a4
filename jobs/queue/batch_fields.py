"""The record of a batch in Redis: a hash of text fields."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from jobs.protocol.states import EndState

FORGOTTEN = "forgotten"
"""In place of a state: the batch's keys are being removed."""


class BatchFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a record, with what an absent one means.

    Counts are lines; times are unix seconds. `state` is "" where there is no record.
    """

    state: str = ""
    generation: int = 0  # of the job that may work on the batch; rises when one is taken for dead
    heartbeat: float = 0.0  # when that job last gave a sign of life, ms of Redis TIME
    owner: str = ""  # as in the manifest: tells this record from that of another server
    tenant: str = ""
    root: str = ""  # the batch's folder
    spec: str = ""  # JSON of `manifest.BatchSpec`
    outcome: EndState = "completed"  # what the batch ends as, as far as is known
    problem: str = ""  # why it makes no progress
    timestamps: dict[str, float] = {}  # `<name>_at`: created, expires, and each state's beginning

    total: int = 0
    completed: int = 0
    failed: int = 0
    stored_completed: int = 0  # this and the next: of these, what is on disk
    stored_failed: int = 0
    logged_lines: int = 0  # in the completion log
    prompt_tokens: int = 0  # this and the next two: of the lines on disk
    completion_tokens: int = 0
    cached_tokens: int = 0
    queued_tokens: int = 0  # an estimate, once validated
    output: str = ""  # this and the next: locations, once written
    error_output: str = ""

    cursor: int = 0  # lines of the plan that were fed
    restored: bool = False  # lines of the plan may be done already
    line_models: list[str] = []  # that the lines name
    open_models: list[str] | None = None  # those of this pass over the plan; None: all
    passed_over: list[str] = []  # models whose lines wait for the next pass
    low_water: int = 0  # length of a ready list at which a claim asks for more lines
    body_bytes: int = 0  # of the lines in Redis
    result_bytes: int = 0  # of the results that no part holds yet

    @property
    def exists(self) -> bool:
        """Whether the batch has a record that is not being removed."""
        return self.state not in ("", FORGOTTEN)

    @property
    def finished(self) -> int:
        """Lines that have a result."""
        return self.completed + self.failed

    @property
    def all_done(self) -> bool:
        """Whether every line has a result."""
        return self.finished == self.total

    @property
    def expires_at(self) -> float:
        """When the completion window ends."""
        return self.timestamps.get("expires", math.inf)

    @classmethod
    def read(cls, hash_fields: Mapping[bytes, bytes]) -> Self:
        """Read what HGETALL returned; fields that this version does not know are left out."""
        values: dict[str, Any] = {"timestamps": {}}
        for name, value in ((name.decode(), value.decode()) for name, value in hash_fields.items()):
            if name.endswith(_TIME):
                values["timestamps"][name.removesuffix(_TIME)] = value
            else:
                values[name] = msgspec.json.decode(value) if name in _LISTS else value
        return msgspec.convert(values, cls, strict=False)

    @classmethod
    def read_some(cls, names: Sequence[str], values: Sequence[bytes | None]) -> Self:
        """Read what HMGET returned for fields of these names."""
        pairs = zip(names, values, strict=True)
        return cls.read({name.encode(): value for name, value in pairs if value is not None})

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return the record with `changes` made as `written` writes them."""
        times = {"timestamps": {**self.timestamps, **changes.get("timestamps", {})}}
        return msgspec.structs.replace(self, **{**changes, **times})


_TIME = "_at"
_LISTS = frozenset({"line_models", "open_models", "passed_over"})
_NAMES = frozenset(BatchFields.__struct_fields__)
SUPERVISED = (*(name for name in BatchFields.__struct_fields__ if name not in {"spec", "timestamps"}), "expires_at")
"""The fields of the hash that tell what a batch needs next."""


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
