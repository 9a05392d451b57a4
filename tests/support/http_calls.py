"""HTTP calls with a time limit that a busy machine keeps; httpx's own is 5 seconds."""

from typing import Any

import httpx

SECONDS = 60.0


def get(url: str, **options: Any) -> httpx.Response:
    """`httpx.get`."""
    return httpx.get(url, timeout=SECONDS, **options)


def post(url: str, **options: Any) -> httpx.Response:
    """`httpx.post`."""
    return httpx.post(url, timeout=SECONDS, **options)
