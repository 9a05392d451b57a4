"""`pipeline files` against a real API: what is sent, shown and fetched, and what a person reads
when it fails.
"""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from api.settings import ApiSettings
from jobs.store.api_keys import create_key
from tests.pipeline.conftest import CommandOutcome, RunHere
from tests.support.api_server import running_api
from tests.support.control_plane import write_input

Files = Callable[..., CommandOutcome]


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return create_key(str(tmp_path / "store"), tenant="a")[1]


@pytest.fixture
def url(redis_url: str, tmp_path: Path, secret: str) -> Iterator[str]:
    with running_api(ApiSettings(redis_url=redis_url, file_store=str(tmp_path / "store"), max_file_bytes=2**20)) as url:
        yield f"{url}/v1"


@pytest.fixture
def files(run_here: RunHere, url: str, secret: str) -> Files:
    """Runs `pipeline files …` with a key."""
    return lambda *arguments: run_here("files", *arguments, OPENAI_BASE_URL=url, OPENAI_API_KEY=secret)


def test_a_file_goes_there_and_comes_back(files: Files, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 3)
    sent = files("upload", source, "--expires-after", 3600)
    assert sent.code == 0, sent.err
    file_id = sent.out.strip()
    shown = json.loads(files("get", file_id, "--json").out)
    assert (shown["id"], shown["filename"], shown["bytes"]) == (file_id, "in.jsonl", source.stat().st_size)
    assert shown["expires_at"] - shown["created_at"] == 3600
    assert "in.jsonl" in files("get", file_id).out
    assert file_id in files("list").out
    assert files("content", file_id).out.encode() == source.read_bytes()
    assert files("content", file_id, "-o", tmp_path / "back.jsonl").code == 0
    assert (tmp_path / "back.jsonl").read_bytes() == source.read_bytes()
    assert files("delete", file_id).out == f"{file_id} is deleted\n"
    gone = files("get", file_id)
    assert gone.code == 2
    assert gone.err == f"Error: No such File object: {file_id}\n"


def test_a_file_that_is_longer_than_it_was_is_not_half_sent(files: Files) -> None:
    code, _, stderr = files(
        "upload", "/proc/version", "--purpose", "user_data"
    )  # says that it has no bytes, and then has some
    assert (code, stderr.count("\n")) == (1, 1)
    assert "run the same command again" in stderr
    assert json.loads(files("list", "--json").out) == []


def test_a_listing_is_as_long_as_was_asked(files: Files, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 1)
    ids = [files("upload", source).out.strip() for _ in range(3)]
    listed = json.loads(files("list", "--json", "--limit", 2).out)
    assert [file["id"] for file in listed] == ids[:0:-1]
    assert json.loads(files("list", "--json", "--purpose", "vision").out) == []


def test_what_a_server_refuses_is_said_in_its_words(files: Files, run_here: RunHere, tmp_path: Path, url: str) -> None:
    large = tmp_path / "large.jsonl"
    large.write_bytes(b"x" * (2**20 + 1))
    os.mkfifo(tmp_path / "pipe.jsonl")
    for arguments, reason in (
        (["upload", large], "large"),
        (["upload", tmp_path / "absent.jsonl"], "there is no file"),
        (["upload", tmp_path], "is a folder"),
        (["upload", tmp_path / "pipe.jsonl"], "is no regular file"),
        (["upload", write_input(tmp_path / "in.txt", 1)], "jsonl"),
        (["upload", write_input(tmp_path / "in.jsonl", 1), "--expires-after", "5"], "expires_after"),
        (["content", "file-x"], "No such File object"),
        (["list", "--base-url", "ftp://x"], "must look like"),
    ):
        code, _, stderr = files(*arguments)
        assert (code, reason in stderr, stderr.count("\n") <= 4) == (2, True, True), stderr
    for key in ("", "sk-wrong"):
        code, _, stderr = run_here("files", "list", "--base-url", url, OPENAI_API_KEY=key)
        assert (code, "OPENAI_API_KEY" in stderr, stderr.count("\n")) == (2, True, 1)
    code, _, stderr = files("list", "--base-url", url.removesuffix("/v1"))
    assert (code, "--base-url usually ends in /v1" in stderr) == (2, True)


def test_a_download_that_fails_leaves_nothing(files: Files, tmp_path: Path) -> None:
    assert files("content", "file-x", "-o", tmp_path / "new" / "x.jsonl").code == 2
    assert not (tmp_path / "new").exists()
    sent = files("upload", write_input(tmp_path / "in.jsonl", 1)).out.strip()
    code, _, stderr = files("content", sent, "-o", tmp_path / "new" / "x.jsonl")
    assert (code, "cannot write" in stderr) == (1, True)


class _WebServer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_: object) -> None:
        return


@pytest.mark.parametrize(
    "command", ["files list", "files get x", "files content x", "batches get x", "batches wait x", "batches tail x"]
)
def test_a_web_page_is_no_api(run_here: RunHere, command: str) -> None:
    with HTTPServer(("127.0.0.1", 0), _WebServer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()  # seconds between looks
        code, printed, stderr = run_here(*command.split(), "--base-url", f"http://127.0.0.1:{server.server_port}/v1")
        server.shutdown()
    assert (code, printed, stderr.count("\n")) == (2, "", 1)
    assert "is a web page, not an API: is --base-url right?" in stderr


def test_a_server_that_is_away_is_one_sentence(run_here: RunHere) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        code, _, stderr = run_here("files", "list", "--base-url", f"http://127.0.0.1:{port}/v1")
    assert code == 1
    assert stderr.startswith(f"Error: no answer from http://127.0.0.1:{port}/v1: ")
    assert "refused" in stderr
    assert stderr.count("\n") == 1
