"""URIs of files, and the parameter that takes a path or one of them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import click

from jobs.store.storage import local_path

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
MAGIC = re.compile(r"[*\[]")
"""Matches characters that make a path a pattern, if they are not encoded."""


@dataclass(frozen=True)
class Uri:
    """A file or folder in a store, or on a web server; shown without its secrets."""

    text: str

    def __str__(self) -> str:
        parts = urlsplit(self.text)
        if parts.scheme == "file":
            return self.path
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    @property
    def scheme(self) -> str:
        return urlsplit(self.text).scheme.lower()

    @property
    def is_http(self) -> bool:
        return self.scheme in ("http", "https")

    @property
    def bucket(self) -> str:
        return urlsplit(self.text).netloc.rpartition("@")[2]

    @property
    def path(self) -> str:
        """Return the decoded path after the bucket."""
        return unquote(urlsplit(self.text).path)

    @property
    def name(self) -> str:
        """Return the file's name on disk, "" for a folder."""
        name = unquote(urlsplit(self.text).path.rpartition("/")[2])
        return "" if name in (".", "..") else re.sub(r"[/\0]", "_", name)

    @property
    def file_name(self) -> str:
        """Return the name of the fetched file; a folder becomes one Parquet file."""
        if not self.is_folder:
            return self.name
        return f"{Uri(self.text.partition('?')[0].rstrip('/')).name or self.bucket}.parquet"

    @property
    def is_pattern(self) -> bool:
        return not self.is_http and MAGIC.search(urlsplit(self.text).path) is not None

    @property
    def is_folder(self) -> bool:
        return not self.is_http and self.path.endswith("/")

    def with_path(self, path: str) -> "Uri":
        """Return the URI of another file of the bucket."""
        return Uri(urlsplit(self.text)._replace(path=quote(f"/{path.lstrip('/')}")).geturl())

    def without_slash(self) -> "Uri":
        """Return the folder's URI without the slash at its end."""
        return self.with_path(self.path.rstrip("/"))

    def __truediv__(self, name: str) -> "Uri":
        return self.with_path(f"{self.path.rstrip('/')}/{name}")

    def is_same_as(self, other: object) -> bool:
        """Return whether the other names the same file."""
        return isinstance(other, Uri) and (self.scheme, self.bucket, self.path) == (
            other.scheme,
            other.bucket,
            other.path,
        )

    def contains(self, other: "Uri | Path") -> bool:
        """Return whether this is a folder that contains the other location."""
        if isinstance(other, Path):
            return self.is_folder and self.scheme == "file" and Path(self.path).resolve() in other.resolve().parents
        is_beside = (self.scheme, self.bucket) == (other.scheme, other.bucket)
        return self.is_folder and is_beside and other.path.startswith(self.path)


class PathOrUri(click.Path):
    """A `Path`, or a `Uri` if the value has a scheme."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, Uri) or not _SCHEME.match(str(value)):
            return value if isinstance(value, Uri) else super().convert(value, param, ctx)
        try:
            urlsplit(str(value))
        except ValueError as error:
            self.fail(f"it is not a URI: {error}", param, ctx)
        return Uri(str(value)) if local_path(str(value)) is None else local_path(str(value))
