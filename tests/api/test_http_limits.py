"""What a connection may cost: heads, time, connections at once. Each limit on a real socket."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from api.http import server
from api.http_settings import ALIVE
from api.settings import ApiSettings
from tests.support.api_server import running_api
from tests.support.certificates import make_certificates
from tests.support.raw_http import answer_on, connected, error_of, get
from tests.support.waiting import wait_until

Api = Callable[..., Any]


@pytest.fixture
def api(redis_url: str, tmp_path: Path) -> Api:
    """Runs an API with some settings."""

    @contextmanager
    def run(keep_alive: int = 600, with_data: bool = False, **settings: Any) -> Iterator[str]:
        given = ApiSettings(redis_url=redis_url, file_store=str(tmp_path / "store"), **settings)
        with running_api(given, keep_alive=keep_alive, with_data=with_data) as url:
            yield url

    return run


def test_a_head_beyond_the_limit_is_answered_431(api: Api) -> None:
    with api(h11_max_incomplete_event_size=2000, h11_max_header_count=10) as url:
        with connected(url) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx: " + 3000 * b"x")
            answer = answer_on(connection)
            assert error_of(answer) == (431, "request_head_too_large")
            assert answer.headers["x-request-id"].startswith("req_")
            assert connection.recv(1) == b""
        for size, status in ((2000, 200), (2001, 431)):  # whole, in one read
            with connected(url) as connection:
                start = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx: "
                connection.sendall(start + (size - len(start) - 4) * b"x" + b"\r\n\r\n")
                assert answer_on(connection).status == status
        with connected(url) as connection:
            start = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: "
            connection.sendall(start + 2000 * b"x" + b"\r\n\r\n")
            assert error_of(answer_on(connection)) == (431, "request_head_too_large")
        for headers, status in ((9, 200), (10, 431)):
            with connected(url) as connection:
                many = b"".join(b"x-%d: 1\r\n" % number for number in range(headers))
                connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + many + b"\r\n")
                assert answer_on(connection).status == status


def test_a_head_that_does_not_arrive_in_time_is_answered_408(api: Api) -> None:
    with api(timeout_head=0.4, with_data=True) as url:
        with connected(url) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost")
            assert error_of(answer_on(connection)) == (408, "request_head_timeout")
            assert connection.recv(1) == b""
        with connected(url) as connection:  # the next head on the same connection
            assert get(connection).status == 200
            connection.sendall(b"GET /v1/mod")
            assert error_of(answer_on(connection)) == (408, "request_head_timeout")


@pytest.mark.parametrize("rest", [b"x", b"xx"], ids=["in part", "all of it"])
def test_the_rest_of_a_body_that_comes_after_its_answer_keeps_no_connection(api: Api, rest: bytes) -> None:
    with api(timeout_head=0.3, with_data=True) as url, connected(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n")
        assert answer_on(connection).status == 200
        connection.sendall(rest)
        assert connection.recv(1) == b""


def test_few_connections_beyond_the_limit_are_kept(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say nothing get no 503 either, and would use up the files that calls need."""
    monkeypatch.setattr(server, "_REFUSED_AT_ONCE", 1)
    with api(max_connections=1) as url, connected(url) as first, connected(url) as beyond, connected(url) as dropped:
        assert dropped.recv(1) == b""
        assert get(first).status == 200
        assert error_of(get(beyond)) == (503, "server_full")


def test_a_full_server_answers_liveness_probes(api: Api) -> None:
    with api(max_connections=1) as url, connected(url) as first, connected(url) as beyond:
        assert get(first).status == 200
        assert get(beyond, ALIVE).status == 200


def test_a_connection_on_which_nothing_comes_is_closed(api: Api) -> None:
    with api(timeout_head=0.2) as url, connected(url) as connection:
        assert connection.recv(1) == b""


def test_a_head_that_comes_in_drops_gets_no_more_time(api: Api) -> None:
    with api(timeout_head=1.0, with_data=True) as url, connected(url) as connection:
        connection.settimeout(0.1)
        received, drops = b"", 0
        while not received:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\n"[:1] if not drops else b"x")
            drops += 1
            try:
                received = connection.recv(4096)
            except TimeoutError:
                assert drops < 600, "the head was never given up"
        assert received.startswith(b"HTTP/1.1 408")


def test_a_body_has_its_own_time(api: Api) -> None:
    """The time for a head neither cuts a body that comes later, nor a silent connection between two
    requests.
    """
    with api(timeout_head=0.2, with_data=True) as url, connected(url) as connection:
        connection.sendall(
            b"POST /v1/batches HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: 2\r\n\r\n"
        )
        connection.settimeout(1.0)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(60)
        connection.sendall(b"{}")
        assert answer_on(connection).status == 400
        connection.settimeout(1.0)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(60)
        assert get(connection).status == 200


def test_an_idle_connection_is_closed(api: Api) -> None:
    with api(keep_alive=1) as url, connected(url) as connection:
        assert get(connection).status == 200
        assert connection.recv(1) == b""


def test_calls_on_connections_beyond_the_limit_are_refused(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    with api(max_connections=2) as url, ExitStack() as stack:
        first, second = (stack.enter_context(connected(url)) for _ in range(2))
        assert {get(one).status for one in (first, second)} == {200}
        with connected(url) as third:
            answer = get(third)
            assert error_of(answer) == (503, "server_full")
            assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
            assert answer.headers["x-request-id"].startswith("req_")
            assert third.recv(1) == b""
        assert caplog.text.count("--max-connections") == 1
        with connected(url) as probe:
            assert get(probe, "/health").status == 200
        assert get(first).status == 200
        first.close()
        wait_until(lambda: _answers(url), 60, "a place to be free")


def test_a_client_that_does_not_speak_tls_is_given_up(api: Api, tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    with api(ssl_certfile=files.certificate, ssl_keyfile=files.key, timeout_head=0.3) as url:
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            with connected(url) as connection:
                connection.sendall(said)
                assert not connection.recv(4096).startswith(b"HTTP")


def test_rubbish_in_a_body_after_the_answer_began_ends_the_connection(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    """No second answer can be sent then, and nothing fails in the log."""
    with api() as url, connected(url) as connection:
        connection.sendall(b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 404"
        connection.sendall(b"rubbish\r\n\r\n")
        while data := connection.recv(4096):
            assert b"HTTP/1.1" not in data
    assert "failed" not in caplog.text


def test_the_limit_of_open_files_is_kept_too(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.process.resource.getrlimit", lambda _: (195, 195))
    monkeypatch.setattr("jobs.process.resource.setrlimit", lambda *_: None)
    with api() as url, ExitStack() as stack:
        held = [stack.enter_context(connected(url)) for _ in range(3)]
        assert {get(one).status for one in held} == {200}
        assert get(stack.enter_context(connected(url))).status == 503


def _answers(url: str) -> bool:
    with connected(url) as connection:
        return get(connection).status == 200
