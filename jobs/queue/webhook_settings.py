"""Checks of the settings for webhooks: URL and secret.

Secrets are as in Standard Webhooks (https://www.standardwebhooks.com): `whsec_` and base64.
"""

import base64
import binascii
from pathlib import Path
from urllib.parse import urlsplit

from jobs.errors import SettingsError

_PREFIX = "whsec_"
_SECRET_BYTES = range(24, 65)
_MOST_URL = 2048  # characters
_FORM = f"a webhook secret is {_PREFIX} and the base64 of 24 to 64 bytes, as of `openssl rand -base64 32`"


def check_webhook_url(url: str | None) -> None:
    """Raise ValueError if this is not an http:// or https:// URL.

    The text leaves out the URL, which may hold a password.
    """
    if url is None:
        return
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or len(url) > _MOST_URL or not url.isprintable() or " " in url:
        raise ValueError("a webhook URL is an http:// or https:// URL such as https://example.com/webhooks")


def check_webhook_secret(secret: str | None) -> None:
    """Raise ValueError for a malformed secret; the text leaves it out."""
    if secret is not None:
        secret_key(secret)


def secret_key(secret: str) -> bytes:
    """Return the key that a secret encodes. Raise ValueError."""
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(_PREFIX) or len(key) not in _SECRET_BYTES:
        raise ValueError(_FORM)
    return key


def read_secret_key(location: str) -> bytes:
    """Return the key that the secret in a file encodes. Raise `SettingsError`."""
    try:
        return secret_key(Path(location).read_text(encoding="utf-8").strip())
    except OSError as error:
        reason = str(error.strerror)
    except ValueError as error:
        reason = "it is not text" if isinstance(error, UnicodeDecodeError) else str(error)
    raise SettingsError(f"PIPELINE_WEBHOOK_SECRET_FILE: the secret in {location} cannot be used: {reason}")
