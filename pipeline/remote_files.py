"""Upload and download of a server's files."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.store.storage import AtomicWriter
from pipeline.errors import Refused

if TYPE_CHECKING:
    import openai

_CHUNK = 1 << 18


def upload(client: "openai.OpenAI", path: Path, purpose: str = "batch", expires_after: int | None = None) -> Any:
    """Upload a local file as a stream, and return the file object.

    Raises `Refused` if the file cannot be read.
    """
    options: dict[str, Any] = {}
    if expires_after is not None:
        options["expires_after"] = {"anchor": "created_at", "seconds": expires_after}
    if not path.is_file():
        reason = (
            f"{path} is a folder"
            if path.is_dir()
            else f"{path} is no regular file"
            if path.exists()
            else f"there is no file {path}"
        )
        raise Refused(reason)
    with path.open("rb") as file:
        return client.files.create(file=(path.name, file), purpose=purpose, **options)  # type: ignore[arg-type]


def download(client: "openai.OpenAI", file_id: str, output: Path | None) -> bool:
    """Write a file's content to `output`, or to stdout; return whether it was the whole file.

    `output` appears when all of it is on disk.
    """
    with client.files.with_streaming_response.content(file_id) as answer, _target(output) as write:
        for chunk in answer.iter_bytes(_CHUNK):
            write(chunk)
        return str(answer.headers.get("x-incomplete")).lower() != "true"


@contextlib.contextmanager
def _target(output: Path | None) -> Iterator[Any]:
    if output is None:
        yield sys.stdout.buffer.write
        sys.stdout.buffer.flush()
        return
    with AtomicWriter(str(output)) as writer:
        yield writer.write
        writer.commit()
