"""Results of rows have the columns of the input, as JSONL, CSV and Parquet, compressed or not: once
each and in input order, whatever is killed.
"""

import csv
import datetime
import gzip
import io
import json
import math
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import redis
from pyarrow import parquet

from jobs.batch.client import BatchRecord, InputChanged, cancel_batch
from jobs.batch.manifest import load_manifest
from jobs.batch.row_requests import RowOptions
from jobs.control import line_results
from jobs.protocol.chat import CHAT
from jobs.protocol.requests import Claim
from jobs.protocol.results import ApiError, Result
from jobs.store.storage import AtomicWriter
from tests.support.batch_steps import answer_all, begin, run_to_end, step
from tests.support.control_plane import echo
from tests.support.kills import killed_at

COUNT = 30
NULL_ROWS = (4, 17)
WHEN = datetime.datetime(2020, 1, 2, 3, 4, 5)
OPTIONS = RowOptions(template="say {text}", id_column="id", keep_columns=("n", "text", "when"))
SUFFIXES = ["jsonl", "jsonl.gz", "jsonl.zst", "csv", "csv.gz", "csv.zst", "parquet"]


def write_table(path: Path, count: int = COUNT) -> Path:
    """Rows of which two have no text."""
    numbers = range(1, count + 1)
    table = pyarrow.table(
        {
            "id": [f"c{n}" for n in numbers],
            "text": [None if n in NULL_ROWS else f'{n},\n"x"' for n in numbers],
            "n": pyarrow.array([math.inf if n == 1 else None if n == 2 else n / 4 for n in numbers], pyarrow.float32()),
            "when": [WHEN] * count,
        }
    )
    parquet.write_table(table, path, row_group_size=7)
    return path


def answer(claim: Claim) -> Result:
    """What was said; a worker refuses a body without messages."""
    if isinstance(json.loads(claim.request.body)["messages"], list):
        return echo(claim)
    return ApiError(400, "no messages").result(f"req_{claim.key.line}")


def run(client: redis.Redis, source: Path, output: Path, **options: Any) -> BatchRecord:
    return run_to_end(client, begin_rows(client, source, output, **options).id, answer)


def begin_rows(client: redis.Redis, source: Path, output: Path, **options: Any) -> BatchRecord:
    return begin(client, source, **{"output": str(output), "default_model": "m", "rows": OPTIONS} | options)


def unpacked(path: Path) -> bytes:
    if path.name.endswith(".gz"):
        return gzip.decompress(path.read_bytes())
    if path.name.endswith(".zst"):
        return bytes(pyarrow.CompressedInputStream(pyarrow.BufferReader(path.read_bytes()), "zstd").read())
    return path.read_bytes()


def rows_of(output: Path) -> list[dict[str, Any]]:
    """The rows of results, with texts for the values of CSV."""
    if output.suffix == ".parquet":
        return parquet.read_table(output).to_pylist()
    if ".csv" in output.name:
        return list(csv.DictReader(io.StringIO(unpacked(output).decode(), newline="")))
    return [_flat(json.loads(line)) for line in unpacked(output).splitlines()]


def _flat(line: dict[str, Any]) -> dict[str, Any]:
    """A line of JSONL as the row of a table."""
    body = line["response"]["body"] if line["response"] else {}
    columns = {"input_text" if name == "text" else name: value for name, value in line["columns"].items()}
    text = body["choices"][0]["message"]["content"] if "choices" in body else None
    error = line["error"] or {"code": None, "message": None}
    return {"custom_id": line["custom_id"], "text": text, **columns} | {f"error_{key}": error[key] for key in error}


def check(output: Path, count: int = COUNT) -> None:
    """Every row once, in input order, with its answer and its columns."""
    rows = rows_of(output)
    assert [row["custom_id"] for row in rows] == [f"c{n}" for n in range(1, count + 1)]
    for number, row in enumerate(rows, 1):
        text = None if number in NULL_ROWS else f'{number},\n"x"'
        assert (row["input_text"] or None, row["text"] or None) == (text, text and f"say {text}")
        reason = f"Row {number} has no value in the column text, so there is no prompt."
        assert (row["error_message"] or None) == (reason if text is None else None)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_each_row_has_its_answer_and_its_columns(redis_client: redis.Redis, tmp_path: Path, suffix: str) -> None:
    source, output = write_table(tmp_path / "in.parquet"), tmp_path / f"out.{suffix}"
    record = run(redis_client, source, output)
    assert (record.state, record.total, record.failed) == ("completed", COUNT, len(NULL_ROWS))
    assert record.output == str(output)
    check(output)
    before = output.read_bytes()
    output.unlink()
    assert run(redis_client, source, output).completed == COUNT - len(NULL_ROWS)
    assert output.read_bytes() == before


def test_parquet_keeps_the_types_of_columns(redis_client: redis.Redis, tmp_path: Path) -> None:
    source, output = write_table(tmp_path / "in.parquet"), tmp_path / "out.parquet"
    run(redis_client, source, output)
    before, table = parquet.read_table(source), parquet.read_table(output)
    assert table.column_names[-3:] == ["n", "input_text", "when"]
    assert (table.schema.field("n").type, table.schema.field("when").type) == (
        pyarrow.float32(),
        before.schema.field("when").type,
    )
    assert table["n"].to_pylist() == before["n"].to_pylist()
    assert table["when"].to_pylist() == before["when"].to_pylist()


def test_a_row_that_could_not_be_written_at_the_end_is_refused_at_the_start(
    redis_client: redis.Redis, tmp_path: Path
) -> None:
    seconds = pyarrow.array([0, 253_402_300_800]).cast(pyarrow.timestamp("s"))  # the year 10000
    source = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"id": ["a", "b"], "text": ["x"] * 2, "n": [1] * 2, "when": seconds}), source)
    record = step(redis_client, begin_rows(redis_client, source, tmp_path / "out.parquet").id)
    assert (record.state, record.total) == ("failed", 0)
    assert "in row 2 of the column when that cannot be kept: 10000-01-01" in record.errors[0].message


def test_jsonl_has_the_columns_under_their_names(redis_client: redis.Redis, tmp_path: Path) -> None:
    run(redis_client, write_table(tmp_path / "in.parquet"), tmp_path / "out.jsonl")
    third = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[2])
    assert list(third) == ["id", "custom_id", "response", "error", "columns"]
    assert third["columns"] == {"n": 0.75, "text": '3,\n"x"', "when": "2020-01-02 03:04:05.000000"}


def test_csv_in_and_out(redis_client: redis.Redis, tmp_path: Path) -> None:
    """A cell of the output that is empty and not in quotes has no value."""
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_bytes(b'id,text,n\nc1,"1,\n""x""",\nc2,"",2\nc3,,3\n')
    rows = RowOptions(prompt_column="text", id_column="id", keep_columns=("n", "text"))
    run(redis_client, source, output, rows=rows)
    table = rows_of(output)
    assert [(row["custom_id"], row["text"], row["n"]) for row in table] == [
        ("c1", '1,\n"x"', ""),
        ("c2", "", "2"),
        ("c3", "", "3"),
    ]
    data = output.read_bytes()
    assert data.startswith(b"custom_id,id,status_code,model,text,finish_reason,error_code,error_message,request_id,")
    assert b"\nc2," in data
    assert b',m,"",stop,' in data
    assert data.endswith(b",3,\n")


def test_csv_is_written_in_pieces(redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_results, "_FLUSH_BYTES", 300)
    run(redis_client, write_table(tmp_path / "in.parquet"), tmp_path / "out.csv.gz")
    check(tmp_path / "out.csv.gz")


def test_rows_of_a_cancelled_batch_have_their_columns(redis_client: redis.Redis, tmp_path: Path) -> None:
    source, output = write_table(tmp_path / "in.parquet"), tmp_path / "out.csv"
    batch = begin_rows(redis_client, source, output).id
    step(redis_client, batch)
    answer_all(redis_client, answer, most=5)
    cancel_batch(redis_client, batch)
    assert run_to_end(redis_client, batch, answer).state == "cancelled"
    rows = rows_of(output)
    assert [row["custom_id"] for row in rows] == [f"c{n}" for n in range(1, COUNT + 1)]
    assert {row["when"] for row in rows} == {"2020-01-02 03:04:05.000000"}
    assert sum(row["error_code"] == "batch_cancelled" for row in rows) == COUNT - 5


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"template": "tell {text}"}, "template say {text}, not tell {text}"),
        ({"keep_columns": ("n",)}, "keep_columns"),
        ({"id_column": None}, "id_column c"),
        ({"body": {"max_tokens": 3}}, r"body {}, not {'max_tokens': 3}"),
        ({"endpoint": "/v1/completions"}, f"endpoint {CHAT}, not /v1/completions"),
    ],
)
def test_a_second_start_with_other_options_is_refused(
    redis_client: redis.Redis, tmp_path: Path, changed: dict[str, Any], name: str
) -> None:
    source, output = write_table(tmp_path / "in.parquet"), tmp_path / "out.parquet"
    old = {"template": OPTIONS.template, "id_column": "c" if "id_column" in changed else None} | {
        "keep_columns": OPTIONS.keep_columns
    }
    if old["id_column"]:
        parquet.write_table(parquet.read_table(source).rename_columns(["c", "text", "n", "when"]), source)
    run(redis_client, source, output, rows=RowOptions(**old))
    before = output.read_bytes()
    with pytest.raises(InputChanged, match=f"was begun with {name}.*remove that folder, or name another output"):
        begin_rows(redis_client, source, output, rows=RowOptions(**(old | changed)))
    with pytest.raises(InputChanged, match="was begun with template"):
        begin_rows(redis_client, source, output, rows=None)
    assert output.read_bytes() == before


@pytest.mark.parametrize("suffix", ["csv.gz", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("kind", ["csv.zst", "parquet"])
def test_a_second_start_does_only_what_is_left(
    redis_client: redis.Redis, tmp_path: Path, suffix: str, kind: str
) -> None:
    source, output = write_table(tmp_path / "in.parquet"), tmp_path / f"out.{suffix}"
    if kind == "csv.zst":
        rows = parquet.read_table(source).to_pylist()
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0])
        writer.writeheader()
        writer.writerows(rows)
        source = tmp_path / "in.csv.zst"
        source.write_bytes(pyarrow.compress(text.getvalue().encode(), "zstd", asbytes=True))
    batch = begin_rows(redis_client, source, output).id
    step(redis_client, batch)
    answer_all(redis_client, answer, most=11)
    step(redis_client, batch)
    redis_client.flushall()
    (tmp_path / "out.parts" / "lines.jsonl").write_bytes(b"damaged")
    seen: list[int] = []

    def noted(claim: Claim) -> Result:
        seen.append(claim.key.line)
        return answer(claim)

    again = begin_rows(redis_client, source, output)
    assert again.id == batch
    assert run_to_end(redis_client, batch, noted).total == COUNT
    assert len(seen) == len(set(seen)) == COUNT - 11
    check(output)


def test_failed_rows_can_be_run_again(redis_client: redis.Redis, tmp_path: Path) -> None:
    """Those without a prompt fail again, with the same sentence."""
    source, output = write_table(tmp_path / "in.parquet"), tmp_path / "out.csv"
    run(redis_client, source, output)
    redis_client.flushall()
    record = run(redis_client, source, output, retry_failed=True)
    assert (record.completed, record.failed) == (COUNT - len(NULL_ROWS), len(NULL_ROWS))
    check(output)


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst", "csv", "csv.zst", "parquet"])
@pytest.mark.parametrize("when", ["at the first bytes", "before the file appears"])
def test_a_kill_while_results_are_written_leaves_none_or_all(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, when: str
) -> None:
    source, output = write_table(tmp_path / "in.parquet"), tmp_path / f"out.{suffix}"
    batch = begin_rows(redis_client, source, output).id
    while step(redis_client, batch).state != "finalizing":
        answer_all(redis_client, answer)
    name = "write" if when == "at the first bytes" else "commit"
    with killed_at(monkeypatch, AtomicWriter, name, False, lambda arguments: arguments[0].location == str(output)):
        step(redis_client, batch)
    assert not output.exists()
    redis_client.flushall()
    run(redis_client, source, output)
    check(output)
    manifest = load_manifest(str(tmp_path / "out.parts"))
    assert manifest is not None
    assert manifest.state == "completed"
