"""Which requests are admitted, for which tenant, and when none is."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from api.http_settings import is_loopback
from api.settings import ApiSettings
from jobs.queue.request_queue import Queue
from jobs.store.api_keys import create_key, revoke_key
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support.api_server import official_client, plain_client, running_api
from tests.support.requests import start_batch
from tests.support.waiting import wait_until

Serve = Callable[..., str]


@pytest.fixture(autouse=True)
def _keys_are_looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.store.api_keys._RECHECK_SECONDS", 0.05)


@pytest.fixture
def serve(redis_url: str, tmp_path: Path) -> Iterator[Serve]:
    """Starts an API whose file store is `tmp_path`; returns its address."""
    running = []

    def start(**settings: object) -> str:
        running.append(running_api(ApiSettings(redis_url=redis_url, file_store=str(tmp_path), **settings)))
        return running[-1].__enter__()

    yield start
    for api in running:
        api.__exit__(None, None, None)


def get(url: str, path: str = "/v1/models", **headers: str) -> httpx.Response:
    with plain_client(url) as http:
        return http.get(path, headers=headers)


def status(url: str, path: str = "/v1/models", **headers: str) -> int:
    return get(url, path, **headers).status_code


def test_only_requests_with_a_key_are_admitted(serve: Serve, tmp_path: Path) -> None:
    _, secret = create_key(str(tmp_path), tenant="a")
    url = serve()
    official_client(url, secret).models.list()
    with pytest.raises(openai.AuthenticationError) as caught:
        official_client(url, "sk-" + "x" * 43).models.list()
    assert (caught.value.code, caught.value.type, caught.value.param) == (
        "invalid_api_key",
        "invalid_request_error",
        None,
    )
    for headers in (
        {},
        {"authorization": secret},
        {"authorization": f"Basic {secret}"},
        {"authorization": "Bearer"},
        {"api-key": secret},
    ):
        answer = get(url, **headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), headers
        assert answer.headers["www-authenticate"] == "Bearer"


def test_every_route_below_v1_asks_for_a_key(serve: Serve, tmp_path: Path) -> None:
    create_key(str(tmp_path), tenant="a")
    url = serve()
    paths = get(url, "/openapi.json").json()["paths"]
    calls = [(method, path) for path, methods in paths.items() for method in methods if path.startswith("/v1/")]
    assert len(calls) > 4
    with plain_client(url) as http:
        for method, path in calls:
            assert http.request(method, path.replace("{", "").replace("}", "")).status_code == 401, (method, path)
    assert status(url, "/health") == 200
    assert status(url, "/metrics") == 200


def test_a_revoked_key_is_refused_and_the_rest_stay(serve: Serve, tmp_path: Path) -> None:
    record, secret = create_key(str(tmp_path), tenant="a")
    _, other = create_key(str(tmp_path), tenant="a")
    url = serve()
    assert status(url, Authorization=f"Bearer {secret}") == 200
    revoke_key(str(tmp_path), record.id)
    wait_until(lambda: status(url, Authorization=f"Bearer {secret}") == 401, 30, "the key to be refused")
    assert status(url, Authorization=f"Bearer {other}") == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "example.org"])
def test_beyond_this_machine_no_client_is_served_without_a_key(serve: Serve, host: str) -> None:
    """`host` is what the server believes to listen on; it is reached by another address here."""
    assert status(serve(host=host)) == 401
    assert status(serve(host=host, insecure=True)) == 200
    assert status(serve()) == 200


def test_no_client_is_admitted_once_the_last_key_is_revoked(serve: Serve, tmp_path: Path) -> None:
    """A proxy may be in front of a server that listens on this machine only."""
    record, secret = create_key(str(tmp_path), tenant="a")
    url = serve()
    assert status(url, Authorization=f"Bearer {secret}") == 200
    revoke_key(str(tmp_path), record.id)
    wait_until(lambda: status(url, Authorization=f"Bearer {secret}") == 401, 30, "the last key to be refused")
    assert status(url) == 401
    assert status(serve()) == 401
    assert status(serve(insecure=True)) == 200


def test_no_client_is_admitted_while_keys_cannot_be_read(serve: Serve, tmp_path: Path) -> None:
    _, secret = create_key(str(tmp_path), tenant="a")
    url = serve()
    assert status(url, Authorization=f"Bearer {secret}") == 200
    (tmp_path / "keys").rename(tmp_path / "away")
    wait_until(lambda: status(url, Authorization=f"Bearer {secret}") == 503, 30, "all requests to be refused")
    assert get(url).json()["error"]["code"] == "keys_unavailable"
    (tmp_path / "away").rename(tmp_path / "keys")
    wait_until(lambda: status(url, Authorization=f"Bearer {secret}") == 200, 30, "keys to be read again")


def test_a_key_sends_no_more_requests_a_minute_than_it_may(serve: Serve, tmp_path: Path) -> None:
    """Through two API processes, which count together."""
    _, secret = create_key(str(tmp_path), tenant="a", requests_per_minute=2)
    _, other = create_key(str(tmp_path), tenant="a")
    urls = [serve(), serve()]
    answers = [get(url, Authorization=f"Bearer {secret}") for url in urls]
    assert [answer.status_code for answer in answers] == [200] * 2
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert answers[0].headers["x-ratelimit-reset-requests"] == "30s"
    with pytest.raises(openai.RateLimitError) as caught:
        official_client(urls[0], secret).models.list()
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30
    assert "x-ratelimit-limit-requests" not in get(urls[0], Authorization=f"Bearer {other}").headers


def test_the_official_client_waits_as_long_as_the_server_says(serve: Serve, tmp_path: Path, queue: Queue) -> None:
    record, secret = create_key(str(tmp_path), tenant="a", requests_per_minute=60)
    url = serve()
    answers: list[tuple[float, httpx.Response]] = []
    client = official_client(url, secret, lambda answer: answers.append((time.monotonic(), answer)))

    def is_refused_first() -> bool:
        """Empty the key's bucket and call; on a slow machine another request may be allowed in
        between.
        """
        answers.clear()
        wait_until(lambda: not queue.admit(record.id, 60).admitted, 60, "the bucket to be empty")
        client.with_options(max_retries=2).models.list()
        return answers[0][1].status_code == 429

    wait_until(is_refused_first, 60, "a refusal")
    (refused_at, refusal), (answered_at, answer) = answers[0], answers[-1]
    assert answer.status_code == 200
    assert answered_at - refused_at >= int(refusal.headers["retry-after-ms"]) / 1000


def test_a_live_stream_is_shown_to_its_tenant_alone(
    serve: Serve, tmp_path: Path, scripted: Callable[..., ScriptedWorker]
) -> None:
    secrets = [create_key(str(tmp_path), tenant=tenant)[1] for tenant in ("a", "a", "b")]
    url = serve()
    scripted(lambda claim: ["one ", "two"])
    answer = official_client(url, secrets[0]).completions.with_raw_response.create(model=MODEL, prompt="x", stream=True)
    assert len(list(answer.parse())) > 1
    path = f"/v1/streams/{answer.headers['x-stream-id']}"
    assert [status(url, path, Authorization=f"Bearer {secret}") for secret in secrets] == [200, 200, 404]


def test_the_lines_of_a_batch_are_shown_to_its_tenant_alone(serve: Serve, tmp_path: Path, queue: Queue) -> None:
    secrets = [create_key(str(tmp_path), tenant=tenant)[1] for tenant in ("a", "b")]
    url = serve()
    for batch, tenant in (("batch_of_a", "a"), ("batch_of_none", "")):
        start_batch(queue, batch, 1, tenant=tenant)
    answers = [
        get(url, f"/v1/streams/{batch}/0", Authorization=f"Bearer {secret}")
        for batch in ("batch_of_a", "batch_of_none", "batch_of_all")
        for secret in secrets
        if (batch, secret) != ("batch_of_a", secrets[0])
    ]
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {(404, "stream_not_found")}
    own = {"authorization": f"Bearer {secrets[0]}"}
    with plain_client(url, headers=own) as http, http.stream("GET", "/v1/streams/batch_of_a/0") as answer:
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("127.0.0.1.example.org", False),
        ("", False),
        ("localhost.example.org", False),
    ],
)
def test_what_counts_as_this_machine(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
