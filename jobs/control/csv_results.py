"""The results of a batch as a CSV file."""

import json
from collections.abc import Iterable
from typing import Any

from jobs.batch.manifest import Manifest
from jobs.control.line_answer import LineAnswer
from jobs.control.line_results import LineWriter
from jobs.control.result_rows import RESULT_COLUMNS, kept_name, result_row

_QUOTED = frozenset('",\r\n')


def csv_writer(manifest: Manifest, location: str) -> LineWriter:
    """Return a writer of one row per line, after the names of the columns.

    An empty text is quoted, a null cell is not.
    """
    rows = manifest.spec.rows
    names = (*RESULT_COLUMNS, *map(kept_name, () if rows is None else rows.keep_columns))

    def row_of(answer: LineAnswer) -> bytes:
        row = result_row(manifest.batch_id, answer)
        return _csv_line(row.get(name) for name in names)

    return LineWriter(manifest, location, row_of, _csv_line(names))


def _csv_line(values: Iterable[Any]) -> bytes:
    return f"{','.join(map(_csv_cell, values))}\n".encode()


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if text and _QUOTED.isdisjoint(text):
        return text
    return '"' + text.replace('"', '""') + '"'
