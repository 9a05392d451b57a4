"""Files of stores such as S3, through pyarrow, or through fsspec for its schemes."""

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import unquote, urlsplit

from pipeline.errors import CommandEnd, Refused, Unfinished, one_line
from pipeline.uris.opened import OpenSource, SourceStamp
from pipeline.uris.uri import MAGIC, Uri

_SCHEMES_OF_FSSPEC = ("adl", "gdrive", "hf", "local", "memory", "oci", "oss", "s3a", "sftp", "smb", "ssh", "tos")
"""Schemes of stores; others, such as ftp, bypass the checks of http inputs, or lead elsewhere."""

OBJECT_STORES = ("s3", "gcs")
"""Stores without folders; an object appears when its stream is closed."""

_CHUNK = 16 << 20
"""Each chunk is a separate request."""


@contextlib.contextmanager
def open_stored(uri: Uri) -> Iterator[OpenSource]:
    """Open a file of a store. Raise `Refused` and `Unfinished`."""
    with failures(uri, "read"):
        filesystem, inside = filesystem_of(uri)
        stamp = _stamp(filesystem, inside, uri)
        with filesystem.open_input_stream(inside, compression=None) as file:
            yield OpenSource(stamp, _chunks(filesystem, inside, uri, file, stamp))


def stamp_of_stored(uri: Uri) -> SourceStamp | None:
    """Return the stamp of a file, or None without one. Raise `Refused` and `Unfinished`."""
    with failures(uri, "read"):
        filesystem, inside = filesystem_of(uri)
        info = filesystem.get_file_info(inside)
        return _stamp_of_file(info) if info.is_file else None


def stamp_of_files(infos: Iterable[Any]) -> SourceStamp:
    """Return one stamp for several files."""
    stamps = [(info.path, info.size, info.mtime_ns) for info in infos]
    return SourceStamp(None, hashlib.sha256(repr(stamps).encode()).hexdigest())


def files_of(uri: Uri) -> list[Uri]:
    """Return the files of a folder, or the matches of a pattern, in the order of their names.

    Hidden files are left out. Raise `Refused` and `Unfinished`.
    """
    folder, wanted = _split(uri)
    return [folder / name for name in sorted(_found_in(folder, wanted))]


def infos_below(uri: Uri) -> list[Any]:
    """Return pyarrow's information on all files below a folder, in the order of their paths.

    Hidden files are left out. Raise `Refused` and `Unfinished`.
    """
    return [info for _, info in sorted(_found_in(uri, ["**", "*"]).items())]


def _found_in(folder: Uri, wanted: list[str]) -> dict[str, Any]:
    """Return the matching files of a folder, by their paths in it."""
    from pyarrow.fs import FileSelector

    with failures(folder, "list"):
        filesystem, inside = filesystem_of(folder)
        try:
            found = filesystem.get_file_info(FileSelector(inside, recursive=len(wanted) > 1 or wanted == ["**"]))
        except FileNotFoundError:
            return {}
    below = {info.path.strip("/").removeprefix(inside.strip("/")).strip("/"): info for info in found if info.is_file}
    return {name: info for name, info in below.items() if _fits(name.split("/"), wanted)}


def filesystem_of(uri: Uri) -> tuple[Any, str]:
    """Return the file system of a URI and the path in it. Raise `Refused` and pyarrow's errors."""
    import pyarrow
    from pyarrow.fs import FileSystem

    if uri.scheme.startswith("fsspec+"):
        raise _unknown_scheme(uri)
    try:
        filesystem, inside = FileSystem.from_uri(uri.text)
        return filesystem, inside
    except pyarrow.ArrowInvalid as error:
        if "Unrecognized filesystem" in str(error):
            return _by_fsspec(uri)
        raise Refused(f"{uri} cannot be used: {without_secrets(error, uri)}") from None
    except (pyarrow.ArrowNotImplementedError, ImportError) as error:
        raise Refused(f"{uri} cannot be used: {without_secrets(error, uri)}") from None


@contextlib.contextmanager
def failures(uri: Uri, verb: str) -> Iterator[None]:
    """Convert errors of a store to `Refused` or `Unfinished`."""
    try:
        yield
    except CommandEnd:
        raise
    except OSError as error:
        raise _end(uri, verb, error) from None


def _stamp(filesystem: Any, inside: str, uri: Uri) -> SourceStamp:
    from pyarrow.fs import FileType

    info = filesystem.get_file_info(inside)
    if info.is_file:
        return _stamp_of_file(info)
    if info.type == FileType.Directory:
        raise Refused(f"the input {uri} is a folder: end it with / to read all of its files")
    bucket = inside.partition("/")[0]
    if bucket and filesystem.get_file_info(bucket).type == FileType.NotFound:
        raise Refused(f"there is no bucket {bucket}, of {uri}")
    raise Refused(f"there is no file {uri}")


def _stamp_of_file(info: Any) -> SourceStamp:
    return SourceStamp(info.size, str(info.mtime_ns or ""))


def _chunks(filesystem: Any, inside: str, uri: Uri, file: Any, stamp: SourceStamp) -> Iterator[bytes]:
    got = 0
    while chunk := file.read(_CHUNK):
        got += len(chunk)
        yield chunk
    if got != stamp.size or _stamp(filesystem, inside, uri) != stamp:
        raise Unfinished(f"{uri} changed while it was fetched: run the same command again")


def _split(uri: Uri) -> tuple[Uri, list[str]]:
    """Return the folder of a pattern, and the remaining parts of the pattern."""
    if not uri.is_pattern:
        return uri.without_slash(), ["*"]
    parts = urlsplit(uri.text).path.strip("/").split("/")
    plain = next(number for number, part in enumerate(parts) if MAGIC.search(part))
    return uri.with_path(unquote("/".join(parts[:plain]))), [_decoded_pattern(part) for part in parts[plain:]]


def _decoded_pattern(part: str) -> str:
    """Decode a part of a pattern; encoded pattern characters become literals."""
    return unquote(re.sub("%(5B|2A|3F)", lambda found: f"[{unquote(found[0])}]", part, flags=re.IGNORECASE))


def _fits(parts: list[str], wanted: list[str]) -> bool:
    if not wanted or not parts:
        return wanted == parts or (not parts and wanted == ["**"])
    hidden = parts[0].startswith((".", "_")) and not wanted[0].startswith(parts[0][0])
    if wanted[0] == "**":
        return _fits(parts, wanted[1:]) or (not hidden and _fits(parts[1:], wanted))
    return not hidden and fnmatchcase(parts[0], wanted[0]) and _fits(parts[1:], wanted[1:])


def _by_fsspec(uri: Uri) -> tuple[Any, str]:
    from pyarrow.fs import FileSystem

    if "::" in uri.text:
        raise Refused(f"{uri} is a chain of URIs: name the file itself")
    if uri.scheme not in _SCHEMES_OF_FSSPEC:
        raise _unknown_scheme(uri)
    try:
        filesystem, inside = FileSystem.from_uri(f"fsspec+{uri.text}")
    except ImportError as error:
        raise Refused(f"the scheme of {uri} needs a package: {without_secrets(error, uri)}") from None
    except ValueError as error:
        raise Refused(f"{uri} cannot be used: {without_secrets(error, uri)}") from None
    return filesystem, inside


def _unknown_scheme(uri: Uri) -> Refused:
    known = ", ".join(("s3", "gs", "abfs", "hdfs", "http", "https", "file", *_SCHEMES_OF_FSSPEC))
    return Refused(f"{uri} has an unknown scheme: known are {known}")


def _end(uri: Uri, verb: str, error: OSError) -> CommandEnd:
    """Return the `CommandEnd` for an error of a store."""
    text = str(error)
    if isinstance(error, FileNotFoundError):
        return Refused(f"there is no file {uri}")
    if "NO_SUCH_BUCKET" in text:
        return Refused(f"there is no bucket {uri.bucket}, of {uri}")
    if isinstance(error, PermissionError) or re.search("ACCESS_DENIED|ACCESS_KEY|SIGNATURE|status 40[13]", text):
        return Refused(f"no permission to {verb} {uri}: check the credentials and their permissions")
    if re.search("status 301|configured region|PermanentRedirect|AuthorizationHeaderMalformed", text):
        return Refused(f"the bucket of {uri} is in another region: set AWS_REGION, or add ?region=NAME to the URI")
    if re.search("NETWORK_CONNECTION|resolve host|[Cc]ould ?n.t connect", text):
        return Unfinished(f"there is no connection to the store of {uri}: check the network and the endpoint")
    return Unfinished(f"failed to {verb} {uri}: {without_secrets(error, uri)}")


def without_secrets(error: BaseException, uri: Uri) -> str:
    """Return the error's text as part of a sentence, with secrets removed from the URI."""
    return one_line(str(error).replace(uri.text, str(uri)))
