"""Clients of a server that speaks TLS alone; some are skipped where no Redis has it."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from jobs.queue.connection import check_server, connect, connect_async
from jobs.queue.request_queue import Queue
from jobs.server import find_server
from tests.support.ports import reserved_port
from tests.support.sentinels import running_process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key, and a certificate that signs itself."""
    folder = tmp_path_factory.mktemp("tls")
    new = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {folder}/key.pem -out {folder}/ca.pem -days 2"
    subprocess.run(
        [*new.split(), "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    files = ("--tls-cert-file", f"{folder}/ca.pem", "--tls-key-file", f"{folder}/key.pem", "--tls-auth-clients", "no")
    if b"SSL_CTX_new" not in find_server().read_bytes():
        pytest.skip("the server was built without TLS")
    with (
        reserved_port() as port,
        reserved_port() as plain,
        running_process(folder / "data", plain, "--tls-port", port, *files),
    ):
        yield f"rediss://127.0.0.1:{port}/0"


def test_every_kind_of_client(url: str, folder: Path) -> None:
    trusted = f"{url}?ssl_ca_certs={folder}/ca.pem"
    with connect(trusted) as client:
        check_server(client)
        queue = Queue(client)
        assert queue.now() > 0
        assert queue.control_messages("w1", "0-0", 0.01) == []

    async def ping() -> object:
        client = connect_async(trusted)
        try:
            return await client.ping()
        finally:
            await client.aclose()

    assert asyncio.run(ping())


def test_a_certificate_of_no_known_authority_is_refused(url: str) -> None:
    with connect(url) as client, pytest.raises(redis.ConnectionError, match="certificate verify failed"):
        client.ping()


@pytest.fixture
def tls_port(folder: Path) -> Iterator[int]:
    """The port of a server that ends whatever does not begin with TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.pem", folder / "key.pem")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):  # it is shut down
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_plain_client_of_a_port_with_tls_is_told_the_scheme(tls_port: int) -> None:
    url = f"redis://127.0.0.1:{tls_port}/0"
    with connect(url) as client, pytest.raises(redis.ConnectionError, match="if the port wants TLS, use rediss://"):
        check_server(client)

    async def ping() -> None:
        async with connect_async(url) as client:
            await client.ping()

    with pytest.raises(redis.ConnectionError, match="if the port wants TLS, use rediss://"):
        asyncio.run(ping())


def test_a_client_with_tls_of_a_plain_port_is_told_the_scheme(tmp_path: Path) -> None:
    with reserved_port() as port, running_process(tmp_path / "data", port):
        url = f"rediss://127.0.0.1:{port}/0?socket_connect_timeout=0.2&socket_timeout=0.2"
        with connect(url) as client, pytest.raises(redis.TimeoutError, match="if the port has no TLS, use redis://"):
            check_server(client)
