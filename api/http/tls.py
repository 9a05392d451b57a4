"""TLS of the server, loaded again when its files change."""

import asyncio
import logging
import os
import ssl
from collections.abc import Callable

from api.http_settings import HttpSettings
from jobs.errors import SettingsError

CHECK_SECONDS = 5.0

logger = logging.getLogger(__name__)


def server_context(settings: HttpSettings) -> ssl.SSLContext | None:
    """Return the TLS context of the server, None without a certificate.

    Raises `SettingsError` for unusable files.
    """
    if settings.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
    _load(context, settings)
    if settings.ssl_ciphers is not None:
        try:
            context.set_ciphers(settings.ssl_ciphers)
        except ssl.SSLError:
            raise SettingsError(
                f"--ssl-ciphers {settings.ssl_ciphers!r} names no cipher that OpenSSL has here"
            ) from None
    return context


async def refresh(settings: HttpSettings, use: Callable[[ssl.SSLContext | None], None]) -> None:
    """Use a new context for new connections whenever the files change.

    An old context would still trust authorities that were removed. Files that do not fit each
    other, as between the writes of a key and its certificate, are tried again at the next look.
    """
    loaded = _versions(settings)
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        found = _versions(settings)
        if found == loaded:
            continue
        try:
            use(server_context(settings))
        except SettingsError as error:
            logger.warning("TLS files changed and cannot be used yet: %s", error)
            continue
        loaded = found
        logger.info("TLS files changed; new connections get the new certificate")


def _load(context: ssl.SSLContext, settings: HttpSettings) -> None:
    assert settings.ssl_certfile is not None
    try:
        # An encrypted key fails with this password, instead of asking on the terminal
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")
    except OSError as error:
        key = settings.ssl_keyfile or settings.ssl_certfile
        raise SettingsError(
            f"the certificate {settings.ssl_certfile} with the key {key} cannot be used: {_reason(error)}"
        ) from None
    if settings.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(settings.ssl_ca_certs)
        except OSError as error:
            raise SettingsError(
                f"the authorities {settings.ssl_ca_certs} of --ssl-ca-certs cannot be used: {_reason(error)}"
            ) from None


def _reason(error: OSError) -> str:
    """Describe the problem with a file; OpenSSL's own words are unclear."""
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key is not that of the certificate"
        return f"no PEM file, or one with a password ({error.reason or 'unknown'})"
    return error.strerror or str(error)


def _versions(settings: HttpSettings) -> list[tuple[int, int] | None]:
    """Return values that change with each file."""
    files = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
    return [_version(file) for file in files if file is not None]


def _version(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino
