"""Tables of pandas, polars, pyarrow and Hugging Face `datasets` as requests, and answers as a
column of the table.

Tables are read through the Arrow interface, so these libraries are not imported here.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from batch_inference_pipeline.results import RequestResult
from batch_inference_pipeline.rows import Rows, lines_of_table

_LONGEST_SHOWN = 60


def requests_of(requests: Any, rows: Rows | None) -> Iterable[Any]:
    """Return the requests unchanged, or lines made from the rows of a frame.

    Raise TypeError for a single request, and ValueError for a frame without `rows` or `rows`
    without a frame.
    """
    if isinstance(requests, str | bytes | Mapping | Path):
        raise TypeError(
            f"{_shown(requests)} is not a list of requests: use [request] for one request; `submit` takes a file's path"
        )
    if not is_frame(requests):
        if rows is not None:
            raise ValueError("'rows' needs a frame, and the requests are not a frame: leave 'rows' out")
        return requests  # type: ignore[no-any-return]
    if rows is None:
        raise ValueError("a frame needs 'rows': rows=Rows(prompt_column=…) or rows=Rows(template=…)")
    return _lines(requests, rows)


def is_frame(value: Any) -> bool:
    """Return whether the value is a table; a single column is a list of texts instead."""
    if isinstance(value, dict | list | tuple):
        return False
    return hasattr(value, "columns") or hasattr(value, "column_names")


def with_answers(frame: Any, column: str, results: list[RequestResult], return_errors: Any) -> Any:
    """Return a frame of the same library with a column of answers."""
    frame = _add(frame, column, [None if result.error is not None else result.value for result in results])
    if return_errors:
        reasons = [None if result.error is None else result.problem[1] for result in results]
        frame = _add(frame, f"{column}_error", reasons)
    return frame


def _lines(frame: Any, rows: Rows) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    with TemporaryDirectory() as folder:
        path = Path(folder) / "frame.parquet"
        try:
            pyarrow.parquet.write_table(_as_arrow(frame), path)
        except pyarrow.ArrowException as error:
            raise ValueError(f"the frame cannot be written as Parquet: {error}") from None
        with closing(lines_of_table(path, rows, "the frame")) as lines:
            for line in lines:
                yield msgspec.json.decode(line)


def _as_arrow(frame: Any) -> Any:
    import pyarrow

    if _library(frame) == "datasets":
        return frame.with_format("arrow")[:]
    return frame if isinstance(frame, pyarrow.Table) else pyarrow.table(frame)


def _add(frame: Any, name: str, values: list[Any]) -> Any:
    library = _library(frame)
    if library == "pandas":
        return frame.assign(**{name: values})
    if library == "datasets":
        return frame.add_column(name, values)
    if library == "polars":
        return frame.with_columns(type(frame)({name: values}).to_series())
    import pyarrow

    return frame.append_column(name, pyarrow.array(values))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _library(frame: Any) -> str:
    return type(frame).__module__.partition(".")[0]
