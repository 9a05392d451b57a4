"""Inputs from web servers, with limits and checked addresses."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import httpx2

from jobs.batch.input_files import compression_of
from pipeline.errors import Refused, Unfinished, one_line
from pipeline.uris.addresses import AllowedHosts, checked_addresses
from pipeline.uris.opened import OpenSource, SourceStamp
from pipeline.uris.uri import Uri

_MOST_REDIRECTS = 5
_CHUNK = 1 << 20
_PORTS = {"http": 80, "https": 443}
_ENCODINGS = ("identity", "gzip", "deflate")
"""Encodings that expand a byte to a thousand bytes at most."""

_GONE = (404, 410)
_NO_RIGHTS = (401, 403, 407)


class WebLimits(NamedTuple):
    """The limits of size and idle time for an input from a web server."""

    most_bytes: int = 10 << 30
    idle_seconds: float = 60.0


@contextlib.contextmanager
def open_web(uri: Uri, allowed: AllowedHosts, limits: WebLimits = WebLimits()) -> Iterator[OpenSource]:
    """Open a file of a web server. Raise `Refused` and `Unfinished`."""
    # No proxy, since it would look up the name again; no compression, since it changes the size
    with (
        _failures(uri, limits),
        httpx2.Client(trust_env=False, timeout=limits.idle_seconds, headers={"accept-encoding": "identity"}) as client,
        contextlib.closing(_answer(client, uri, allowed)) as answer,
    ):
        length = answer.headers.get("content-length", "")
        size = int(length) if length.isdecimal() else None
        if size is not None and size > limits.most_bytes:
            raise _too_large(uri, limits)
        stamp = SourceStamp(size, answer.headers.get("etag") or answer.headers.get("last-modified") or "")
        yield OpenSource(stamp, _chunks(answer, uri, limits))


def _answer(client: httpx2.Client, uri: Uri, allowed: AllowedHosts) -> httpx2.Response:
    """Return the answer after redirects; each address is checked like the first."""
    url = httpx2.URL(uri.text)
    for _ in range(1 + _MOST_REDIRECTS):
        if url.scheme not in _PORTS or not url.host:
            raise Refused(f"{uri} leads to a URL that is neither http nor https")
        answer = _send(client, url, allowed)
        if not answer.has_redirect_location:
            return _checked(answer, uri)
        answer.close()
        url = url.join(answer.headers["location"])
    raise Refused(f"{uri} leads to more than {_MOST_REDIRECTS} other URLs, one after the other")


def _send(client: httpx2.Client, url: httpx2.URL, allowed: AllowedHosts) -> httpx2.Response:
    """Send the request to a checked address, without another lookup of the name."""
    host = url.raw_host.decode()
    addresses = checked_addresses(host, url.port or _PORTS[url.scheme], allowed)
    for address in addresses:
        request = client.build_request(
            "GET",
            url.copy_with(host=address),
            headers={"host": url.netloc.decode()},
            extensions={"sni_hostname": host},
        )
        try:
            return client.send(request, stream=True)
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            if address == addresses[-1]:
                raise
    raise Unfinished(f"the host {host} has no address")


def _checked(answer: httpx2.Response, uri: Uri) -> httpx2.Response:
    status = answer.status_code
    if status == httpx2.codes.OK:
        return answer
    answer.close()
    if status in _GONE:
        raise Refused(f"there is no file {uri} (status {status})")
    if status in _NO_RIGHTS:
        raise Refused(f"{uri} may not be read (status {status})")
    end = Unfinished if status >= 500 or status == httpx2.codes.TOO_MANY_REQUESTS else Refused
    raise end(f"the server of {uri} answers with status {status}")


def _chunks(answer: httpx2.Response, uri: Uri, limits: WebLimits) -> Iterator[bytes]:
    # A file with the suffix of a compressed file stays compressed
    is_kept = compression_of(uri.name) is not None
    encoding = answer.headers.get("content-encoding", "identity")
    if not is_kept and encoding not in _ENCODINGS:
        raise Refused(f"{uri} comes with the content-encoding {encoding}, which is not supported")
    chunks = answer.iter_raw(_CHUNK) if is_kept else answer.iter_bytes(_CHUNK)
    got = 0
    for chunk in chunks:
        got += len(chunk)
        if got > limits.most_bytes:
            raise _too_large(uri, limits)
        yield chunk


def _too_large(uri: Uri, limits: WebLimits) -> Refused:
    return Refused(f"{uri} has more than the {limits.most_bytes:,} bytes of an http input: save it to a file first")


@contextlib.contextmanager
def _failures(uri: Uri, limits: WebLimits) -> Iterator[None]:
    try:
        yield
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.DecodingError) as error:
        raise Refused(f"{uri} cannot be read: {one_line(error)}") from None
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise Unfinished(f"there is no connection to the server of {uri}: {one_line(error)}") from None
    except httpx2.TimeoutException:
        raise Unfinished(f"{uri} made no progress for {limits.idle_seconds:g} s: run the same command again") from None
    except httpx2.HTTPError as error:
        raise Unfinished(f"the connection to {uri} was cut: {one_line(error)}: run the same command again") from None
