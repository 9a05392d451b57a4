"""Requests that are written so that a proxy in front, a log or a browser would read them in another
way than the server.
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from api.settings import ApiSettings
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support.api_server import plain_client, running_api
from tests.support.raw_http import RawAnswer, exchange, head
from tests.support.redis_server import running_server

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"model": MODEL, "prompt": "x"}).encode()
SMUGGLED = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ScriptedWorker]]:
    """An API and its worker, for all tests here."""
    store = str(tmp_path_factory.mktemp("store"))
    with (
        running_server() as server,
        closing(connect(server.url)) as client,
        closing(Queue(client)) as queue,
        ScriptedWorker(queue, lambda claim: ["one"]) as worker,
        running_api(ApiSettings(redis_url=server.url, file_store=store)) as url,
    ):
        yield url, worker


@pytest.fixture
def api_url(served: tuple[str, ScriptedWorker]) -> str:
    return served[0]


def code(answer: RawAnswer) -> str:
    return str(json.loads(answer.body)["error"]["code"])


def post(*lines: str) -> bytes:
    return head(*lines, method="POST", path=COMPLETIONS)


@pytest.mark.parametrize(
    "lines",
    [
        ("content-length: 4", "transfer-encoding: chunked"),
        ("transfer-encoding: chunked", "content-length: 4"),
        ("content-length: 4", "content-length: 5"),
        ("content-length: 4, 5",),
        ("content-length: +4",),
        ("content-length: 0x4",),
        ("content-length: -4",),
        ("content-length: 4_0",),
        ("content-length: 99999999999999999999999999",),
        ("transfer-encoding: xchunked",),
        ("transfer-encoding: gzip, chunked",),
        ("transfer-encoding: chunked", "transfer-encoding: chunked"),
        ("transfer-encoding : chunked",),
        ("content-length : 4",),
        ("x: a\rtransfer-encoding: chunked",),
        ("x: a\0b",),
        ("x y: a",),
        (": a",),
    ],
)
def test_a_body_whose_end_is_in_doubt_is_refused_and_nothing_behind_it_is_read(
    served: tuple[str, ScriptedWorker], lines: tuple[str, ...]
) -> None:
    """The connection stays open for a proxy's next request unless the server closes it."""
    api_url, worker = served
    calls = len(worker.claims)
    sent = post(*lines).replace(b"connection: close\r\n", b"")
    [answer] = exchange(api_url, sent + b"0\r\n\r\n" + SMUGGLED)
    assert (answer.status, code(answer)) == (400, "invalid_http_request")
    assert answer.headers["connection"] == "close"
    assert len(worker.claims) == calls


@pytest.mark.parametrize(
    "sent",
    [
        post(f"content-length: {len(BODY)}") + BODY,
        post("transfer-encoding: chunked") + CHUNKED,
        post("x: a", " transfer-encoding: chunked", f"content-length: {len(BODY)}") + BODY,
        post("transfer-encoding: chunked") + CHUNKED.replace(b"\r\n", b";" + b"x" * 1000 + b"\r\n", 1),
        post("transfer-encoding: chunked") + CHUNKED[:-2] + b"host: elsewhere.example\r\n\r\n",
    ],
    ids=["length", "chunked", "folded line", "chunk extension", "trailer"],
)
def test_a_body_whose_end_is_plain_is_read_to_there(api_url: str, sent: bytes) -> None:
    """A header that goes on in a second line is one header; what a trailer says is dropped."""
    [answer] = exchange(api_url, sent)
    assert json.loads(answer.body)["choices"][0]["text"] == "one"


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "deflate", "br", "zstd", "identity, gzip", "nonsense"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/batches", "/v1/files"])
def test_a_compressed_body_is_refused_before_it_is_read(api_url: str, coding: str, path: str) -> None:
    with plain_client(api_url) as http:
        headers = {"content-encoding": coding, "content-type": "application/json"}
        answer = http.post(path, content=gzip.compress(b" " * 10_000_000), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "content_encoding_unsupported")
    assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: elsewhere.example\r\nconnection: close\r\n\r\n",
        b"GET  /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /he\0alth HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
    ids=["HTTP/0.9", "no host", "two hosts", "two spaces", "zero byte", "TLS"],
)
def test_what_is_no_request_of_this_protocol_is_refused(api_url: str, sent: bytes) -> None:
    [answer] = exchange(api_url, sent)
    assert (answer.status, code(answer)) in [(400, "invalid_http_request"), (404, "unknown_url")]
    assert b"workers" not in answer.body


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "http://elsewhere.example/v1/models"),
        ("GET", "http://169.254.169.254/latest/meta-data"),
        ("CONNECT", "elsewhere.example:443"),
        ("GET", "//elsewhere.example/v1/models"),
        ("OPTIONS", "*"),
        ("TRACE", "/v1/models"),
    ],
)
def test_the_server_is_no_proxy(api_url: str, method: str, path: str) -> None:
    [answer] = exchange(api_url, head("x-secret: repeated", method=method, path=path))
    assert (answer.status, code(answer)) in [(404, "unknown_url"), (405, "method_not_allowed")]
    assert b"repeated" not in answer.body


@pytest.mark.parametrize(
    "host",
    [
        "elsewhere.example",
        "localhost@elsewhere.example",
        "elsewhere.example#@localhost",
        "elsewhere.example/localhost",
        "localhost.elsewhere.example",
        "elsewhere.example:80@localhost:80@elsewhere.example",
        "elsewhere.example\\localhost",
        "127.0.0.1.elsewhere.example",
    ],
)
def test_a_foreign_host_is_not_taken_for_the_servers_own(api_url: str, host: str) -> None:
    [answer] = exchange(api_url, head().replace(b"host: localhost", b"host: " + host.encode()))
    assert (answer.status, code(answer)) == (403, "host_not_allowed")


@pytest.mark.parametrize("name", ["x-request-id", "last-event-id", "traceparent", "user-agent"])
@pytest.mark.parametrize("value", ["a%0d%0ax-evil: 1", "a\x1b[31mb", "a\tb", "\xff", "a" * 20_000])
def test_nothing_that_a_header_holds_becomes_a_header_of_the_answer(api_url: str, name: str, value: str) -> None:
    [answer] = exchange(api_url, head(f"{name}: {value}", path="/v1/streams/live_x"))
    assert "x-evil" not in answer.headers
    assert answer.headers["x-request-id"].isprintable()
    assert len(answer.headers["x-request-id"]) < 300
    assert answer.body.decode().rstrip().isprintable()


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../../etc/passwd",
        "..%2f..%2f..%2fetc%2fpasswd",
        "%2e%2e%2f%2e%2e%2fkeys",
        "..%5c..%5cetc%5cpasswd",
        "%00",
        "file-x%00",
        "%2fetc%2fpasswd",
        "a%0d%0ax-evil:%201",
        "%c0%ae%c0%ae%c0%af",
        "%ff%fe",
        "*",
        "a" * 4000,
        "%F0%9F%99%82",
    ],
)
def test_an_id_leads_to_no_other_file_and_no_other_key(api_url: str, name: str) -> None:
    """Also where it leads out of the folder of files, or out of the ids of Redis."""
    for path in (
        "/v1/files/{}", "/v1/files/{}/content", "/v1/batches/{}", "/v1/batches/{}/stream", "/v1/streams/{}",
        "/v1/streams/{}/0", "/v1/streams/live_{}", "/v1/models/{}",
    ):  # fmt: skip
        [answer] = exchange(api_url, head(path=path.format(name)))
        assert answer.status == 404, (path, answer)
        assert "x-evil" not in answer.headers
        assert answer.body.decode().isprintable()
        assert len(answer.body) < 1000
    for path in ("/v1/files/{}", "/v1/batches/{}/cancel"):
        method = "POST" if path.endswith("cancel") else "DELETE"
        [answer] = exchange(api_url, head("content-length: 0", method=method, path=path.format(name)))
        assert answer.status == 404, (path, answer)
