"""Buckets for tests: on moto's server, as Google's protocol has them, and on Azurite."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

from jobs.store import storage
from jobs.store.storage import join, list_names, size_of
from tests.support.azurite import container
from tests.support.google_server import google_server
from tests.support.s3_server import S3Server, s3_server

_NAME = "store"


@dataclass(frozen=True)
class Bucket:
    """A bucket that the environment of this process leads to."""

    server: S3Server
    scheme: str = "s3"

    @property
    def uri(self) -> str:
        return f"{self.scheme}://{_NAME}"

    def keys(self) -> list[str]:
        """The names of all objects."""
        return self.server.keys(_NAME)


@contextmanager
def bucket(scheme: str = "s3") -> Iterator[Bucket]:
    """An empty one of `s3` or `gs`."""
    with google_server() if scheme == "gs" else s3_server() as server, _led(server.environment):
        server.put(_NAME)
        yield Bucket(server, scheme)


@contextmanager
def cloud(scheme: str) -> Iterator[str]:
    """The URI of an empty bucket of `s3`, `gs` or `az`."""
    if scheme == "az":
        with container() as (name, environment), _led(environment):
            yield f"az://{name}"
    else:
        with bucket(scheme) as remote:
            yield remote.uri


@contextmanager
def environment_of(port: int) -> Iterator[None]:
    """Lead this process, and those that it starts, to an S3 server on this machine."""
    with _led(S3Server(port).environment):
        yield


@contextmanager
def _led(environment: Mapping[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "ObjectPath", BucketPath)
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


class BucketPath(storage.ObjectPath):
    """The path of an object, with what tests do with a `Path`."""

    def exists(self) -> bool:
        return storage.exists(str(self))

    def is_dir(self) -> bool:
        return self.exists() and storage.size_of(str(self)) is None

    def is_file(self) -> bool:
        return storage.size_of(str(self)) is not None

    def read_bytes(self) -> bytes:
        return storage.read_bytes(str(self))

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def write_bytes(self, data: bytes) -> int:
        storage.write_bytes(str(self), data)
        return len(data)

    def write_text(self, text: str) -> int:
        return self.write_bytes(text.encode())

    def unlink(self, missing_ok: bool = False) -> None:
        storage.delete(str(self))

    def mkdir(self, **_: bool) -> None:
        """Do nothing: a folder is there with what is in it."""

    def iterdir(self) -> "Iterator[BucketPath]":
        return (self / name for name in storage.list_names(str(self)))

    def glob(self, pattern: str) -> "Iterator[BucketPath]":
        return (path for path in self._below() if fnmatch(str(path.relative_to(self)), pattern))

    def _below(self) -> "Iterator[BucketPath]":
        for path in self.iterdir():
            yield path
            if path.is_dir():
                yield from path._below()


PLACES = ("folder", "bucket")
"""Where a file store may be."""

LOCAL = pytest.mark.parametrize("location", ["folder"], indirect=True)
"""For a test of what folders alone have: links, locks, full disks, files that are cut short."""

BUCKET_IN_PROOF = pytest.mark.parametrize(
    "location", ["folder", pytest.param("bucket", marks=pytest.mark.proof)], indirect=True
)
"""For a test that takes long in a bucket, since it has many steps."""

CLOUDS = ("gs", "az")
"""Other buckets than S3's, for the tests of what a file store needs of one."""


@contextmanager
def store_location(place: str, folder: Path) -> Iterator[str]:
    """A file store that is not there yet: in a folder of the test, or in an empty bucket."""
    if place == "folder":
        yield str(folder / "store")
        return
    with cloud("s3" if place == "bucket" else place) as uri:
        yield f"{uri}/of/tests"


def files_below(location: str) -> list[str]:
    """The names of all files of a store, in order."""
    found = [f"{name}" for name in list_names(location)]
    below = {name: files_below(join(location, name)) for name in found if size_of(join(location, name)) is None}
    return sorted(
        path for name in found for path in ([f"{name}/{one}" for one in below[name]] if name in below else [name])
    )
