"""Read by schemathesis: half of the calls name a file, an upload, a batch or a model that exist, so
that they come further than to a 404.
"""

import json
import os
import zlib
from typing import Any

import schemathesis

KNOWN: dict[str, list[str]] = json.loads(os.environ["KNOWN_IDS"])  # by "file", "upload", "batch", "model"
STREAM_SECONDS = 3.0  # for the tokens of a batch that waits and has none
DELETED: set[str] = set()  # ids


@schemathesis.serializer("application/jsonl", "application/x-ndjson")
def lines(_context: Any, value: Any) -> bytes:
    """Send the lines of an append as they are."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """By the call's own content, so that the same call is always changed alike."""
    if "/stream" in case.operation.path:
        kwargs["timeout"] = STREAM_SECONDS
    for kind in ("file", "upload", "batch"):
        _set(case.path_parameters, f"{kind}_id", kind)
    if isinstance(case.body, dict):
        _set(case.body, "input_file_id", "file")
        _set(case.body, "model", "model")


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    if case.method.upper() == "DELETE" and response.status_code == 200:
        DELETED.update(_ids(case))


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """A model of whose workers none is there at the moment is a 503 by right; schemathesis reads
    its name in the batches that wait. A call that repeats an idempotency key gets the answer that
    the first one had, with the id of what may be deleted since: that id is a 404 by right.
    """
    if response.status_code == 404 and DELETED & _ids(case):
        return False
    return not (response.status_code == 503 and json.loads(response.content)["error"]["code"] == "no_worker")


def _ids(case: Any) -> set[str]:
    return {str(value) for value in (case.path_parameters or {}).values()}


def _set(values: dict[str, Any] | None, name: str, kind: str) -> None:
    """An id that an earlier answer gave stays: the check that it is there is for that one."""
    if values and str(values.get(name)).startswith(("file-", "upload_", "batch_")):
        return
    chosen = zlib.crc32(repr(values).encode("utf-8", "surrogatepass"))
    if values and name in values and chosen % 2:
        values[name] = KNOWN[kind][chosen // 2 % len(KNOWN[kind])]
