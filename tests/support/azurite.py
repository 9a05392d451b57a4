"""A container of Azurite, Microsoft's emulator of Azure Blob Storage, where one runs."""

import base64
import hashlib
import hmac
import http.client
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from urllib.parse import urlsplit

import pytest

VARIABLE = "PIPELINE_TEST_AZURE"
"""Holds the URL of the server."""

_ACCOUNT = "devstoreaccount1"  # which every Azurite has, with this key
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_VERSION = "2023-11-03"


@contextmanager
def container() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the name of an empty one, and what a client of it has in its environment."""
    url = os.environ.get(VARIABLE)
    if url is None:
        pytest.skip(f"{VARIABLE} names no Azurite")
    name = f"test-{secrets.token_hex(8)}"
    assert _call(url, "PUT", name) == 201
    environment = {
        "AZURE_STORAGE_ENDPOINT": f"{url}/{_ACCOUNT}",
        "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
    }
    try:
        yield name, environment
    finally:
        assert _call(url, "DELETE", name) == 202


def _call(url: str, method: str, name: str) -> int:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION}
    signed = method + "\n" * 12 + "".join(f"{header}:{value}\n" for header, value in headers.items())
    signed += f"/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(_KEY), signed.encode(), hashlib.sha256)).decode()
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    try:
        path = f"/{_ACCOUNT}/{name}?restype=container"
        connection.request(method, path, headers={**headers, "Authorization": f"SharedKey {_ACCOUNT}:{signature}"})
        return connection.getresponse().status
    finally:
        connection.close()
