"""Check that a bucket supports the operations of a file store, before it is used."""

import contextlib
import errno
import secrets
from urllib.parse import urlsplit

from jobs.store.storage import StoreError, delete, is_local, is_missing, join, read_bytes, replace_version, write_new


def check_bucket(location: str) -> None:
    """Write, replace, read and remove an object; do nothing for a local folder.

    Raise `StoreError` with a sentence on how to fix it.
    """
    if is_local(location):
        return
    try:
        has_conditions = _try_conditions(join(location, f".check-{secrets.token_hex(8)}"))
    except StoreError as error:
        raise StoreError(_sentence(location, error)) from error
    if not has_conditions:
        raise StoreError(
            f"{_name(location)} has no conditional puts (If-None-Match and If-Match), so processes would overwrite"
            " each other's work: use a store that has them, such as S3, Google Cloud Storage or Azure Blob Storage"
        )


def _try_conditions(name: str) -> bool:
    try:
        version = write_new(name, b"new")
        if version is None or write_new(name, b"new again") is not None:
            return False
        is_replaced = replace_version(name, b"replaced", version) is not None
        return is_replaced and replace_version(name, b"late", version) is None and read_bytes(name) == b"replaced"
    finally:
        with contextlib.suppress(StoreError):
            delete(name)


def _sentence(location: str, error: StoreError) -> str:
    reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else str(error)
    if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EINVAL:
        return str(error)  # about the URI
    if is_missing(error):
        return f"there is no {_name(location)}: make it, or name another"
    if isinstance(error.__cause__, PermissionError):
        return (
            f"{_name(location)} cannot be used ({reason}): allow these credentials to list it, and to get, put and"
            " delete its objects"
        )
    return f"{_name(location)} cannot be used: {reason}"


def _name(location: str) -> str:
    return f"bucket {urlsplit(location).netloc}"
