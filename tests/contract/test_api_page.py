"""docs/api.md: its examples run as printed, one after the other, and it names every route that
there is.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from openai.types import Batch

from jobs.batch.client import get_batch
from jobs.queue import keys
from jobs.queue.connection import connect
from tests.contract.calls import results, submit, wait
from tests.support.batch_stack import AWAY, BatchStack, serving, serving_the_away
from tests.support.control_plane import ROOT, chat_line
from tests.support.waiting import wait_until

PAGE = (ROOT / "docs" / "api.md").read_text()
WAITING = ("GET /v1/batches/{batch_id}/stream", "GET /v1/streams/{name}", "POST /v1/batches/{batch_id}/cancel")
"""Routes whose example is of a batch that has not ended."""
ENDED = ("POST /v1/batches/{batch_id}/retry", "DELETE /v1/batches/{batch_id}")
"""Routes whose example is of the same batch, once it has ended."""
OPENED = "POST /v1/batches/{batch_id}/requests"
"""The route whose example is of an open batch."""
MADE = {
    "POST /v1/files": "FILE",
    "POST /v1/uploads": "UPLOAD",
    "POST /v1/uploads/{upload_id}/parts": "PART",
    "POST /v1/batches": "BATCH",
}
"""Routes whose example makes what later ones name by such a variable."""


class Example(NamedTuple):
    """A fenced block and the route above it."""

    route: str
    language: str
    text: str


def examples() -> list[Example]:
    """In the order of the page."""
    found, route = [], ""
    for heading, language, text in re.findall(r"^##+ ([^\n]*)$|^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        route = heading.strip("`") if heading else route
        if language:
            found.append(Example(route, language, text))
    return found


@pytest.fixture(scope="module")
def demo(stack: BatchStack) -> Iterator[None]:
    """A worker for the model that the page names."""
    with serving(stack.redis_url, "demo"):
        yield


def test_every_route_has_an_example_of_each_kind(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert {route for route in routes if route not in {example.route for example in examples()}} == set()
    for route in routes:
        assert {example.language for example in examples() if example.route == route} == {"bash", "python"}, route


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_the_shell_examples_run(stack: BatchStack, client: openai.OpenAI, demo: None, tmp_path: Path) -> None:
    known = {"OPENAI_BASE_URL": f"{stack.api_url}/v1", "OPENAI_API_KEY": "none"}
    outputs: dict[str, str] = defaultdict(str)
    for route, language, text in examples():
        if language != "bash":
            continue
        if route in WAITING:
            known["BATCH"] = waiting_batch(stack, client)
        if route == OPENED:
            known["BATCH"] = open_batch(client)
        if route == "POST /v1/uploads/{upload_id}/cancel":
            known["UPLOAD"] = client.uploads.create(
                bytes=1, filename="a", mime_type="text/plain", purpose="user_data"
            ).id
        if route in ENDED:
            wait(client, known["BATCH"])
        with finishing(stack, route, known.get("BATCH", "")):
            printed = run_shell(text, known, tmp_path)
        assert printed.strip() or "-o " in text, text
        assert '{"error":' not in printed, printed
        outputs[route] += printed
        if route in MADE:
            known[MADE[route]] = json.loads(printed)["id"]
        if route == "POST /v1/batches":
            known["OUTPUT_FILE"] = wait(client, known["BATCH"]).output_file_id or ""
    assert [json.loads(line)["custom_id"] for line in (tmp_path / "results.jsonl").read_bytes().splitlines()] == [
        "a",
        "b",
    ]
    assert "x-last-line: 1" in outputs["GET /v1/files/{file_id}/content"].lower()
    assert json.loads(outputs[OPENED])["appended"] == 2
    assert outputs["GET /v1/batches/{batch_id}/stream"].rstrip().endswith("data: [DONE]")
    assert '"custom_id":"late"' in outputs["GET /v1/batches/{batch_id}/stream"].replace(" ", "")
    for route in ("DELETE /v1/files/{file_id}", "DELETE /v1/batches/{batch_id}"):
        assert json.loads(outputs[route])["deleted"] is True
    assert json.loads(outputs["POST /v1/uploads/{upload_id}/complete"])["status"] == "completed"
    assert json.loads(outputs["POST /v1/uploads/{upload_id}/cancel"])["status"] == "cancelled"


def test_the_python_examples_run(
    stack: BatchStack, client: openai.OpenAI, demo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{stack.api_url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requests.jsonl").write_bytes(chat_line("a", "one", "demo") + chat_line("b", "two", "demo"))
    names: dict[str, Any] = {}
    outputs: dict[str, str] = defaultdict(str)
    for route, language, text in examples():
        if language != "python":
            continue
        if route in WAITING:
            names["batch"] = client.batches.retrieve(waiting_batch(stack, client))
        if route in ENDED:
            wait(client, names["batch"].id)
        with finishing(stack, route, names["batch"].id if "batch" in names else ""), captured() as printed:
            exec(compile(text, f"docs/api.md, {route}", "exec"), names)
        outputs[route] += printed()
    assert outputs["GET /v1/files/{file_id}/content"].splitlines()[:2] == ["a one", "b two"]
    assert outputs["POST /v1/uploads/{upload_id}/complete"].startswith("completed file-")
    assert "'late'" in outputs["GET /v1/batches/{batch_id}/stream"]
    assert names["batch"].status in ("cancelling", "cancelled")
    assert "'appended': 1" in outputs[OPENED]
    assert names["retried"].metadata == {"retry_of": names["batch"].id}
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(names["file"].id)


def test_the_difference_in_lines_that_never_ran_is_as_documented(stack: BatchStack, client: openai.OpenAI) -> None:
    batch = client.batches.cancel(waiting_batch(stack, client))
    batch = wait(client, batch.id)
    assert batch.request_counts is not None
    assert batch.request_counts.completed + batch.request_counts.failed == batch.request_counts.total == 1
    assert [line["error"]["code"] for line in results(client, batch.error_file_id)] == ["batch_cancelled"]


def open_batch(client: openai.OpenAI) -> str:
    """The id of a batch to which requests can be appended."""
    body = {"input": "stream", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return client.post("/batches", cast_to=Batch, body=body).id


def waiting_batch(stack: BatchStack, client: openai.OpenAI) -> str:
    """The id of a batch in progress whose one line waits for a worker."""
    batch = submit(client, chat_line("late", "at last", AWAY))
    with contextlib.closing(connect(stack.redis_url)) as redis:
        wait_until(lambda: get_batch(redis, batch.id).waiting, 60, "the line to wait")
    return batch.id


@contextlib.contextmanager
def finishing(stack: BatchStack, route: str, batch_id: str) -> Iterator[None]:
    """While an example reads a stream of a batch, brings that to its end."""
    if "/stream" not in route:
        yield
        return
    thread = threading.Thread(target=finish_once_watched, args=(stack, batch_id))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def finish_once_watched(stack: BatchStack, batch_id: str) -> None:
    """Has the batch's line answered when a client reads its tokens, or those of the whole batch."""
    with contextlib.closing(connect(stack.redis_url)) as redis:
        wait_until(lambda: any(redis.zmscore(keys.WATCHED, [batch_id, f"{batch_id}/1"])), 60, "a client to watch")
        with serving_the_away(stack):
            wait_until(lambda: get_batch(redis, batch_id).ended, 60, "the batch to end")


def run_shell(text: str, known: dict[str, str], folder: Path) -> str:
    """What a block prints."""
    shell = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(shell, cwd=folder, env={**os.environ, **known}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    return done.stdout


@contextlib.contextmanager
def captured() -> Iterator[Callable[[], str]]:
    """What is printed meanwhile."""
    buffer = io.StringIO()
    with contextlib.redirect_stdout(buffer):
        yield buffer.getvalue
