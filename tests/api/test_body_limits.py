"""Limits of one client in an API process: memory for bodies, calls, connections, time."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.http import request_body
from api.http.http_protocol import AddressCounts
from api.settings import ApiSettings
from jobs.store.api_keys import create_key
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support.api_server import plain_client, running_api
from tests.support.commands import running_pipeline
from tests.support.ports import reserved_port
from tests.support.raw_http import answer_on, connected, error_of, get
from tests.support.waiting import wait_until

MIB = 1024 * 1024
Scripted = Callable[..., ScriptedWorker]


@pytest.fixture
def secrets(tmp_path: Path) -> list[str]:
    """The keys of three tenants."""
    return [create_key(str(tmp_path), tenant=tenant)[1] for tenant in ("greedy", "modest", "third")]


@contextmanager
def unfinished(url: str, secret: str, size: int, sent: bytes = b"{", path: str = "/v1/completions") -> Iterator[Any]:
    """A call whose body of `size` bytes has begun: the server reads it."""
    with connected(url) as connection:
        connection.sendall(head(secret, size, path, "expect: 100-continue"))
        assert connection.recv(1000).startswith(b"HTTP/1.1 100")
        connection.sendall(sent)
        yield connection


def head(secret: str, size: int, path: str = "/v1/completions", *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"authorization: Bearer {secret}", f"content-length: {size}"]
    return "\r\n".join([*lines, "content-type: application/json", *more, "", ""]).encode()


def complete(url: str, secret: str, size: int = 1) -> int:
    with plain_client(url, headers={"authorization": f"Bearer {secret}"}) as http:
        return http.post("/v1/completions", json={"model": MODEL, "prompt": size * "x"}).status_code


@pytest.mark.proof
def test_large_unfinished_bodies_of_one_key_leave_memory_and_others_their_answers(
    redis_url: str, tmp_path: Path, secrets: list[str], scripted: Scripted
) -> None:
    size, piece = 31 * MIB, bytes(MIB)
    scripted(lambda claim: ["one"])
    with reserved_port() as port:
        command = ("api", "--port", str(port), "--file-store", str(tmp_path))
        with running_pipeline(*command, redis_url=redis_url) as api, ExitStack() as stack:
            api.wait_for("listening")
            url = f"http://127.0.0.1:{port}"
            before = resident(api.process.pid)

            def send(connection: socket.socket) -> int | None:
                """Send all but the last byte; return the status of an early answer."""
                connection.sendall(head(secrets[0], size))
                try:
                    for _ in range(30):
                        connection.sendall(piece)
                    connection.sendall(piece[:-1])
                    connection.settimeout(0.1)
                    return answer_on(connection).status
                except TimeoutError:
                    return None
                except ConnectionError:
                    return 429

            connections = [stack.enter_context(connected(url)) for _ in range(60)]
            with ThreadPoolExecutor(8) as pool:
                statuses = list(pool.map(send, connections))
            taken = resident(api.process.pid) - before
            assert complete(url, secrets[1]) == 200
    refused = sum(status == 429 for status in statuses)
    print(f"{taken / MIB:.0f} MiB for {60 - refused} bodies under way, {refused} refused")
    assert 60 - refused == 4  # of half of 256 MiB
    assert taken < 200 * MIB


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_bodies_under_way_share_a_budget(
    redis_url: str, tmp_path: Path, secrets: list[str], scripted: Scripted
) -> None:
    scripted(lambda claim: ["one"])
    greedy, modest, third = secrets
    settings = ApiSettings(
        redis_url=redis_url, file_store=str(tmp_path), max_body_bytes=1000, body_memory_bytes=1, max_file_bytes=9 * MIB
    )
    with running_api(settings) as url, ExitStack() as stack:
        first = stack.enter_context(unfinished(url, greedy, 900))
        assert complete(url, greedy, 200) == 429
        assert error_of(begin(url, greedy, 900)) == (429, "rate_limit_exceeded")
        assert complete(url, modest) == 200
        stack.enter_context(unfinished(url, modest, 900))
        assert complete(url, modest, 200) == 429
        assert error_of(begin(url, third, 900)) == (503, "server_full")
        with plain_client(url, headers={"authorization": f"Bearer {third}"}) as http:  # its file goes to disk
            content = b'{"custom_id": "a"}\n' * 400_000
            stored = http.post("/v1/files", data={"purpose": "user_data"}, files={"file": ("a.jsonl", content)})
            assert (stored.status_code, stored.json()["bytes"]) == (200, len(content))
        first.close()
        wait_until(lambda: complete(url, greedy) == 200, 60, "the room of a body whose client left")


def begin(url: str, secret: str, size: int) -> Any:
    """The answer to a call whose body has begun."""
    with connected(url) as connection:
        connection.sendall(head(secret, size) + b"{")
        connection.settimeout(60)
        return answer_on(connection)


def test_a_key_has_half_of_the_calls_that_there_may_be(
    redis_url: str, tmp_path: Path, secrets: list[str], scripted: Scripted
) -> None:
    scripted(lambda claim: ["one"])
    settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path), max_connections=4)
    with running_api(settings) as url, unfinished(url, secrets[0], 9), unfinished(url, secrets[0], 9):
        assert complete(url, secrets[0]) == 429
        assert complete(url, secrets[1]) == 200


def test_an_address_has_half_of_the_connections_that_there_may_be(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "127.0.0.9")
    settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path), max_connections=4)
    with running_api(settings) as url, connected(url) as first, connected(url) as second:
        assert [get(one, "/v1/models").status for one in (first, second)] == [200, 200]
        with connected(url) as third:
            assert error_of(get(third)) == (503, "server_full")
        address = httpx.URL(url)
        for other in ("127.0.0.2", "127.0.0.9"):
            with socket.create_connection((address.host, address.port or 80), 60, (other, 0)) as connection:
                assert get(connection).status == 200
        first.close()
        wait_until(lambda: answers(url), 60, "a place to be free")


def answers(url: str) -> bool:
    with connected(url) as connection:
        return get(connection).status == 200


def test_addresses_of_a_network_are_counted_together() -> None:
    counts = AddressCounts(4, {"10.0.0.1"})
    for address in ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "10.0.0.1", "10.0.0.1", "10.0.0.1", "10.0.0.2"):
        counts.enter(address)
    assert not counts.are_many("2001:db8::3")
    counts.enter("2001:db8::3%eth0")
    assert counts.are_many("2001:db8::3")
    assert not counts.are_many("2001:db8:0:1::1")
    assert not counts.are_many("10.0.0.1")
    for _ in range(2):
        counts.enter("::ffff:10.0.0.2")
    assert counts.are_many("10.0.0.2")
    counts.leave("10.0.0.2")
    assert not counts.are_many("10.0.0.2")


def test_a_body_that_comes_in_drops_is_given_up(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "_LEAST_RATE", 1000)
    settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path), upload_silence_seconds=1.0)
    with running_api(settings) as url, unfinished(url, "", 1000) as connection:
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.05):
                connection.sendall(b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            answer = answer_on(connection)
        finally:
            ended.set()
            thread.join()
        assert error_of(answer) == (408, "upload_timeout")
        assert b"less than 1000 bytes a second" in answer.content  # type: ignore[attr-defined]
