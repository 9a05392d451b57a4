"""The TLS of a server: its certificate, those of its clients, and both again when files change."""

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
    """The context of a server, None without a certificate.

    Raises `SettingsError` for files that cannot be used.
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
    """Have new connections use a new context whenever the files change: one that exists would go on
    to trust authorities that were taken out.

    Files that do not fit, as between the writes of a key and its certificate, are left for the next
    look.
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
        # A password, which would be asked for on the terminal, is taken for wrong
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
    """Say what is wrong with a file; OpenSSL says it in words of its own."""
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key is not that of the certificate"
        return f"no PEM file, or one with a password ({error.reason or 'unknown'})"
    return error.strerror or str(error)


def _versions(settings: HttpSettings) -> list[tuple[int, int] | None]:
    """What changes with each file."""
    files = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
    return [_version(file) for file in files if file is not None]


def _version(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino
