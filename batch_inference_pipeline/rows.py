"""The rows of tables, and the lines of table files, as the lines of batches.

The program that reads tables for the server makes them: one process for each table.
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
    """How requests are made of rows; one of `prompt_column` and `template` is set."""

    prompt_column: str | None = None
    template: str | None = None
    id_column: str | None = None  # default: custom_id where there is one, else the row's number
    endpoint: str = CHAT
    body: dict[str, Any] = {}  # of every request, the prompt aside


def lines_of_table(path: Path, rows: Rows | None, name: str, most: int = 0) -> Generator[bytes]:
    """Yield the lines of a Parquet file, made by `rows`, else of its columns; 0: all of them.

    Raise ValueError, with a sentence about `name`, for a file that cannot be read so.
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
            reason = said.read().decode(errors="replace").strip() or f"its reader has ended with {code}"
            raise ValueError(reason.replace(str(path), name))
