"""The fields of a Batch object that the client reads."""

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from batch_inference_pipeline.errors import ClientError
from batch_inference_pipeline.vocabulary import CHAT

if TYPE_CHECKING:
    import httpx2


class BatchState(msgspec.Struct):
    """Some fields of a Batch object. Other servers send some of them as null, or not at all."""

    id: str
    status: str | None = None
    endpoint: str | None = CHAT
    output_file_id: str | None = None
    error_file_id: str | None = None
    request_counts: dict[str, Any] | None = None
    errors: dict[str, Any] | None = None

    @property
    def share_left(self) -> float | None:
        """Requests left, divided by requests completed; None before the first completion."""
        counts = self.request_counts or {}
        total, completed, failed = (counts.get(name) or 0 for name in ("total", "completed", "failed"))
        return float((total - completed - failed) / completed) if completed else None

    @property
    def refusal(self) -> str:
        """The reason why the lines of a failed batch were refused, as a sentence."""
        problems = (self.errors or {}).get("data") or []
        if not problems:
            return f"{self.id} was refused"
        line = problems[0].get("line")
        where = f" in line {line}" if line is not None else ""
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        return f"{self.id} was refused{where}: {problems[0].get('message')}{more}"


def state_of(response: "httpx2.Response") -> BatchState:
    """Return the state of the Batch object in an answer. Raise `ClientError` if it has none."""
    try:
        return _decode(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ClientError(f"{response.request.url} did not send a batch: check base_url") from None


_decode = msgspec.json.Decoder(BatchState).decode


def path_of(batch_id: str) -> str:
    """Return the path of a batch below the API. Raise ValueError for an invalid id."""
    if batch_id in ("", ".", ".."):
        raise ValueError(f"{batch_id!r} is not a batch id")
    return f"/batches/{quote(batch_id, safe='')}"
