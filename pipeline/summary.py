"""The printed summary of an ended batch, and the exit code."""

import csv
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.batch.input_files import is_csv, is_parquet, open_text
from jobs.protocol.unknown_members import described
from jobs.store.storage import local_path
from pipeline.errors import LinesFailed, Refused
from pipeline.progress import Counts, duration
from pipeline.stderr import write_line

if TYPE_CHECKING:
    from jobs.batch.client import BatchRecord
    from jobs.batch.manifest import Manifest
    from pipeline.uris.uri import Uri

_ANSWERS = 3
_LONGEST_ANSWER = 100
_LONGEST_CELL = (1 << 31) - 1
_NUMBER_COLUMNS = ("embedding", "score")
_VALUES = (*_NUMBER_COLUMNS, "relevance_score", "label", "probs", "data")
"""Members of an answer's items that may hold its value."""


def counts_of(record: "BatchRecord", note: str = "") -> Counts:
    """Return the counts of a record that progress shows."""
    return Counts(
        total=record.total,
        done=record.completed + record.failed,
        failed=record.failed,
        running=record.running,
        tokens=record.usage.completion_tokens,
        note=f"trying again: {record.problem}" if record.problem else note,
    )


def print_problems(source: object, problems: Iterable[Any] | None) -> None:
    """Print the problems of an input on stderr, as `file:line: message [code]`."""
    for problem in problems or ():
        place = f"{source}:{problem.line}" if problem.line else source
        write_line(f"{place}: {problem.message} [{problem.code}]")


def check_end(name: str, state: str, total: int, failed: int, fail_on_error: bool) -> None:
    """Raise `Refused` or `LinesFailed` if the batch did not end successfully."""
    if state == "failed":
        raise Refused(f"{name} was refused; nothing was run")
    if state != "completed":
        raise LinesFailed(f"{name} was {state} before it was finished")
    if failed and fail_on_error:
        raise LinesFailed(f"{failed} of {total} requests failed")


def print_summary(
    record: "BatchRecord", seconds: float, answering: float = 0.0, copied_to: "Path | Uri | None" = None
) -> None:
    """Print the summary of a run on stdout: the place of the results, the first ones, the totals.

    The run took `seconds`; requests were answered during `answering` of them (0: unknown).
    """
    written = local_path(record.output) if record.output is not None else None
    readable = written or copied_to  # a copy may have another suffix
    for line in first_answers(readable) if isinstance(readable, Path) else ():
        print(line)
    print(f"results: {copied_to or written or record.output}")
    usage = record.usage
    parts = [
        requests_line(record.total, record.failed),
        tokens_line(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
        f"{seconds:.1f} s" if seconds < 60 else duration(seconds),
    ]
    if answering > 0:
        parts.insert(2, f"{usage.completion_tokens / answering:,.0f} output tokens/s")
    print("; ".join(parts))
    if record.unknown_members:
        print(f"unknown members, ignored: {described(record.unknown_members)}")


def print_completed(manifest: "Manifest", lacks_parts: bool = False) -> None:
    """Print the summary of a run that was already complete on stdout.

    `lacks_parts` says that the folder to keep was removed.
    """
    print(f"results: {manifest.output}")
    note = "; there is no folder to keep any more" if lacks_parts else ""
    print(f"{requests_line(manifest.completed, 0)}; complete before, nothing was run{note}")


def requests_line(total: int, failed: int) -> str:
    """Return a line with the number of requests."""
    return f"{total} request{'s' if total != 1 else ''}, {failed} failed"


def tokens_line(prompt: int, cached: int, output: int) -> str:
    """Return a line with the number of tokens."""
    return f"{prompt:,} prompt tokens ({cached:,} from the cache), {output:,} output tokens"


def first_answers(output: Path) -> list[str]:
    """Return the first few results, shortened, one line each."""
    location = str(output)
    read = _parquet_rows if is_parquet(location) else _csv_rows if is_csv(location) else _jsonl_rows
    return [_shown(custom_id, text) for custom_id, text in read(output)]


def shown(line: dict[str, Any]) -> str:
    """Return the answer in a line of a result file, shortened to one line."""
    return _shown(*_row(line))


def _shown(custom_id: str, text: str) -> str:
    return f"  {_shorten(custom_id)}: {_shorten(text)}"


def _jsonl_rows(output: Path) -> list[tuple[str, str]]:
    with open_text(str(output)) as file:
        return [_row(json.loads(line)) for line in islice(file, _ANSWERS)]


def _csv_rows(output: Path) -> list[tuple[str, str]]:
    csv.field_size_limit(_LONGEST_CELL)
    with open_text(str(output)) as file:
        return [(row["custom_id"], _csv_cell(row)) for row in islice(csv.DictReader(file), _ANSWERS)]


def _csv_cell(row: dict[str, str]) -> str:
    if row["error_message"] or not row["response"]:
        return f"error: {row['error_message']}"
    return _row({"custom_id": "", "response": {"body": json.loads(row["response"])}})[1]


def _row(line: dict[str, Any]) -> tuple[str, str]:
    body = (line.get("response") or {}).get("body") or {}
    if line.get("error") or not body:
        return line["custom_id"], f"error: {(line.get('error') or {}).get('message')}"
    if "choices" not in body:
        return line["custom_id"], _numbers(body.get("data") or body.get("results") or ())
    choice = body["choices"][0]
    return line["custom_id"], _said(choice["message"]) if "message" in choice else choice["text"]


def _numbers(items: Iterable[dict[str, Any]]) -> str:
    """Return the numbers of an answer, for each text or pair."""
    values = [next((item[name] for name in _VALUES if item.get(name) is not None), None) for item in items]
    return json.dumps(values[0] if len(values) == 1 else values)


def _said(message: dict[str, Any]) -> str:
    """Return a message's content, or its tool calls."""
    calls = (call["function"] for call in message.get("tool_calls") or [])
    return message["content"] or " ".join(f"{function['name']} {function['arguments']}" for function in calls)


def _parquet_rows(output: Path) -> list[tuple[str, str]]:
    from pyarrow import parquet

    with parquet.ParquetFile(output) as file:
        numbers = [name for name in _NUMBER_COLUMNS if name in file.schema_arrow.names]
        columns = ["custom_id", "text", "error_message", *numbers]
        # An Arrow thread that reads ahead could outlive the interpreter
        batch = next(file.iter_batches(batch_size=_ANSWERS, columns=columns, use_threads=False), None)
    return [] if batch is None else [(row["custom_id"], _cell(row)) for row in batch.to_pylist()]


def _cell(row: dict[str, Any]) -> str:
    if row["error_message"] is not None:
        return f"error: {row['error_message']}"
    return row["text"] or next((json.dumps(row[name]) for name in _NUMBER_COLUMNS if row.get(name) is not None), "")


def _shorten(text: str) -> str:
    """Return the text as one short line without control characters."""
    line = "".join(character if character.isprintable() else " " for character in text[: 2 * _LONGEST_ANSWER])
    line = " ".join(line.split())
    return line if len(line) <= _LONGEST_ANSWER else line[: _LONGEST_ANSWER - 1] + "…"
