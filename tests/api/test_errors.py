"""Every status leaves in OpenAI's shape, and says what was wrong."""

import json
import socket
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.app import create_app
from api.settings import ApiSettings
from tests.support.api_server import answer_in_process, failing_app, running_api

CHAT = "/v1/chat/completions"
CASES: list[tuple[str, str, dict[str, Any], int, str | None]] = [
    ("GET", "/v1/nothing", {}, 404, "unknown_url"),
    ("GET", CHAT, {}, 405, "method_not_allowed"),
    ("DELETE", "/v1/models", {}, 405, "method_not_allowed"),
    ("POST", CHAT, {"content": b"{"}, 400, None),
    ("POST", CHAT, {"content": b"\xff\xfe"}, 400, None),
    ("POST", CHAT, {"content": b"[1]"}, 400, "invalid_type"),
    ("POST", CHAT, {"content": b""}, 400, None),
    ("POST", CHAT, {"json": {"messages": []}}, 400, "missing_required_parameter"),
    ("POST", CHAT, {"json": {"model": "m"}}, 400, "missing_required_parameter"),
    ("POST", "/v1/completions", {"json": {"prompt": "x"}}, 400, "missing_required_parameter"),
    ("POST", "/v1/completions", {"json": {"model": "m", "messages": []}}, 400, "missing_required_parameter"),
    ("POST", "/v1/completions", {"json": {"model": "m", "prompt": "x"}}, 503, "no_worker"),
    ("GET", "/v1/models/absent/model", {}, 404, "model_not_found"),
    ("GET", "/v1/streams/live_absent", {}, 404, "stream_not_found"),
    ("GET", "/v1/streams/nonsense", {}, 404, "stream_not_found"),
]


@pytest.mark.parametrize(("method", "path", "options", "status", "code"), CASES)
def test_errors_have_openais_shape(
    http: httpx.Client, method: str, path: str, options: dict[str, Any], status: int, code: str | None
) -> None:
    answer = http.request(method, path, **options)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert answer.headers["x-request-id"].startswith("req_")
    if code is not None:
        assert error["code"] == code


@pytest.mark.parametrize(
    "head", [b"GET /v1/files/\xff HTTP/1.1", b"GET /v1/files HTTP/1.1\r\ncontent-length: -1", b"rubbish"]
)
def test_what_is_no_request_is_answered_too(api_url: str, head: bytes) -> None:
    address = httpx.URL(api_url)
    with socket.create_connection((address.host, address.port or 80), 30) as connection:
        connection.sendall(head + b"\r\nhost: localhost\r\n\r\n")
        answer = HTTPResponse(connection)
        answer.begin()
        error = json.loads(answer.read())["error"]
    assert (answer.status, set(error), error["code"]) == (
        400,
        {"message", "type", "param", "code"},
        "invalid_http_request",
    )
    assert answer.headers["x-request-id"].startswith("req_")


def test_a_body_that_stops_coming_is_given_up(redis_url: str, tmp_path: Path) -> None:
    settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path), upload_silence_seconds=0.1)
    with running_api(settings) as url:
        address = httpx.URL(url)
        for path in ("/v1/batches", CHAT):
            with socket.create_connection((address.host, address.port or 80), 30) as connection:
                connection.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{{".encode())
                answer = HTTPResponse(connection)
                answer.begin()
                assert (answer.status, json.loads(answer.read())["error"]["code"]) == (408, "upload_timeout")


def test_the_error_for_a_wrong_method_names_the_right_ones(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/files", "/v1/files/{file_id}", "/v1/batches", "/v1/batches/{batch_id}/cancel"} <= set(paths)
    for path, operations in paths.items():
        answer = http.put(path)
        methods = {*operations, *(["head"] if "get" in operations else [])}
        assert (answer.status_code, answer.headers["allow"]) == (405, ", ".join(sorted(methods)).upper()), path


def test_a_body_over_the_limit_is_refused(http: httpx.Client, long_linger: None) -> None:
    answer = http.post(CHAT, content=b" " * (33 * 1024 * 1024))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


def test_what_the_framework_refuses_has_the_shape_too(tmp_path: Path) -> None:
    async def counted(number: int) -> int:
        return number

    app = create_app(ApiSettings(file_store=str(tmp_path)))
    app.add_api_route("/counted", counted)
    answer = answer_in_process(app, "/counted?number=x")
    error = answer.json()["error"]
    assert (answer.status_code, set(error)) == (400, {"message", "type", "param", "code"})
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "number", "invalid_value")


def test_an_error_of_our_own_has_the_shape_too_and_reveals_nothing_of_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer = answer_in_process(failing_app(ApiSettings(file_store=str(tmp_path))), "/failing/x")
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "The server had an error while handling the request.",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.headers["x-request-id"] in caplog.text
