"""Input files become lines with the right numbers and offsets, whatever form they come in."""

import contextlib
import gzip
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from jobs.batch import input_files
from jobs.batch.input_files import CSV, PARQUET, Bounds, InputError, first_line, format_of, read_lines, write_spool
from jobs.batch.tables import open_table
from jobs.store.input_formats import GZIP, ZSTD
from jobs.store.storage import StoreError, write_bytes
from tests.support.object_stores import bucket
from tests.support.processes import descendants, is_running, send_all
from tests.support.slow_file import slow_reading
from tests.support.waiting import wait_until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def spooled(source: Path) -> list[dict[str, Any]]:
    spool = source.with_name("lines.jsonl")
    write_spool(str(source), str(spool))
    return [json.loads(line) for line in spool.read_text().splitlines()]


def write_table(path: Path, rows: list[dict[str, Any]], schema: pyarrow.Schema | None = None) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path, row_group_size=3)
    return path


def compressed(plain: bytes, name: str) -> bytes:
    if name.endswith("gz"):
        return gzip.compress(plain)
    packed: bytes = pyarrow.compress(plain, codec="zstd", asbytes=True)
    return packed


def test_lines_have_numbers_and_offsets_and_blank_ones_are_passed_over() -> None:
    data = b'\xef\xbb\xbf{"a":1}\r\n\n   \n{"b":2}\nlast'
    lines = list(read_lines(io.BytesIO(data)))
    assert [line.number for line in lines] == [1, 4, 5]
    assert [data[line.offset : line.offset + len(line.raw or b"")] for line in lines] == [
        b'{"a":1}\r\n',
        b'{"b":2}\n',
        b"last",
    ]


def test_an_endless_line_is_named_and_passed_over_without_being_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "MAX_LINE_BYTES", 10)
    lines = list(read_lines(io.BytesIO(b"x" * 10 + b"\n" + b"y" * 35 + b"\nz\n" + b"w" * 99)))
    assert [(line.number, line.offset, line.raw) for line in lines] == [
        (1, 0, None),
        (2, 11, None),
        (3, 47, b"z\n"),
        (4, 49, None),
    ]


@pytest.mark.parametrize("name", ["in.jsonl.{}", "in.{}", "in", "in.jsonl", "stdin"])
@pytest.mark.parametrize(("suffix", "kind"), [("gz", GZIP), ("zst", ZSTD)])
def test_compressed_lines(tmp_path: Path, name: str, suffix: str, kind: str) -> None:
    """Known by their name, or by their first bytes."""
    source = tmp_path / name.format(suffix)
    plain = b"".join(b'{"n":%d}\n' % n for n in range(1000))
    source.write_bytes(compressed(plain, suffix))
    assert format_of(str(source)) == kind
    assert first_line(str(source)) == b'{"n":0}'
    assert [row["n"] for row in spooled(source)] == list(range(1000))


def test_a_cut_gzip_file_is_named(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(gzip.compress(b'{"n":1}\n' * 1000)[:-12])
    with pytest.raises(InputError, match=r"in\.jsonl\.gz cannot be decompressed"):
        spooled(source)
    assert not (tmp_path / "lines.jsonl").exists()
    assert list(tmp_path.iterdir()) == [source]


def test_parquet_with_bodies_as_text(tmp_path: Path) -> None:
    rows = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": json.dumps(CHAT, indent=2)}
        for n in range(10)
    ]
    found = spooled(write_table(tmp_path / "in.parquet", rows))
    assert [line["custom_id"] for line in found] == [f"r{n}" for n in range(10)]
    assert all(line["body"] == CHAT and line["url"] == "/v1/chat/completions" for line in found)


def test_parquet_with_bodies_as_structs_drops_the_nulls_of_other_rows(tmp_path: Path) -> None:
    rows = [
        {"custom_id": 1, "body": {"prompt": "a", "seed": 7}},
        {"custom_id": 2, "body": {"prompt": "b", "seed": None}},
    ]
    assert spooled(write_table(tmp_path / "in.parquet", rows)) == [
        {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "seed": 7}},
        {"custom_id": "2", "method": "POST", "url": "/v1/completions", "body": {"prompt": "b"}},
    ]


def test_parquet_is_known_by_its_content(tmp_path: Path) -> None:
    source = write_table(tmp_path / "in", [{"custom_id": "a", "prompt": "x"}])
    assert [row["body"] for row in spooled(source)] == [{"prompt": "x"}]


def test_parquet_with_prompts_and_sampling_columns(tmp_path: Path) -> None:
    rows = [{"custom_id": "a", "prompt": "Hello", "max_tokens": 5, "temperature": None, "note": "not a parameter"}]
    schema = pyarrow.schema(
        {"custom_id": "string", "prompt": "string", "max_tokens": "int32", "temperature": "float64", "note": "string"}
    )
    [line] = spooled(write_table(tmp_path / "in.pq", rows, schema))
    assert line == {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "Hello", "max_tokens": 5},
    }


@pytest.mark.parametrize("as_text", [True, False])
def test_parquet_with_messages(tmp_path: Path, as_text: bool) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rows = [
        {"custom_id": "a", "messages": json.dumps(messages) if as_text else messages, "model": "m", "stop": ["x", "y"]}
    ]
    [line] = spooled(write_table(tmp_path / "in.parquet", rows))
    assert line["url"] == "/v1/chat/completions"
    assert line["body"] == {"model": "m", "stop": ["x", "y"], "messages": messages}


def test_parquet_with_columns_of_objects_as_text(tmp_path: Path) -> None:
    """Without the gaps that structs of different rows leave in each other."""
    schema = {"type": "object", "properties": {"a": {"const": None}}}
    formats = [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    choices = ["auto", {"type": "function", "function": {"name": "f"}}]
    rows = [
        {
            "custom_id": f"r{number}",
            "messages": [{"role": "user", "content": "hi"}],
            "response_format": json.dumps(formats[number]),
            "tools": json.dumps(tools),
            "tool_choice": choices[number] if number == 0 else json.dumps(choices[number]),
            "logit_bias": '{"5": 1}',
            "guided_regex": "[0]",
            "reasoning_effort": "low",
        }
        for number in range(2)
    ]
    bodies = [line["body"] for line in spooled(write_table(tmp_path / "in.parquet", rows))]
    assert [body["response_format"] for body in bodies] == formats
    assert [body["tool_choice"] for body in bodies] == choices
    for body in bodies:
        assert (body["tools"], body["logit_bias"]) == (tools, {"5": 1})
        assert (body["guided_regex"], body["reasoning_effort"]) == ("[0]", "low")


def test_parquet_with_binary_columns_holds_text(tmp_path: Path) -> None:
    rows = [{"custom_id": b"\xc3\xbc", "prompt": "grüß".encode(), "model": b"m", "stop": [b"x"]}]
    [line] = spooled(write_table(tmp_path / "in.parquet", rows))
    assert line["custom_id"] == "ü"
    assert line["body"] == {"prompt": "grüß", "model": "m", "stop": ["x"]}
    rows = [{"custom_id": "a", "messages": [{"role": b"user", "content": b"hi"}]}]
    assert spooled(write_table(tmp_path / "in.parquet", rows))[0]["body"] == {
        "messages": [{"role": "user", "content": "hi"}]
    }


@pytest.mark.parametrize("column", ["custom_id", "prompt", "stop"])
def test_parquet_bytes_that_are_no_text_are_refused_by_name(tmp_path: Path, column: str) -> None:
    row = {"custom_id": b"a", "prompt": b"b", "stop": [b"c"]}
    row[column] = [b"\xff"] if column == "stop" else b"\xff"
    with pytest.raises(
        InputError, match=rf"in\.parquet has a column {column} that holds bytes which are not UTF-8 text"
    ):
        spooled(write_table(tmp_path / "in.parquet", [row]))


def test_parquet_bodies_with_odd_values_stay_for_validation(tmp_path: Path) -> None:
    bodies = ['{"prompt":"\\ud800"}', '{"prompt":"a","temperature":NaN}', '{"prompt":"a","top_p":1e999}']
    source = write_table(
        tmp_path / "in.parquet", [{"custom_id": str(n), "body": body} for n, body in enumerate(bodies)]
    )
    found = [line["body"] for line in spooled(source)]
    assert found[0] == {"prompt": "\ud800"}
    assert math.isnan(found[1]["temperature"])
    assert found[2]["top_p"] == math.inf


def test_parquet_nulls_of_pandas_are_nulls(tmp_path: Path) -> None:
    rows = [
        {"custom_id": "a", "prompt": "x", "temperature": math.nan},
        {"custom_id": "b", "prompt": "x", "temperature": 0.5},
    ]
    assert [line["body"].get("temperature") for line in spooled(write_table(tmp_path / "in.parquet", rows))] == [
        None,
        0.5,
    ]


def test_parquet_rows_with_gaps_stay_visible_to_validation(tmp_path: Path) -> None:
    rows = [{"custom_id": None, "body": '{"prompt":"a"}'}, {"custom_id": "b", "body": "{broken"}]
    first, second = spooled(write_table(tmp_path / "in.parquet", rows))
    assert "custom_id" not in first
    assert second["body"] == "{broken"


@pytest.mark.parametrize(
    ("columns", "url", "body"),
    [
        ({"input": "a", "dimensions": 8, "top_n": 3}, "/v1/embeddings", {"input": "a", "dimensions": 8}),
        ({"input": "[1, 2]", "user": "u"}, "/v1/embeddings", {"input": "[1, 2]", "user": "u"}),
        ({"input": ["a", "b"], "model": "m"}, "/v1/embeddings", {"input": ["a", "b"], "model": "m"}),
        ({"input": [[1, 2], [3]]}, "/v1/embeddings", {"input": [[1, 2], [3]]}),
        ({"input": "a", "url": "/v1/classify"}, "/v1/classify", {"input": "a"}),
        ({"input": "a", "url": "/v1/pooling", "task": "embed"}, "/v1/pooling", {"input": "a", "task": "embed"}),
        ({"text_1": "a", "text_2": "b"}, "/v1/score", {"text_1": "a", "text_2": "b"}),
        ({"text_1": "a", "text_2": "b", "input": "c", "url": "/score"}, "/score", {"text_1": "a", "text_2": "b"}),
        ({"query": "a", "documents": ["b"], "top_n": 1}, "/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 1}),
        ({"prompt": "a", "input": "b"}, "/v1/completions", {"prompt": "a"}),
        ({"prompt": "a", "input": "b", "url": "/v1/embeddings"}, "/v1/embeddings", {"input": "b"}),
        ({"body": '{"input": "a"}'}, "/v1/embeddings", {"input": "a"}),
    ],
)
def test_parquet_with_texts_for_numbers(
    tmp_path: Path, columns: dict[str, Any], url: str, body: dict[str, Any]
) -> None:
    [line] = spooled(write_table(tmp_path / "in.parquet", [{"custom_id": "c", **columns}]))
    assert (line["url"], line["body"]) == (url, body)


def test_parquet_rows_for_several_endpoints(tmp_path: Path) -> None:
    rows = [{"custom_id": "a", "input": "x", "prompt": None}, {"custom_id": "b", "input": None, "prompt": "y"}]
    schema = pyarrow.schema([(name, pyarrow.string()) for name in rows[0]])
    lines = spooled(write_table(tmp_path / "in.parquet", rows, schema))
    assert [line["url"] for line in lines] == ["/v1/embeddings", "/v1/completions"]


def test_parquet_without_the_columns_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"custom_id, and one of body, messages, prompt, input, queries with documents, .* it has: id, text",
    ):
        spooled(write_table(tmp_path / "in.parquet", [{"id": 1, "text": "x"}]))


def test_not_a_parquet_file(tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    source.write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match="is not a readable Parquet file"):
        spooled(source)


def test_damaged_pages_are_named(tmp_path: Path) -> None:
    source = write_table(tmp_path / "in.parquet", [{"custom_id": str(n), "prompt": "x" * 999} for n in range(99)])
    data = bytearray(source.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    source.write_bytes(data)
    with pytest.raises(InputError, match=r"in\.parquet is not a readable Parquet file"):
        spooled(source)
    assert list(tmp_path.iterdir()) == [source]


def repeated(path: Path, rows: int, size: int) -> Path:
    """A Parquet file of some 2 KB, each row of which holds the same text of `size` bytes."""
    prompts = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array(["x" * size])
    )
    table = pyarrow.table({"custom_id": [str(n) for n in range(rows)], "model": ["m"] * rows, "prompt": prompts})
    parquet.write_table(table, path, compression="zstd")
    return path


def test_parquet_that_unfolds_is_read_in_bounded_memory_or_refused(tmp_path: Path) -> None:
    source = repeated(tmp_path / "in.parquet", 64, 4 << 20)
    assert source.stat().st_size < 10_000
    with pytest.raises(InputError, match=r"in\.parquet needs more than 300 MiB of memory to be read"):
        write_spool(str(source), str(tmp_path / "lines.jsonl"), Bounds(memory_bytes=300 << 20))
    assert list(tmp_path.iterdir()) == [source]


def test_what_unpacks_to_too_much_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    sources = {
        tmp_path / "in.jsonl.gz": gzip.compress(bytes(10 << 20)),
        tmp_path / "in.jsonl.zst": pyarrow.compress(bytes(10 << 20), "zstd", asbytes=True),
    }
    for source, data in sources.items():
        source.write_bytes(data)
        assert len(data) < 50_000
    table = repeated(tmp_path / "in.parquet", 100, 100_000)
    for source in (*sources, table):
        with pytest.raises(InputError, match=f"{source.name} holds more than 5000000 bytes when it is unpacked"):
            write_spool(str(source), str(tmp_path / "lines.jsonl"), Bounds(most_bytes=5_000_000))
    assert set(tmp_path.iterdir()) == {*sources, table}


def test_parquet_rows_behind_the_most_are_left_out(tmp_path: Path) -> None:
    source, spool = repeated(tmp_path / "in.parquet", 100, 10), tmp_path / "lines.jsonl"
    write_spool(str(source), str(spool), Bounds(most_rows=7))
    assert len(spool.read_bytes().splitlines()) == 7


def test_parquet_that_takes_too_long_is_refused(tmp_path: Path) -> None:
    source, rows = tmp_path / "in.parquet", 100_000
    body = pyarrow.StructArray.from_arrays([pyarrow.nulls(rows, pyarrow.int8())] * 500, [f"f{n}" for n in range(500)])
    parquet.write_table(pyarrow.table({"custom_id": ["a"] * rows, "body": body}), source)
    with pytest.raises(InputError, match=r"in\.parquet takes more than 1 s of computing to be read"):
        write_spool(str(source), str(tmp_path / "lines.jsonl"), Bounds(cpu_seconds=1))


@pytest.mark.parametrize("name", ["in.parquet", "in.csv"])
def test_the_reader_of_a_table_ends_with_its_parent(tmp_path: Path, name: str) -> None:
    """Also where it waits for its file for ever, and ignores an order to end."""
    source = tmp_path / name
    if name.endswith(".csv"):
        source.write_text("custom_id,prompt\na,b\n")
    else:
        write_table(source, [{"custom_id": "a", "prompt": "b"}])
    program = f"from jobs.batch.input_files import write_spool; write_spool({str(source)!r}, {str(source)!r} + '.out')"
    parent = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **slow_reading(source, 3600)})
    readers: list[int] = []
    try:
        readers = wait_until(lambda: [pid for pid in descendants(parent.pid) if has_open(pid, source)], 60, "a reader")
    finally:
        parent.kill()
        parent.wait()
    try:
        wait_until(lambda: not any(map(is_running, readers)), 60, "the end of the reader")
    finally:
        send_all(readers, signal.SIGKILL)


def has_open(pid: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(os.readlink(link) == str(path) for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_blank_lines_are_counted() -> None:
    data = b"\n" * 10 + b"x\n" + b" \n" * 10
    assert [line.number for line in read_lines(io.BytesIO(data), most_blank=20)] == [11]
    with pytest.raises(InputError, match="holds more than 19 blank lines"):
        list(read_lines(io.BytesIO(data), most_blank=19))


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl.zst"])
def test_a_bucket_that_does_not_answer_is_not_the_fault_of_a_compressed_file(tmp_path: Path, name: str) -> None:
    with bucket() as remote:
        source = f"{remote.uri}/{name}"
        write_bytes(source, compressed(random.Random(1).randbytes(10_000_000).hex().encode(), name))

        def refuse() -> None:
            remote.server.denied = True

        with pytest.raises(StoreError, match=f"cannot read {source}: AccessDenied"):
            write_spool(source, str(tmp_path / "lines.jsonl"), check=refuse)


@pytest.mark.parametrize(("name", "kind"), [("in.parquet", PARQUET), ("in.csv", CSV)])
def test_a_bucket_that_does_not_answer_is_not_the_fault_of_a_table(tmp_path: Path, name: str, kind: str) -> None:
    local, texts = tmp_path / name, [random.Random(number).randbytes(1000).hex() for number in range(5000)]
    if kind == CSV:
        local.write_text("prompt\n" + "\n".join(texts))
    else:
        write_table(local, [{"prompt": text} for text in texts])
    with bucket() as remote:
        source = f"{remote.uri}/{name}"
        write_bytes(source, local.read_bytes())
        table = open_table(source, kind)
        remote.server.denied = True
        with pytest.raises(StoreError, match=f"cannot read {source}: AccessDenied"):
            list(table.read(["prompt"]))
