"""What a web page in the browser of a server's user may not do with the server, and what everybody
else still may.
"""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from api.settings import ApiSettings
from jobs.store.api_keys import create_key
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support.api_server import plain_client, running_api

COMPLETIONS = "/v1/completions"
BODY = f'{{"model": "{MODEL}", "prompt": "x"}}'.encode()
PROBED = ("/health", "/ready", "/metrics")
FORM = {"files": {"file": ("input.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}


@pytest.fixture
def named(redis_url: str, tmp_path: Path) -> Iterator[httpx.Client]:
    """Client of a server that others reach too, under a name of its own."""
    settings = ApiSettings(
        redis_url=redis_url,
        file_store=str(tmp_path),
        host="gpu.example.org",
        allowed_hosts=("Proxy.example.org",),
        insecure=True,
    )
    with running_api(settings) as url, plain_client(url) as http:
        yield http


def outcome(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json().get("error", {}).get("code")


def test_a_page_whose_name_was_pointed_here_reaches_no_route(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    others = {path: methods for path, methods in paths.items() if path not in PROBED}
    assert len(others) == len(paths) - len(PROBED)
    for path, methods in {**others, "/openapi.json": ["get"], "/nothing": ["post"]}.items():
        for method in methods:
            answer = http.request(method, path, headers={"host": "rebound.example:8000"})
            assert outcome(answer) == (403, "host_not_allowed"), (method, path)
    assert "--allowed-host" in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"]


def test_probes_may_use_any_name(http: httpx.Client, scripted: Callable[..., ScriptedWorker]) -> None:
    scripted(lambda claim: ["one"])
    for headers in ({"host": "rebound.example:8000"}, {"origin": "https://page.example"}):
        assert {http.get(path, headers=headers).status_code for path in PROBED} == {200}


@pytest.mark.parametrize("origin", ["https://page.example", "null", "http://203.0.113.5:8000", "file://", "x"])
def test_a_page_from_elsewhere_sends_nothing(http: httpx.Client, origin: str) -> None:
    headers = {"origin": origin}
    for answer in (
        http.post(COMPLETIONS, content=BODY, headers=headers),
        http.post("/v1/files", headers=headers, **FORM),  # type: ignore[arg-type]
        http.post("/v1/batches/batch_x/cancel", headers=headers),
        http.get("/v1/files", headers=headers),
    ):
        assert outcome(answer) == (403, "origin_not_allowed")
    assert http.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST.:80", "127.0.0.1:9", "127.8.9.1", "[::1]:8000", "a.localhost", "192.0.2.7:8000",
     "api:8000", "host.docker.internal:8000", "myhost.local"],
)  # fmt: skip
def test_names_that_cannot_be_pointed_here_are_answered(http: httpx.Client, host: str) -> None:
    for origin in ({}, {"origin": f"http://{host}"}, {"origin": "http://localhost:3000"}):
        assert http.get("/v1/models", headers={"host": host, **origin}).status_code == 200


@pytest.mark.parametrize("host", ["example.org", "10.0.0.1.evil.example", "x.internal.example", "[x"])
def test_other_names_are_refused(http: httpx.Client, host: str) -> None:
    assert outcome(http.get("/v1/models", headers={"host": host})) == (403, "host_not_allowed")


def test_a_server_behind_a_proxy_is_answered_under_its_name(redis_url: str, tmp_path: Path) -> None:
    settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path), allowed_hosts=("Proxy.example.org",))
    with running_api(settings) as url, plain_client(url) as http:
        for headers in ({"host": "proxy.example.org:80"}, {"origin": "https://proxy.example.org"}):
            assert http.get("/v1/models", headers=headers).status_code == 200
        answer = http.get("/v1/models", headers={"host": "x.proxy.example.org"})
        assert outcome(answer) == (403, "host_not_allowed")


def test_a_server_for_others_is_answered_under_any_name(named: httpx.Client) -> None:
    """But it answers no web page from elsewhere."""
    for host in ("gpu.example.org:8000", "pipeline-api.default.svc:8000", "myhost.lan", "10.0.0.1"):
        assert named.get("/v1/models", headers={"host": host}).status_code == 200
        assert named.get("/v1/models", headers={"host": host, "origin": f"http://{host}"}).status_code == 200
        answer = named.get("/v1/models", headers={"host": host, "origin": "https://page.example"})
        assert outcome(answer) == (403, "origin_not_allowed")
    for own in ("proxy.example.org", "gpu.example.org", socket.gethostname()):
        assert named.get("/v1/models", headers={"origin": f"https://{own}"}).status_code == 200


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"],
)
def test_what_a_page_sends_unasked_is_no_call(http: httpx.Client, kind: str) -> None:
    for path in (COMPLETIONS, "/v1/chat/completions", "/v1/batches"):
        answer = http.post(path, content=BODY, headers={"content-type": kind})
        assert outcome(answer) == (415, "not_json")
        assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON ; charset=utf-8", "", None])
def test_json_is_a_call_and_so_is_what_says_no_type(
    http: httpx.Client, scripted: Callable[..., ScriptedWorker], kind: str | None
) -> None:
    scripted(lambda claim: ["one"])
    headers = {} if kind is None else {"content-type": kind}
    assert http.post(COMPLETIONS, content=BODY, headers=headers).status_code == 200


def test_with_keys_nothing_of_this_is_asked(
    redis_url: str, tmp_path: Path, scripted: Callable[..., ScriptedWorker]
) -> None:
    _, secret = create_key(str(tmp_path), tenant="a")
    scripted(lambda claim: ["one"])
    page = {"host": "api.example.org", "origin": "https://page.example", "content-type": "text/plain"}
    with running_api(ApiSettings(redis_url=redis_url, file_store=str(tmp_path))) as url, plain_client(url) as http:
        for path in ("/health", "/metrics", "/openapi.json"):
            assert http.get(path, headers=page).status_code == 200
        assert http.post(COMPLETIONS, content=BODY, headers=page).status_code == 401
        answer = http.post(COMPLETIONS, content=BODY, headers={**page, "authorization": f"Bearer {secret}"})
        assert answer.status_code == 200
