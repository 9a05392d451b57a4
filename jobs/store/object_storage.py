"""Files that are objects of a bucket: S3 and compatible stores, Google's, Azure's.

An object appears as a whole or not at all, and is durable once its store has answered. Folders are
prefixes of names, and need not be created.
"""

import contextlib
import errno
import io
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from functools import lru_cache
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from jobs.store.block_cache import BLOCK_BYTES, BlockCache, CachedObject, ObjectReader

_BUFFER = 1 << 18
_PART_BYTES = 8 << 20  # of one write request
_PARTS_AT_ONCE = 2  # sent by one writer
_GATHERED_BYTES = 1 << 18  # buffered before the client is called
_COPY_BYTES = 5 << 30  # the largest object that S3 copies by itself
_REQUEST = timedelta(seconds=20)
_CONNECT = timedelta(seconds=5)
_TRIES = 3
_cache = BlockCache()

_KEPT = ".folder"  # an object that represents a folder that may be empty
_CODE = re.compile(r"<Code>(\w+)</Code>")
_UNSATISFIABLE = "status code: 416"
_METADATA = "//169.254.169.254/"  # where a cloud's machine requests credentials
_NO_ACCOUNT = "Account must be specified"
_STATUS = re.compile(r"status code: (\d+ [\w ]+)")


class _Cloud(NamedTuple):
    client: str
    """Its name in the client's errors."""
    credentials: str
    """Variables."""
    endpoints: tuple[str, ...]
    """Variables that select another server than the cloud's."""
    copies: bool = True
    """Whether a copy is complete once the store answers."""
    pause: timedelta = timedelta(milliseconds=100)
    """Pause before a throttled call is retried."""


_CLOUDS = {
    "s3": _Cloud("S3", "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY", ("AWS_ENDPOINT_URL",)),
    "gs": _Cloud(
        "GCS",
        "GOOGLE_APPLICATION_CREDENTIALS",
        ("GOOGLE_BASE_URL",),
        pause=timedelta(seconds=1),  # the limit is one write per second to one name
    ),
    "az": _Cloud(
        "MicrosoftAzure",
        "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY",
        ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
        copies=False,  # the store may answer before the copy is complete, and the client does not report that
    ),
}


class ObjectStorage:
    """The `Storage` of names in one bucket."""

    def __init__(self, client: Any, name: str, copies: bool) -> None:
        self._client = client
        self._name = name
        self._copies = copies

    def open(self, path: str, buffered: bool = True, unchanging: bool = False) -> BinaryIO:
        if unchanging and (file := _cache.file(f"{self._name}/{path}", _BUFFER if buffered else 0)) is not None:
            return file
        reader = self.open_at(path, unchanging)
        return cast(BinaryIO, io.BufferedReader(reader, _BUFFER if unchanging else BLOCK_BYTES) if buffered else reader)

    def open_at(self, path: str, unchanging: bool = False) -> ObjectReader:
        """Return a reader of one version of an object, also if the object may change."""
        if unchanging:
            return _cache.reader(f"{self._name}/{path}", lambda start, end: self._range(path, start, end)[:2])
        begin, size, tag = self._range(path, 0, BLOCK_BYTES)

        def read_at(offset: int, length: int) -> bytes:
            end = min(offset + length, size)
            if end <= len(begin):
                return begin[offset:end]
            return self._range(path, offset, end, tag)[0] if offset < end else b""

        return ObjectReader(size, read_at)

    def read(self, path: str) -> bytes:
        return self.read_version(path)[0]

    def read_version(self, path: str) -> tuple[bytes, str]:
        """Return an object, and the tag of this version."""
        import obstore

        with _failures():
            found = obstore.get(self._client, path)
            return bytes(found.bytes()), _version(found.meta)

    def stamp(self, path: str) -> tuple[int, int] | None:
        import obstore

        with contextlib.suppress(FileNotFoundError), _failures():
            return _stamp(obstore.head(self._client, path))
        return None

    def exists(self, path: str) -> bool:
        return self.stamp(path) is not None or bool(self._names_below(path, 1))

    def names(self, folder: str) -> list[str]:
        found = self._listed(folder)
        return [_last(name) for name in (*found["common_prefixes"], *(one["path"] for one in found["objects"]))]

    def stamps(self, folder: str) -> dict[str, tuple[int, int]]:
        return {_last(one["path"]): _stamp(one) for one in self._listed(folder)["objects"]}

    def folder_stamp(self, folder: str) -> tuple[int, int] | None:
        found = sorted((one["path"], one["e_tag"] or "") for one in self._listed(folder)["objects"])
        return (hash(tuple(found)), 0) if found else None

    def make_folder(self, path: str) -> None:
        """Do nothing."""

    add_folder = begin_folder = sync_folder = make_folder

    def keep_folder(self, path: str) -> None:
        self.touch(f"{path}/{_KEPT}")

    def touch(self, path: str) -> None:
        self.put(path, b"")

    def put(self, path: str, data: bytes) -> None:
        import obstore

        with _failures():
            obstore.put(self._client, path, data, use_multipart=False)

    def put_new(self, path: str, data: bytes) -> str | None:
        return self._put_if(path, data, "create")

    def replace_version(self, path: str, data: bytes, version: str) -> str | None:
        tag, _, generation = version.partition(" ")
        return self._put_if(path, data, {"e_tag": tag, **({"version": generation} if generation else {})})

    def writer(self, path: str, scratch: str | None = None, unchanging: bool = False) -> "ObjectWriter":
        return ObjectWriter(self._client, path, f"{self._name}/{path}" if unchanging else None)

    def unnamed_writer(self, temporary: str) -> "ObjectWriter":
        return ObjectWriter(self._client, temporary)

    def link(self, source: str, path: str) -> bool:
        import obstore

        with _failures():
            if obstore.head(self._client, source)["size"] > _COPY_BYTES or not self._copies:
                return False
            obstore.copy(self._client, source, path)
            return True

    def delete(self, path: str) -> None:
        import obstore

        with contextlib.suppress(FileNotFoundError), _failures():
            obstore.delete(self._client, path)

    def clear_folder(self, path: str, first: str, durably: bool) -> None:
        self.delete(f"{path}/{first}")
        self._delete_below(path)

    def remove_tree(self, path: str) -> None:
        self._delete_below(path)

    def _put_if(self, path: str, data: bytes, mode: Any) -> str | None:
        """Put an object conditionally.

        If the put is refused, an earlier attempt may have succeeded and its answer been lost, so
        the stored content is compared.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        with _failures():
            try:
                return _version(obstore.put(self._client, path, data, mode=mode))
            except FileNotFoundError:
                if mode == "create":
                    raise  # the bucket does not exist
                return None
            except (AlreadyExistsError, PreconditionError):
                return self._version_with(path, data)
            except BaseError:  # an earlier attempt may have succeeded
                with contextlib.suppress(OSError):
                    if version := self._version_with(path, data):
                        return version
                raise

    def _version_with(self, path: str, data: bytes) -> str | None:
        found, version = b"", ""
        with contextlib.suppress(FileNotFoundError):
            found, version = self.read_version(path)
        return version if found == data else None

    def _range(self, path: str, start: int, end: int, tag: str | None = None) -> tuple[bytes, int, str | None]:
        """Return bytes (of the version with `tag`, if given), and size and tag of the object."""
        import obstore
        from obstore.exceptions import BaseError

        options: Any = {"range": (start, end), **({} if tag is None else {"if_match": tag})}
        with _failures():
            try:
                found = obstore.get(self._client, path, options=options)
                return bytes(found.bytes()), found.meta["size"], found.meta["e_tag"]
            except BaseError as error:
                if start or _UNSATISFIABLE not in str(error):
                    raise
                meta = obstore.head(self._client, path)  # the object is empty
                return b"", meta["size"], meta["e_tag"]

    def _listed(self, folder: str) -> Any:
        import obstore

        with _failures():
            return obstore.list_with_delimiter(self._client, folder)

    def _names_below(self, folder: str, most: int) -> list[str]:
        import obstore

        with _failures():
            return [one["path"] for one in next(iter(obstore.list(self._client, folder, chunk_size=most)), [])]

    def _delete_below(self, folder: str) -> None:
        import obstore

        with _failures():
            for some in obstore.list(self._client, folder, chunk_size=1000):
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._client, [one["path"] for one in some])


class ObjectWriter:
    """An object that appears with `commit`, under the name given at the start.

    Without a commit, nothing visible remains.
    """

    def __init__(self, client: Any, path: str, cached_as: str | None = None) -> None:
        import obstore

        self.file = self
        self._cached_as = cached_as
        self._cached = None if cached_as is None else CachedObject()
        self._path = path
        self._gathered: list[bytes] = []
        self._size = 0
        self._sent: Any = obstore.open_writer(client, path, buffer_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

    def write(self, data: bytes) -> int:
        self._gathered.append(bytes(data))
        self._size += len(data)
        if self._size >= _GATHERED_BYTES:
            self._send()
        return len(data)

    def sync(self) -> None:
        """Do nothing."""

    def commit(self, path: str) -> None:
        assert path == self._path, "an object cannot be renamed"
        self._send()
        with _failures():
            self._sent.close()
        self._sent = None
        if self._cached is not None and self._cached_as is not None:
            self._cached.end()
            _cache.add(self._cached_as, self._cached)

    def close(self) -> None:
        """Abort an unfinished upload: its parts cost as much as an object."""
        sent, self._sent = self._sent, None
        if sent is not None:
            with contextlib.suppress(OSError), _failures():
                sent.__exit__(OSError, OSError(), None)

    def _send(self) -> None:
        data = b"".join(self._gathered)
        with _failures():
            self._sent.write(data)
        if self._cached is not None and not self._cached.write(data):
            self._cached = None
        self._gathered, self._size = [], 0


def open_bucket(location: str) -> tuple[ObjectStorage, str]:
    """Return the bucket of a URI, and the name in it. Raise OSError for an invalid URI."""
    parts = urlsplit(location)
    if parts.scheme not in _CLOUDS or not parts.netloc:
        raise OSError(errno.EINVAL, "its URI must begin with s3://, gs:// or az:// and the name of a bucket")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise OSError(errno.EINVAL, "its URI may have a bucket and a prefix alone: the rest is set in the environment")
    endpoint = next(filter(None, map(os.environ.get, _CLOUDS[parts.scheme].endpoints)), "")
    return _bucket(parts.scheme, parts.netloc, endpoint), unquote(parts.path).strip("/")


@lru_cache
def _bucket(scheme: str, name: str, endpoint: str) -> ObjectStorage:
    from obstore.store import from_url

    client: Any = {"timeout": _REQUEST, "connect_timeout": _CONNECT, "allow_http": endpoint.startswith("http://")}
    cloud = _CLOUDS[scheme]
    retries: Any = {"max_retries": _TRIES - 1, "retry_timeout": _REQUEST, "backoff": {"init_backoff": cloud.pause}}
    with _failures():
        store = from_url(f"{scheme}://{name}", client_options=client, retry_config=retries)
    return ObjectStorage(store, f"{endpoint} {scheme}://{name}", cloud.copies)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Turn errors of the client into OSErrors with a short text about the store's answer."""
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, _answer(error)) from None
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, _answer(error)) from None
    except BaseError as error:
        raise OSError(errno.EIO, _answer(error)) from None
    except OSError as error:
        if error.errno is None:  # raised by the client's writers
            raise OSError(errno.EIO, _answer(error)) from None
        raise


def _stamp(meta: Any) -> tuple[int, int]:
    """Return the stamp in whole seconds: a listing may be more precise than an object's header."""
    return meta["size"], int(meta["last_modified"].timestamp()) * 1_000_000_000


def _version(meta: Any) -> str:
    """Return the version: Google's conditions use generations, the others' use tags."""
    return f"{meta['e_tag'] or ''} {meta['version'] or ''}".rstrip()


def _answer(error: Exception) -> str:
    text = str(error)
    names = [cloud.credentials for cloud in _CLOUDS.values() if f"Generic {cloud.client} error" in text]
    if names and (_METADATA in text or _NO_ACCOUNT in text):
        return f"there are no credentials: set the store's ({names[0]}), or use a role"
    for kind in (_CODE, _STATUS):
        if found := kind.search(text):
            return found[1]
    if "kind: Timeout" in text:
        return "it did not answer in time"
    if "kind: Connect" in text:
        return "it cannot be reached"
    if "error sending request" in text:
        return "it cannot be reached, or did not answer in time"
    return text.partition("\n")[0]


def _last(path: str) -> str:
    return path.rpartition("/")[2]
