"""Conversion of tables to batch lines.

Each table is read by a process of its own, which runs the server's table reader.
"""

import subprocess
from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import msgspec

from batch_inference_pipeline.command import python_command
from batch_inference_pipeline.vocabulary import CHAT

_READER = "jobs.batch.table_lines"
_PARQUET = ".parquet"
_NO_LIMIT = "0"


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """The options for requests made from rows; either `prompt_column` or `template` is set."""

    prompt_column: str | None = None
    template: str | None = None
    id_column: str | None = None  # default: the column custom_id if it exists, else the row's number
    endpoint: str = CHAT
    body: dict[str, Any] = {}  # of every request, without the prompt


def lines_of_table(path: Path, rows: Rows | None, name: str, most: int = 0) -> Generator[bytes]:
    """Yield at most `most` lines (0: all) of a Parquet file, made by `rows` or from its columns.

    Raise ValueError, with a sentence about `name`, if the file cannot be read that way.
    """
    with TemporaryFile() as asked, TemporaryFile() as said:
        asked.write(msgspec.json.encode(rows))
        asked.seek(0)
        reader = subprocess.Popen(
            python_command(_READER, str(path), _PARQUET, str(most), _NO_LIMIT, _NO_LIMIT),
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=said,
        )
        try:
            assert reader.stdout is not None
            with reader.stdout:
                yield from reader.stdout
            code = reader.wait()
        finally:
            reader.kill()
            reader.wait()
        if code:
            said.seek(0)
            reason = said.read().decode(errors="replace").strip() or f"the table reader ended with exit code {code}"
            raise ValueError(reason.replace(str(path), name))
