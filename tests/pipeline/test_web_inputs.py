"""Inputs from web servers: the limits, the addresses that they may come from, and kills."""

import gzip
import ipaddress
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import CommandEnd, Refused, Unfinished
from pipeline.uris.addresses import AllowedHosts, checked_addresses, parse_allowed
from pipeline.uris.fetching import fetch
from pipeline.uris.uri import Uri
from pipeline.uris.web import WebLimits, open_web
from tests.support.file_server import FileServer, answer_with, claim_size, file_server, redirect_to
from tests.support.killed_steps import killed_before_each_step

HERE = parse_allowed("127.0.0.1")
CONTENT = b'{"n": 1}\n' * 1000


@pytest.fixture
def web() -> Iterator[FileServer]:
    with file_server() as server:
        server.at["/a.jsonl"] = CONTENT
        yield server


def read(url: str, allowed: AllowedHosts = HERE, limits: WebLimits = WebLimits()) -> bytes:
    with open_web(Uri(url), allowed, limits) as source:
        return b"".join(source.chunks)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0x7f.1",
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "169.254.169.254",
        "168.63.129.16",
        "192.168.1.1",
        "224.0.0.1",
        "240.0.0.1",
        "::",
        "::1",
        "::10.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "2002:a00:1::1",
        "fe80::1",
        "fec0::1",
        "fd00::1",
        "ff0e::1",
    ],
)
def test_addresses_that_are_not_public_are_refused(host: str) -> None:
    with pytest.raises(Refused, match="is not on the public internet: to allow it, add --allow-hosts"):
        checked_addresses(host, 80, AllowedHosts())


@pytest.mark.parametrize("host", ["8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses_need_not_be_allowed(host: str) -> None:
    [found] = checked_addresses(host, 80, AllowedHosts())
    assert ipaddress.ip_address(found) == ipaddress.ip_address(host)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [("127.0.0.1", "127.0.0.0/8"), ("127.0.0.1", "10.0.0.1, 127.0.0.1"), ("localhost", "LocalHost."), ("::1", "::1")],
)
def test_hosts_and_networks_can_be_allowed(host: str, allowed: str) -> None:
    assert checked_addresses(host, 80, parse_allowed(allowed))


@pytest.mark.parametrize("text", ["10.0.0.0/40", "10.0.0.1/8", "::zz", "http://files.lan"])
def test_what_is_no_host_or_network_cannot_be_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="is neither a host nor a network"):
        parse_allowed(text)


def test_a_file_is_read_as_the_server_has_it(web: FileServer) -> None:
    assert read(web.url("/a.jsonl")) == CONTENT
    web.at["/a.jsonl.gz"] = gzip.compress(CONTENT)
    assert read(web.url("/a.jsonl.gz")) == web.at["/a.jsonl.gz"]


def test_an_answer_that_is_compressed_on_its_way_is_unpacked(web: FileServer) -> None:
    web.headers["content-encoding"] = "gzip"
    web.at["/a.jsonl"] = web.at["/a.jsonl.gz"] = gzip.compress(CONTENT)
    assert read(web.url("/a.jsonl")) == CONTENT
    assert read(web.url("/a.jsonl.gz")) == web.at["/a.jsonl.gz"]
    with pytest.raises(Refused, match="has more than the 5,000 bytes"):
        read(web.url("/a.jsonl"), limits=WebLimits(5000))
    web.headers["content-encoding"] = "zstd"
    with pytest.raises(Refused, match=r"a\.jsonl comes with the content-encoding zstd"):
        read(web.url("/a.jsonl"))
    web.headers["content-encoding"] = "gzip"
    web.at["/a.jsonl"] = b"not gzip"
    with pytest.raises(Refused, match=r"a\.jsonl cannot be read"):
        read(web.url("/a.jsonl"))


def test_a_file_that_is_too_large_is_refused_before_it_is_read(web: FileServer) -> None:
    def says_nothing(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(CONTENT)

    web.at |= {"/claims": claim_size(11 << 30), "/says-nothing": says_nothing}
    with pytest.raises(Refused, match=r"/claims has more than the 10,737,418,240 bytes of an http input"):
        read(web.url("/claims"))
    assert read(web.url("/says-nothing")) == CONTENT
    with pytest.raises(Refused, match=r"/says-nothing has more than the 5,000 bytes"):
        read(web.url("/says-nothing"), limits=WebLimits(5000))


def test_redirects_are_followed_and_checked(web: FileServer) -> None:
    web.at |= {
        "/once": redirect_to("/a.jsonl"),
        "/loop": redirect_to("/loop"),
        "/inside": redirect_to("http://169.254.169.254/latest/meta-data"),
        "/file": redirect_to("file:///etc/passwd"),
        "/nowhere": redirect_to("http://[::1"),
    }
    assert read(web.url("/once")) == CONTENT
    for path, reason in (
        ("/loop", "leads to more than 5 other URLs"),
        ("/inside", r"the host 169\.254\.169\.254 is not on the public internet"),
        ("/file", "leads to a URL that is neither http nor https"),
        ("/nowhere", "cannot be read"),
    ):
        with pytest.raises(Refused, match=reason):
            read(web.url(path))
    assert web.calls.count("/loop") == 6


def test_the_address_that_was_checked_is_the_one_that_is_used(web: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that stands for another address at every look-up."""
    look_up, asked, hosts = socket.getaddrinfo, [], []

    def rebinding(host: str, *others: Any, **named: Any) -> Any:
        if host != "files.test":
            return look_up(host, *others, **named)
        asked.append(host)
        return look_up("127.0.0.1" if len(asked) == 1 else "127.0.0.2", *others, **named)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        hosts.append(handler.headers["host"])
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(CONTENT)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    web.at["/host"] = answer
    url = f"http://files.test:{web.port}/host"
    assert read(url) == CONTENT
    assert (asked, hosts) == (["files.test"], [f"files.test:{web.port}"])
    with pytest.raises(Refused, match=r"the host files\.test at 127\.0\.0\.2 is not on the public internet"):
        read(url)
    assert len(hosts) == 1


def test_a_server_that_stops_halfway_ends_the_command(web: FileServer) -> None:
    def silent(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", str(len(CONTENT)))
        handler.end_headers()
        handler.wfile.write(CONTENT[:10])
        web.stopping.wait()

    def cut(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", str(len(CONTENT)))
        handler.end_headers()
        handler.wfile.write(CONTENT[:10])
        handler.close_connection = True

    web.at |= {"/silent": silent, "/cut": cut}
    begun: list[int | None] = []

    def read_silent() -> None:
        with open_web(Uri(web.url("/silent")), HERE, WebLimits(idle_seconds=5)) as source:
            begun.append(source.stamp.size)
            list(source.chunks)

    with pytest.raises(Unfinished, match=r"/silent made no progress for 5 s: run the same command again"):
        read_silent()
    assert begun == [len(CONTENT)]
    with pytest.raises(Unfinished, match=r"the connection to .*/cut was cut"):
        read(web.url("/cut"))


@pytest.mark.parametrize(
    ("status", "end", "reason"),
    [
        (403, Refused, "may not be read"),
        (404, Refused, "there is no file"),
        (410, Refused, "there is no file"),
        (418, Refused, "answers with status 418"),
        (429, Unfinished, "answers with status 429"),
        (503, Unfinished, "answers with status 503"),
    ],
)
def test_other_statuses_end_the_command(web: FileServer, status: int, end: type[CommandEnd], reason: str) -> None:
    web.at["/x"] = answer_with(status)
    with pytest.raises(end, match=reason):
        read(web.url("/x"))


def test_a_server_that_is_not_there_ends_the_command(web: FileServer) -> None:
    with pytest.raises(Unfinished, match=r"there is no connection to the server of http://127\.0\.0\.1:1/x"):
        read("http://127.0.0.1:1/x")
    with pytest.raises(Unfinished, match=r"the host no-such-host\.invalid cannot be found"):
        read("http://no-such-host.invalid/x")


def test_a_fetch_that_is_killed_leaves_nothing_or_the_whole_file(web: FileServer, tmp_path: Path) -> None:
    uri = Uri(web.url("/a.jsonl"))
    path = tmp_path / "run.parts" / "input" / "a.jsonl"
    for _ in killed_before_each_step(lambda: fetch(uri, path, HERE, has_begun=False)):
        assert not path.exists() or path.read_bytes() == CONTENT
    assert path.read_bytes() == CONTENT
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".a.jsonl.fetched", "a.jsonl"]


def test_what_was_fetched_is_kept_while_the_file_is_the_same(web: FileServer, tmp_path: Path) -> None:
    uri = Uri(web.url("/a.jsonl"))
    path = tmp_path / "run.parts" / "input" / "a.jsonl"
    web.headers["last-modified"] = "Thu, 26 Nov 2026 04:00:00 GMT"
    fetch(uri, path, HERE, has_begun=False)
    before = path.stat()
    fetch(uri, path, HERE, has_begun=True)
    assert path.stat() == before
    web.at["/a.jsonl"] = CONTENT * 2
    with pytest.raises(Refused, match=r"a\.jsonl has changed since .*run\.parts was begun"):
        fetch(uri, path, HERE, has_begun=True)
    assert path.stat() == before
    fetch(uri, path, HERE, has_begun=False)
    assert path.read_bytes() == CONTENT * 2
    web.at["/b.jsonl"] = web.at["/a.jsonl"]
    with pytest.raises(Refused, match=r"was begun with http://.*/a\.jsonl, not http://.*/b\.jsonl"):
        fetch(Uri(web.url("/b.jsonl")), path, HERE, has_begun=True)


def test_what_was_fetched_needs_no_server(web: FileServer, tmp_path: Path) -> None:
    uri = Uri(web.url("/a.jsonl"))
    path = tmp_path / "run.parts" / "input" / "a.jsonl"
    lines: list[str] = []
    fetch(uri, path, HERE, has_begun=False)
    web.at["/a.jsonl"] = answer_with(503)
    for has_begun in (False, True):
        fetch(uri, path, HERE, has_begun, lines.append)
    assert lines == [f"the server of {uri} answers with status 503; using the file that was fetched before"] * 2
    assert path.read_bytes() == CONTENT
    path.unlink()
    with pytest.raises(Unfinished, match="answers with status 503"):
        fetch(uri, path, HERE, has_begun=True)


def test_inputs_with_other_queries_are_other_inputs(web: FileServer, tmp_path: Path) -> None:
    path = tmp_path / "run.parts" / "input" / "a.jsonl"
    fetch(Uri(web.url("/a.jsonl?id=a&token=to-ken")), path, HERE, has_begun=False)
    assert all(b"to-ken" not in entry.read_bytes() for entry in path.parent.iterdir())
    with pytest.raises(Refused, match=r"was begun with another URI of .*/a\.jsonl, such as another query"):
        fetch(Uri(web.url("/a.jsonl?id=b&token=to-ken")), path, HERE, has_begun=True)
