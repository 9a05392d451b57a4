"""`HEAD` is `GET` without the body."""

from collections.abc import Callable

import httpx
import openai

from jobs.queue.request_queue import Queue
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support.requests import start_batch


def test_every_route_that_can_be_read_has_its_head(
    http: httpx.Client, client: openai.OpenAI, queue: Queue, scripted: Callable[..., ScriptedWorker]
) -> None:
    scripted(lambda claim: ["one"])
    file = client.files.create(file=("input.jsonl", b"{}\n" * 100_000), purpose="batch").id
    start_batch(queue, "batch_waits", 1)
    names = {"{file_id}": file, "{name}": MODEL, "{batch_id}": "batch_absent"}
    paths = [path for path, methods in http.get("/openapi.json").json()["paths"].items() if "get" in methods]
    assert len(paths) > 8
    for path in [*paths, "/v1/streams/batch_waits/0", "/openapi.json"]:
        for pattern, name in names.items():
            path = path.replace(pattern, name)
        with http.stream("GET", path) as whole:
            head = http.head(path)
            assert (head.status_code, head.content) == (whole.status_code, b""), path
            for header in ("content-type", "content-disposition", "etag"):
                assert head.headers.get(header) == whole.headers.get(header), (path, header)
    assert http.head(f"/v1/files/{file}/content").headers["content-length"] == "300000"
    assert http.head("/v1/chat/completions").status_code == 405
