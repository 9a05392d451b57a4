"""CORS, the root path, middleware of an operator's own, request ids, the access log, the OpenAPI
document, and a Unix socket.
"""

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.app import create_app
from api.http.listening import listening
from api.settings import ApiSettings
from jobs.errors import SettingsError
from jobs.store.api_keys import create_key
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support.api_server import failing_app, plain_client, running_api
from tests.support.raw_http import answer_on, connected
from tests.support.waiting import wait_until

PAGE = "https://app.example.org"
ELSEWHERE = "https://elsewhere.example"
Served = Callable[..., Any]


@pytest.fixture
def served(redis_url: str, tmp_path: Path) -> Served:
    """Runs an API with some settings; yields a client."""

    @contextmanager
    def run(with_data: bool = False, **settings: Any) -> Iterator[httpx.Client]:
        given = ApiSettings(redis_url=redis_url, file_store=str(tmp_path), **settings)
        with (
            running_api(given, with_data=with_data) as url,
            plain_client(url) as http,
        ):
            yield http

    return run


def preflight(
    http: httpx.Client, origin: str, method: str = "POST", headers: str = "authorization, content-type"
) -> httpx.Response:
    wanted = {"access-control-request-method": method, "access-control-request-headers": headers}
    return http.options("/v1/chat/completions", headers={"origin": origin, **wanted})


def test_no_page_may_read_answers_by_default(served: Served) -> None:
    with served() as http:
        assert preflight(http, PAGE).status_code in (403, 405)
        for answer in (http.get("/v1/models"), http.get("/health", headers={"origin": PAGE})):
            assert not any(name.startswith("access-control") for name in answer.headers)


def test_pages_of_named_origins_may_call_and_read(served: Served) -> None:
    """Without a key too: they are let in where pages from elsewhere are not."""
    with served(allowed_origins=(PAGE,), allowed_methods=("GET", "POST")) as http:
        asked = preflight(http, PAGE)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, PAGE)
        assert asked.headers["access-control-allow-headers"] == "authorization, content-type"
        assert preflight(http, PAGE, "DELETE").status_code == 400
        assert "access-control-allow-origin" not in preflight(http, ELSEWHERE).headers
        answer = http.get("/v1/models", headers={"origin": PAGE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = http.get("/v1/models", headers={"origin": ELSEWHERE})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
        error = http.get("/v1/nothing", headers={"origin": PAGE})
        assert (error.status_code, error.headers["access-control-allow-origin"]) == (404, PAGE)


def test_pages_may_send_the_headers_that_are_named(served: Served) -> None:
    with served(allowed_origins=(PAGE,), allowed_headers=("x-team", "authorization")) as http:
        assert preflight(http, PAGE, headers="x-team, authorization").status_code == 200
        refused = preflight(http, PAGE, headers="x-other")
        assert (refused.status_code, refused.text) == (400, "Disallowed CORS headers")


REFUSED = [
    (b"x: " + 3000 * b"x", 431),
    (12 * b"x: 1\r\n" + b"\r\n", 431),
    (b"content-length: -1\r\n\r\n{}", 400),
    (b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    (b"content-length: 1\r\ncontent-encoding: gzip\r\n\r\nx", 415),
    (b"content-length: 1001\r\n\r\n" + 1001 * b" ", 413),
    (b"content-length: 2\r\n\r\n{}", 400),
    (b"transfer-encoding: chunked\r\n\r\nno chunk\r\n", 400),
]
"""Rests of heads, with bodies, and what is answered."""


def refused(http: httpx.Client, secret: str, origin: str, rest: bytes, at: int = 0) -> HTTPResponse:
    """The answer to a call of a page, of whose head this is the end, and of which the server has
    `at` bytes before the others come.
    """
    with connected(str(http.base_url)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {secret}\r\n"
        if at:
            connection.sendall(f"{head}origin: {origin}\r\n".encode() + rest[:at])
            assert http.get("/health").status_code == 200
            connection.sendall(rest[at:])
        else:
            connection.sendall(f"{head}origin: {origin}\r\n".encode() + rest)
        return answer_on(connection)


@pytest.mark.parametrize("allowed", [PAGE, "*"])
def test_pages_may_read_why_a_request_was_refused(served: Served, tmp_path: Path, allowed: str) -> None:
    _, secret = create_key(str(tmp_path), tenant="a")
    limits = {"h11_max_incomplete_event_size": 2000, "h11_max_header_count": 10, "max_body_bytes": 1000}
    with served(allowed_origins=(allowed,), **limits) as http:
        for rest, status in REFUSED:
            answer = refused(http, secret, PAGE, rest)
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, allowed)
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            in_parts = refused(http, secret, PAGE, rest, at=max(1, rest.find(b"no chunk")))
            assert (in_parts.status, in_parts.headers["access-control-allow-origin"]) == (status, allowed)
            allowed_elsewhere = refused(http, secret, ELSEWHERE, rest).headers["access-control-allow-origin"]
            assert allowed_elsewhere == ("*" if allowed == "*" else None)


def test_pages_may_read_that_a_head_was_late(served: Served) -> None:
    with served(allowed_origins=(PAGE,), timeout_head=0.4, with_data=True) as http:
        answer = refused(http, "none", PAGE, b"content-len")
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (408, PAGE)


def test_pages_may_read_that_there_are_too_many_connections(served: Served) -> None:
    with served(allowed_origins=(PAGE,), max_connections=1) as http, plain_client(str(http.base_url)) as second:
        assert http.get("/v1/models", headers={"origin": PAGE}).status_code == 200
        assert preflight(second, PAGE).status_code == 200  # else the page would not get so far
        answer = second.get("/v1/models", headers={"origin": PAGE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (503, PAGE)
        assert "retry-after" in answer.headers["access-control-expose-headers"]


def test_a_preflight_of_a_full_server_takes_no_room(served: Served) -> None:
    with served(allowed_origins=(PAGE,), max_connections=1) as http, plain_client(str(http.base_url)) as second:
        assert http.get("/v1/models").status_code == 200
        assert preflight(second, PAGE).headers["connection"] == "close"
        http.close()
        with plain_client(str(http.base_url)) as third:
            wait_until(lambda: third.get("/v1/models").status_code == 200, 60, "room for another client")


def test_pages_may_read_that_the_server_failed(redis_url: str, tmp_path: Path) -> None:
    settings = ApiSettings(
        redis_url=redis_url, file_store=str(tmp_path), allowed_origins=(PAGE,), allow_credentials=True
    )
    with running_api(settings, app=failing_app(settings)) as url, plain_client(url) as http:
        answer = http.get("/failing/x", headers={"origin": PAGE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (500, PAGE)
        assert answer.headers["access-control-allow-credentials"] == "true"
        assert "access-control-allow-origin" not in http.get("/failing/x").headers


def test_pages_may_read_what_middleware_answers(served: Served) -> None:
    with served(allowed_origins=(PAGE,), middleware=(f"{__name__}.stamp",)) as http:
        answer = http.get("/stamped", headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == PAGE


def test_every_page_may_read_only_where_keys_are_needed(served: Served, tmp_path: Path) -> None:
    page = {"origin": ELSEWHERE}
    with served(allowed_origins=("*",)) as http:
        assert http.get("/v1/models", headers=page).status_code == 403
    _, secret = create_key(str(tmp_path), tenant="a")
    with served(allowed_origins=("*",)) as http:
        assert preflight(http, ELSEWHERE).headers["access-control-allow-origin"] == "*"
        refused = http.get("/v1/models", headers=page)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")
        answer = http.get("/v1/models", headers={**page, "authorization": f"Bearer {secret}"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("HTTPS://App.Example.Org", PAGE),
        ("https://app.example.org:443", PAGE),
        ("http://app.example.org:80", "http://app.example.org"),
        ("https://app.example.org:80", "https://app.example.org:80"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("chrome-extension://abcdefgh", "chrome-extension://abcdefgh"),
    ],
)
def test_origins_are_taken_as_browsers_send_them(given: str, sent: str) -> None:
    assert ApiSettings(allowed_origins=(given,)).allowed_origins == (sent,)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"allowed_origins": ("app.example.org",)}, "PIPELINE_ALLOWED_ORIGINS: 'app.example.org' is no origin"),
        ({"allowed_origins": (f"{PAGE}/path",)}, "is no origin"),
        ({"allowed_origins": ("https://bücher.example",)}, "is no origin"),
        ({"allowed_origins": ("https://user@app.example.org",)}, "is no origin"),
        ({"allowed_origins": ('["*"',)}, "is no JSON list of texts"),
        ({"allowed_methods": ("[1]",)}, "is no JSON list of texts"),
        ({"allowed_headers": ("x y",)}, "is no name of a method or a header"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "lets every page act as its user"),
        ({"root_path": "models/"}, "PIPELINE_ROOT_PATH: 'models/' is no path such as /models"),
        ({"middleware": ("Name",)}, "is no import path"),
        ({"disable_access_log_for_endpoints": "/health,x"}, "'x' is no path"),
    ],
)
def test_values_that_cannot_be_used_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(reason)):
        ApiSettings(**settings)


def test_lists_may_be_json_as_for_vllm() -> None:
    settings = ApiSettings(allowed_origins=('["https://a.example", "https://b.example"]',), allowed_methods=("GET",))
    assert settings.allowed_origins == ("https://a.example", "https://b.example")
    assert settings.allowed_methods == ("GET",)


def test_a_root_path_is_understood_with_the_proxy_taking_it_off_or_not(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "api.http.access_log"), served(root_path="/models") as http:
        for path in ("/v1/models", "/models/v1/models"):
            assert http.get(path).status_code == 200
        assert http.get("/models/health", headers={"origin": ELSEWHERE}).status_code == 200
        assert http.get("/modelsx/v1/models").status_code == 404
        assert http.get("/openapi.json").json()["servers"] == [{"url": "/models"}]
    assert '"GET /models/health"' not in caplog.text


class Stamp:
    """Middleware as a class."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("x-stamp", "class")
            await send(message)

        await self.app(scope, receive, stamped)


async def stamp(request: Any, call_next: Any) -> Any:
    """Middleware as a function, which may answer by itself."""
    if request.url.path == "/stamped":
        return PlainTextResponse(request.state.request_id)
    answer = await call_next(request)
    answer.headers.append("x-stamp", "function")
    return answer


def test_middleware_is_put_around_in_the_order_of_its_flags(
    served: Served, scripted: Callable[..., ScriptedWorker]
) -> None:
    scripted(lambda claim: ["some ", "text"])
    paths = tuple(f"{__name__}.{name}" for name in ("Stamp", "stamp"))
    with served(middleware=paths) as http:
        assert http.get("/v1/models").headers.get_list("x-stamp") == ["class", "function"]
        own = http.get("/stamped")
        assert own.text == own.headers["x-request-id"]
        body = {"model": MODEL, "prompt": "x", "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module.Name", "cannot be imported, is it on PYTHONPATH? ModuleNotFoundError"),
        ("starlette.types.Name", "the module starlette.types has no Name"),
        ("json.dumps", "is neither a class nor an async function"),
    ],
)
def test_middleware_that_cannot_be_used_is_refused(tmp_path: Path, path: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"--middleware {path}")) as caught:
        create_app(ApiSettings(file_store=str(tmp_path), middleware=(path,)))
    assert reason in str(caught.value)


@pytest.mark.parametrize("given", ["a", "abc-1:2.3/4=5+6@7_8", 128 * "x", "00-4bf92f3577b34da6a3ce929d0e0e4736-x-01"])
def test_a_client_may_choose_the_id_of_its_request(http: httpx.Client, given: str) -> None:
    for path in ("/v1/models", "/v1/nothing", "/health"):
        assert http.get(path, headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize(
    "given", [b"", 129 * b"x", b"a b", b"a\tb", b'a"b', b"<a>", b"a;b", b"\xc3\xa4", b"-a", b"a,b"]
)
def test_an_id_that_logs_or_headers_could_not_hold_is_replaced(http: httpx.Client, given: bytes) -> None:
    answer = http.get("/v1/models", headers=[(b"x-request-id", given)])
    assert answer.status_code == 200
    assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])


def test_two_ids_are_none(http: httpx.Client) -> None:
    answer = http.get("/v1/models", headers=[("x-request-id", "a"), ("x-request-id", "b")])
    assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_an_id_brings_no_header_of_its_own(api_url: str, line_end: bytes) -> None:
    with connected(api_url) as connection:
        head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-request-id: a" + line_end + b"x-own: b\r\n\r\n"
        connection.sendall(head)
        assert "x-own" not in answer_on(connection).headers


def test_the_access_log_names_each_request_once(
    served: Served, scripted: Callable[..., ScriptedWorker], caplog: pytest.LogCaptureFixture
) -> None:
    scripted(lambda claim: ["one"])
    with caplog.at_level("INFO", "api.http.access_log"), served() as http:
        http.get("/v1/models?secret=1", headers={"x-request-id": "own-id"})
        http.get("/v1/nothing%0AINFO forged")
        http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        http.get("/health")
    models, nothing, call = [record for record in caplog.records if record.name == "api.http.access_log"]
    assert re.fullmatch(r'127\.0\.0\.1:\d+ "GET /v1/models" 200 in [\d.]+ ms, own-id', models.getMessage())
    assert '"GET /v1/nothing%0AINFO%20forged" 404' in nothing.getMessage()
    assert re.search(r'"POST /v1/completions" 200 in [\d.]+ ms, req_\w+, live_\w+$', call.getMessage())
    assert call.fields["status"] == 200  # type: ignore[attr-defined]


def test_the_access_log_leaves_out_the_paths_that_are_named(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level("INFO", "api.http.access_log"),
        served(disable_access_log_for_endpoints="/version,/v1/models") as http,
    ):
        for path in ("/version", "/v1/models", "/health"):
            assert http.get(path).status_code == 200
    assert re.findall(r'"GET (\S+)"', caplog.text) == ["/health"]


def test_the_access_log_can_be_turned_off(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), served(disable_uvicorn_access_log=True) as http:
        assert http.get("/v1/models").status_code == 200
    assert [record for record in caplog.records if record.name.startswith("api.http")] == []


def test_the_openapi_document_can_be_turned_off(served: Served) -> None:
    with served(disable_fastapi_docs=True) as http:
        assert http.get("/openapi.json").status_code == 404
    with served() as http:
        assert http.get("/openapi.json").status_code == 200
        for path in ("/docs", "/redoc"):  # they would load scripts from elsewhere
            assert http.get(path).status_code == 404


def test_a_unix_socket_is_made_replaced_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    settings = ApiSettings(uds=str(path), host="0.0.0.0")
    assert settings.is_local
    with listening(settings) as listener:
        assert listener.getsockname() == str(path)
        with pytest.raises(OSError, match=f"cannot listen at {path}: Address already in use"), listening(settings):
            pass
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(path))
    assert not path.exists()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left_behind:
        left_behind.bind(str(path))
    with listening(settings):
        pass
    path.write_text("a file")
    with pytest.raises(OSError, match="cannot listen at"), listening(settings):
        pass
    assert path.read_text() == "a file"
