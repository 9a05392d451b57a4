"""The results of a batch as a CSV file."""

import json
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from jobs.batch.manifest import Manifest
from jobs.batch.result_files import ResultFile, open_output
from jobs.control.line_answer import LineAnswer
from jobs.control.result_rows import RESULT_COLUMNS, kept_name, result_row

_FLUSH_CHARACTERS = 1 << 18
_QUOTED = frozenset('",\r\n')


class CsvWriter:
    """One row per line, below the names of the columns. A cell of text that is empty is in quotes,
    one that is null has none.
    """

    def __init__(self, manifest: Manifest, location: str) -> None:
        rows = manifest.spec.rows
        kept = () if rows is None else rows.keep_columns
        self._batch_id = manifest.batch_id
        self._open = partial(open_output, manifest, location)
        self._names = (*RESULT_COLUMNS, *map(kept_name, kept))
        self._file: ResultFile | None = None
        self._lines = [_csv_line(self._names)]
        self._size = 0

    def add(self, answer: LineAnswer) -> None:
        row = result_row(self._batch_id, answer)
        line = _csv_line(row.get(name) for name in self._names)
        self._lines.append(line)
        self._size += len(line)
        if self._size >= _FLUSH_CHARACTERS:
            self._flush()

    def commit(self) -> None:
        self._flush().commit()

    def _flush(self) -> ResultFile:
        self._file = self._file or self._open()
        self._file.write("".join(self._lines).encode())
        self._lines, self._size = [], 0
        return self._file

    def __enter__(self) -> "CsvWriter":
        return self

    def __exit__(self, *error: object) -> Literal[False]:
        if self._file is not None:
            self._file.close()
        return False


def _csv_line(values: Iterable[Any]) -> str:
    return ",".join(map(_csv_cell, values)) + "\n"


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if text and _QUOTED.isdisjoint(text):
        return text
    return '"' + text.replace('"', '""') + '"'
