"""What the client makes of answers that a server of ours does not give."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from batch_inference_pipeline import AsyncPipeline, ClientError, Pipeline

JSON, PAGE = "application/json", "text/html"
REFUSED = b'{"error": {"message": "no such batch", "code": "gone", "param": null, "type": "invalid_request_error"}}'
ANSWERS = {
    "sparse": (200, JSON, b'{"id": "sparse", "status": "completed", "request_counts": {"total": null}}'),
    "moved": (307, JSON, b""),
    "missing": (404, JSON, REFUSED),
    "unmodified": (304, JSON, b""),
    "forbidden": (403, PAGE, b"\n<html>Forbidden</html>\n"),
    "conflict": (409, JSON, b'{"detail": "busy"}'),
    "teapot": (418, JSON, b'{"error": "short and stout"}'),
    "models": (200, PAGE, b"<html>Welcome</html>"),
    "page": (200, PAGE, b"<html>Welcome</html>"),
}


class OtherServer(BaseHTTPRequestHandler):
    """Answers as the last part of the path says."""

    def do_GET(self) -> None:
        status, kind, body = ANSWERS[self.path.rpartition("/")[2]]
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == 307:
            self.send_header("Location", "/v1/batches/sparse")
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        seen.append((dict(self.headers), self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Type", JSON)
        self.end_headers()
        self.wfile.write(b'{"choices": []}')

    def log_message(self, *_: object) -> None:
        pass


seen: list[tuple[dict[str, str], bytes]] = []


@contextmanager
def other_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), OtherServer) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


def test_errors_are_those_of_the_official_client() -> None:
    with other_server() as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as official:
        for name in ("missing", "unmodified", "forbidden", "conflict", "teapot"):
            with Pipeline(base_url=url) as p, pytest.raises(openai.APIStatusError) as ours:
                p.batch(name).retrieve()
            with pytest.raises(openai.APIStatusError) as theirs:
                official.batches.retrieve(name)
            assert type(ours.value) is type(theirs.value)
            assert str(ours.value) == str(theirs.value)
            assert (ours.value.body, ours.value.code) == (theirs.value.body, theirs.value.code)


def test_a_server_that_is_away_is_an_error_of_the_official_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1"
    with Pipeline(base_url=url, patience=0.0) as p, pytest.raises(openai.APIConnectionError):
        p.batch("any").retrieve()


def test_batches_of_other_servers_may_lack_fields() -> None:
    with other_server() as url, Pipeline(base_url=url) as p:
        for name in ("sparse", "moved"):
            assert p.batch(name).status == "completed"
            assert p.batch(name).retrieve().id == "sparse"
            assert list(p.batch(name).results()) == []
        with pytest.raises(ClientError, match="/batches/page did not send a batch: check base_url"):
            print(p.batch("page").status)
        with pytest.raises(ClientError, match="sent text/html in place of JSON"):
            print(p.model)
    for name in ("", ".", ".."):
        with Pipeline(base_url=url) as p, pytest.raises(ValueError, match="is not a batch id"):
            p.batch(name)


def test_calls_carry_the_project_and_messages_of_the_official_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj_blue")
    message: Any = ChatCompletionMessage(role="assistant", content="2, 3, 4")
    with other_server() as url, Pipeline("demo", base_url=url, api_key="secret") as p:
        p.submit_one([message]).result()
    headers, body = seen[-1]
    assert (headers["OpenAI-Project"], headers["Authorization"]) == ("proj_blue", "Bearer secret")
    assert b'"messages":[{"content":"2, 3, 4","role":"assistant"}]' in body


def test_a_client_is_closed_for_good() -> None:
    async def work(url: str) -> None:
        async with AsyncPipeline(base_url=url) as p:
            assert await p.batch("sparse").status() == "completed"
        with pytest.raises(ClientError, match="the client is not open"):
            await p.batch("sparse").status()
        with pytest.raises(ClientError, match="the client is not open"):
            print(p.client)

    with other_server() as url:
        asyncio.run(work(url))
