"""What every body must be: `Recorder` looks at each answer that the official client gets, strictly,
whatever the test asks of it.

The API declares its answers (`api/answer_objects.py`). `openai.types` say which fields there are
and of what type; that none may be absent (null where it is unset) is the hosted service's way.
"""

import json
import re
from collections import defaultdict
from typing import Any

import msgspec
from openai import types
from openai.types import uploads
from pydantic import BaseModel, ValidationError

from api.answer_objects import (
    AnswerObject,
    Batch,
    BatchDeleted,
    BatchRequests,
    ChatCompletion,
    Completion,
    FileDeleted,
    FileObject,
    UploadObject,
    UploadPart,
)
from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS

FILE, BATCH = r"file-[0-9A-Za-z_]+", r"batch_[0-9A-Za-z_]+"
UPLOAD = r"/v1/uploads/upload_[0-9A-Za-z_]+"
# Method, path, what answers, whether in pages
ROUTES: list[tuple[str, str, type[AnswerObject], bool]] = [
    ("POST", r"/v1/files", FileObject, False),
    ("GET", r"/v1/files", FileObject, True),
    ("GET", rf"/v1/files/{FILE}", FileObject, False),
    ("DELETE", rf"/v1/files/{FILE}", FileDeleted, False),
    ("POST", r"/v1/uploads", UploadObject, False),
    ("POST", rf"{UPLOAD}/parts", UploadPart, False),
    ("POST", rf"{UPLOAD}/(complete|cancel)", UploadObject, False),
    ("POST", r"/v1/batches", Batch, False),
    ("GET", r"/v1/batches", Batch, True),
    ("GET", rf"/v1/batches/{BATCH}", Batch, False),
    ("POST", rf"/v1/batches/{BATCH}/cancel", Batch, False),
    ("POST", rf"/v1/batches/{BATCH}/retry", Batch, False),
    ("POST", rf"/v1/batches/{BATCH}/close", Batch, False),
    ("POST", rf"/v1/batches/{BATCH}/requests", BatchRequests, False),
    ("DELETE", rf"/v1/batches/{BATCH}", BatchDeleted, False),
    ("POST", CHAT, ChatCompletion, False),
    ("POST", COMPLETIONS, Completion, False),
]
OFFICIAL: dict[type[AnswerObject], type[BaseModel]] = {
    FileObject: types.FileObject,
    FileDeleted: types.FileDeleted,
    UploadObject: types.Upload,
    UploadPart: uploads.UploadPart,
    Batch: types.Batch,
}
"""Those of which the API sends each member that the client's types have."""
OPEN = ("input", "open", "last_append_at")
ENDED = {"failed", "completed", "expired", "cancelled"}
STEPS = {
    "validating": {"failed", "in_progress", "cancelling"},
    "in_progress": {"finalizing", "expired", "cancelling"},
    "finalizing": {"completed", "cancelling"},
    "cancelling": {"cancelled"},
}


class Recorder:
    """An event hook of the client's HTTP transport.

    `faults` gathers sentences about answers that are not what they should be.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.checked = 0
        # Of each batch that was seen, in order
        self.states: dict[str, list[str]] = defaultdict(list)
        self._counts: dict[str, tuple[int, int]] = {}

    def __call__(self, response: Any) -> None:
        call = f"{response.request.method} {response.request.url.path}"
        if not response.headers.get("x-request-id", "").startswith("req_"):
            self.faults.append(f"{call}: no x-request-id")
        kind = response.headers.get("content-type", "").split(";")[0]
        failed = response.status_code >= 400
        if not failed and (kind != "application/json" or response.request.url.path.endswith("/content")):
            return
        raw = response.read()
        self.checked += 1
        if failed:
            found = error_faults(raw) + ([] if kind == "application/json" else [f"an error of type {kind!r}"])
        else:
            found = self._of_answer(response.request.method, response.request.url.path, response.status_code, raw)
        self.faults += [f"{call}: {fault} in {raw.decode()[:2000]}" for fault in found]

    def _of_answer(self, method: str, path: str, status: int, raw: bytes) -> list[str]:
        for verb, pattern, kind, paged in ROUTES:
            if verb == method and re.fullmatch(pattern, path):
                found = page_faults(kind, raw) if paged else body_faults(kind, raw)
                found += [] if status == 200 else [f"status {status}"]
                if kind is Batch and not found:
                    batches = json.loads(raw)["data"] if paged else [json.loads(raw)]
                    found += [
                        fault for batch in batches for fault in [*batch_faults(batch), *self._history_faults(batch)]
                    ]
                return found
        return []

    def _history_faults(self, batch: dict[str, Any]) -> list[str]:
        """States only move forward, counts never fall."""
        seen, counts, found = self.states[batch["id"]], batch["request_counts"], []
        if not seen or seen[-1] != batch["status"]:
            if seen and batch["status"] not in _later(seen[-1]):
                found.append(f"{seen[-1]} became {batch['status']}")
            seen.append(batch["status"])
        now = counts["completed"], counts["failed"]
        before = self._counts.get(batch["id"], (0, 0))
        if now[0] < before[0] or now[1] < before[1]:
            found.append(f"counts fell from {before} to {now}")
        self._counts[batch["id"]] = now
        return found


def body_faults(kind: type[AnswerObject], raw: bytes) -> list[str]:
    """What keeps a body from being exactly what is declared, and what the official client knows."""
    return declared_faults(kind, raw) + (official_faults(kind, raw) if kind in OFFICIAL else [])


def declared_faults(kind: type[AnswerObject], raw: bytes) -> list[str]:
    """What keeps a body from being exactly what the API's own declaration says."""
    try:
        made = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        return [str(error)]
    declared = msgspec.to_builtins(made, str_keys=True)
    return [] if declared == json.loads(raw) else [f"the declared members are {declared}"]


def official_faults(kind: type[AnswerObject], raw: bytes) -> list[str]:
    """What keeps a body from being exactly the official type; a batch has `usage.device_seconds`
    beyond it, and an open one more members.
    """
    if kind is Batch:
        body = json.loads(raw)
        seconds = (body.get("usage") or {}).pop("device_seconds", None)
        if not isinstance(seconds, float) or seconds < 0:
            return [f"the device seconds of a batch are {seconds}"]
        if body.get("input") == "stream":
            more = [body.pop(name, None) for name in OPEN]
            if not isinstance(more[1], bool) or not isinstance(more[2], int | None):
                return [f"{OPEN} of an open batch are {more}"]
        raw = json.dumps(body).encode()
    try:
        value = OFFICIAL[kind].model_validate_json(raw, strict=True)
    except ValidationError as error:
        return [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
    return _absent_or_unknown(value, "")


def page_faults(kind: type[AnswerObject], raw: bytes) -> list[str]:
    """The same for a page of them and its envelope."""
    page = json.loads(raw)
    if set(page) != {"object", "data", "first_id", "last_id", "has_more"}:
        return [f"the envelope has {sorted(page)}"]
    found = [fault for item in page["data"] for fault in body_faults(kind, json.dumps(item).encode())]
    ids = [item["id"] for item in page["data"]]
    if page["object"] != "list" or not isinstance(page["has_more"], bool):
        found.append("not a list")
    if (page["first_id"], page["last_id"]) != ((ids[0], ids[-1]) if ids else (None, None)):
        found.append("first_id and last_id are not those of the data")
    return found


def error_faults(raw: bytes) -> list[str]:
    """What keeps a body from being OpenAI's error."""
    try:
        body = json.loads(raw)
    except ValueError:
        return ["the error is no JSON"]
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or set(body) != {"error"} or set(error) != {"message", "type", "param", "code"}:
        return ["not the shape of an error"]
    found = [
        f"{name} is no text" for name in ("message", "type") if not isinstance(error[name], str) or not error[name]
    ]
    return found + [
        f"{name} is neither text nor null" for name in ("param", "code") if not isinstance(error[name], str | None)
    ]


def batch_faults(batch: dict[str, Any]) -> list[str]:
    """What contradicts itself in a batch."""
    if batch["request_counts"] is None or batch["usage"] is None:
        return ["counts or usage are null"]
    found = [*_count_faults(batch), *_problem_faults(batch), *_time_faults(batch), *_result_file_faults(batch)]
    usage = batch["usage"]
    if usage["total_tokens"] != usage["input_tokens"] + usage["output_tokens"]:
        found.append("tokens do not add up")
    return found


def _count_faults(batch: dict[str, Any]) -> list[str]:
    status, counts, found = batch["status"], batch["request_counts"], []
    answered = counts["completed"] + counts["failed"]
    if answered > counts["total"] or (status in ENDED - {"failed"} and answered != counts["total"]):
        found.append(f"counts do not add up: {counts}")
    if status == "failed" and set(counts.values()) != {0}:
        found.append("a failed batch has counts")
    return found


def _problem_faults(batch: dict[str, Any]) -> list[str]:
    errors, found = batch["errors"], []
    if (errors is not None) != (batch["status"] == "failed"):
        found.append("errors and status do not fit")
    if errors is not None and (errors["object"] != "list" or not errors["data"]):
        found.append("errors is no list")
    return found


def _time_faults(batch: dict[str, Any]) -> list[str]:
    status, found = batch["status"], []
    if status in ENDED | {"cancelling"} and batch[f"{status}_at"] is None:
        found.append(f"{status} without a time")
    found += [f"{name}_at is set, and it is {status}" for name in ENDED - {status} if batch[f"{name}_at"] is not None]
    order = [
        batch[f"{name}_at"]
        for name in ("created", "in_progress", "finalizing", "completed")
        if batch[f"{name}_at"] is not None
    ]
    if order != sorted(order):
        found.append("times run backwards")
    return found


def _result_file_faults(batch: dict[str, Any]) -> list[str]:
    status, counts, found = batch["status"], batch["request_counts"], []
    if status in ENDED and (batch["output_file_id"] is None) != (counts["completed"] == 0):
        found.append("output_file_id and counts do not fit")
    if (batch["error_file_id"] is not None) != (status in ENDED and counts["failed"] > 0):
        found.append("error_file_id and counts do not fit")
    return found


def _later(state: str) -> set[str]:
    """The states that may follow, at once or after others."""
    found: set[str] = set()
    for step in STEPS.get(state, ()):
        found |= {step} | _later(step)
    return found


def _absent_or_unknown(value: Any, path: str) -> list[str]:
    """Fields that the body left out, and those that the type does not have."""
    if isinstance(value, list):
        return [fault for item in value for fault in _absent_or_unknown(item, f"{path}[]")]
    if not isinstance(value, BaseModel):
        return []
    found = [f"{path}{name} is absent" for name in type(value).model_fields if name not in value.model_fields_set]
    found += [f"{path}{name} is unknown" for name in value.model_extra or ()]
    return found + [
        fault
        for name in type(value).model_fields
        for fault in _absent_or_unknown(getattr(value, name), f"{path}{name}.")
    ]
