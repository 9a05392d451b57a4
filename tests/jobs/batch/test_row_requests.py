"""Rows of Parquet and CSV files become requests by the options alone."""

import csv
import datetime
import decimal
import gzip
import json
import math
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import compute, parquet

from jobs.batch.input_files import Bounds, InputError, first_line, format_of, is_table, write_spool
from jobs.batch.row_requests import ROW_ENDPOINTS, RowExtras, RowOptions, read_extras
from jobs.batch.row_values import as_array, json_rows

CSV_TEXT = b'\xef\xbb\xbfid,text,n\r\na,"one, ""two""\nthree",1\r\nb,,2\r\nc,"",3\r\n'
ROWS = {"id": [7, 8, 9], "text": ["one", "zwei\n", None], "n": [1, None, 3]}


def spooled(source: Path, **options: Any) -> list[dict[str, Any]]:
    """The lines that are made of a table's rows."""
    spool = source.with_name("lines.jsonl")
    write_spool(str(source), str(spool), rows=RowOptions(**options) if options else None)
    return [json.loads(line) for line in spool.read_text().splitlines()]


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def packed(path: Path, data: bytes) -> Path:
    """A file compressed as its name says."""
    if path.name.endswith(".gz"):
        data = gzip.compress(data)
    elif path.name.endswith(".zst"):
        data = pyarrow.compress(data, "zstd", asbytes=True)
    path.write_bytes(data)
    return path


def contents(lines: list[dict[str, Any]]) -> list[str | None]:
    """The prompts of chats, None where there is none."""
    return [None if line["body"]["messages"] == {} else line["body"]["messages"][0]["content"] for line in lines]


def test_a_prompt_column_gives_a_chat_for_each_row(tmp_path: Path) -> None:
    lines = spooled(write_parquet(tmp_path / "in.parquet", ROWS), prompt_column="text", body={"max_tokens": 5})
    assert lines[0] == {
        "custom_id": "row-1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"max_tokens": 5, "messages": [{"role": "user", "content": "one"}]},
    }
    assert [line["custom_id"] for line in lines] == ["row-1", "row-2", "row-3"]
    assert contents(lines) == ["one", "zwei\n", None]


def test_a_template_is_filled_by_the_columns_it_names(tmp_path: Path) -> None:
    columns = {
        "a": ["x {b}", "y"],
        "b": [1, 2],
        "c": [0.5, 1e300],
        "d": [True, False],
        "e": [[1, None], []],
        "f": [datetime.date(2020, 1, 2)] * 2,
        "g": [decimal.Decimal("1.50")] * 2,
        "h": [b"\xc3\xa4", b"z"],
        "i": pyarrow.array(["k", "l"]).dictionary_encode(),
    }
    source = write_parquet(tmp_path / "in.parquet", columns)
    lines = spooled(source, template="{{{a}}}|{b}|{c}|{d}|{e}|{f}|{g}|{h}|{i}")
    assert contents(lines) == [
        "{x {b}}|1|0.5|true|[1, null]|2020-01-02|1.50|ä|k",
        "{y}|2|1e+300|false|[]|2020-01-02|1.50|z|l",
    ]


@pytest.mark.parametrize(
    ("endpoint", "prompt"),
    [("/v1/completions", {"prompt": "one"}), ("/v1/embeddings", {"input": "one"}), ("/v1/classify", {"input": "one"})],
)
def test_the_endpoint_says_where_the_prompt_belongs(tmp_path: Path, endpoint: str, prompt: dict[str, str]) -> None:
    assert endpoint in ROW_ENDPOINTS
    source = write_parquet(tmp_path / "in.parquet", ROWS)
    line = spooled(source, prompt_column="text", endpoint=endpoint)[0]
    assert (line["url"], line["body"]) == (endpoint, prompt)


@pytest.mark.parametrize("name", ["in.csv", "IN.CSV", "in.csv.gz", "in.csv.zst"])
def test_csv_has_text_with_line_feeds_and_cells_without_a_value(tmp_path: Path, name: str) -> None:
    """An empty cell in quotes is an empty text, one without quotes has no value."""
    lines = spooled(packed(tmp_path / name, CSV_TEXT), prompt_column="text", id_column="id", keep_columns=("n", "text"))
    assert [line["custom_id"] for line in lines] == ["a", "b", "c"]
    assert contents(lines) == ['one, "two"\nthree', None, ""]
    assert [line["columns"] for line in lines] == [
        {"n": "1", "text": 'one, "two"\nthree'},
        {"n": "2", "text": None},
        {"n": "3", "text": ""},
    ]


def test_a_row_without_a_value_is_a_line_that_says_why(tmp_path: Path) -> None:
    columns = {"text": ["a", None, "c", "d"], "n": [1.0, 2.0, math.nan, None]}
    lines = spooled(write_parquet(tmp_path / "in.parquet", columns), template="{text} {n}")
    assert contents(lines) == ["a 1.0", None, None, None]
    extras = [read_extras(json.dumps(line).encode()) for line in lines]
    assert [one.null_column for one in extras] == [None, "text", "n", "n"]
    problem = extras[1].problem(2)
    assert problem is not None
    assert problem.message == "Row 2 has no value in the column text, so there is no prompt."
    assert extras[0].problem(1) is None


def test_ids_are_those_of_the_column_or_the_number_of_the_row(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in.parquet", {"custom_id": ["x", None, ""], "k": [1, 2, None], "p": ["a"] * 3})
    assert [line["custom_id"] for line in spooled(source, prompt_column="p")] == ["x", "row-2", "row-3"]
    assert [line["custom_id"] for line in spooled(source, prompt_column="p", id_column="k")] == ["1", "2", "row-3"]


def test_kept_columns_have_the_values_of_json_and_a_schema(tmp_path: Path) -> None:
    when = [datetime.datetime(2020, 1, 2, 3, 4, 5, 6), None]
    columns = {
        "p": ["a", "b"],
        "when": when,
        "number": pyarrow.array([1.1, math.inf], pyarrow.float32()),
        "nested": [{"a": [1]}, {"a": []}],
        "kind": pyarrow.array(["x", "y"]).dictionary_encode(),
    }
    source = write_parquet(tmp_path / "in.parquet", columns)
    lines = spooled(source, prompt_column="p", keep_columns=("when", "number", "nested", "kind"))
    first, second = (read_extras(json.dumps(line).encode()) for line in lines)
    assert first.columns["when"] == "2020-01-02 03:04:05.000006"
    assert second.columns == {"when": None, "number": math.inf, "nested": {"a": []}, "kind": "y"}
    assert first.schema
    assert not second.schema
    assert read_extras(b'{"custom_id": "a"}') == RowExtras()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prompt_column": "txt"}, r"in\.parquet has no column txt; it has: id, text, n, d, o$"),
        ({"template": "{text} {other}"}, "has no column other"),
        ({"prompt_column": "text", "id_column": "no"}, "has no column no"),
        ({"prompt_column": "text", "keep_columns": ("n", "no")}, "has no column no"),
        ({"prompt_column": "d"}, r"has a column d of type list<.*timestamp\[us\]>, which cannot be read as text"),
        (
            {"prompt_column": "text", "keep_columns": ("d",)},
            r"has a column d of type list<.*timestamp\[us\]>, which cannot be kept",
        ),
        ({"prompt_column": "o"}, "has a column o that holds bytes which are not UTF-8 text"),
    ],
)
def test_options_that_do_not_fit_the_file_are_refused_at_its_first_line(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    columns = {**ROWS, "d": [[datetime.datetime(2020, 1, 1)]] * 3, "o": [b"\xff"] * 3}
    source = write_parquet(tmp_path / "in.parquet", columns)
    with pytest.raises(InputError, match=reason):
        first_line(str(source), RowOptions(**options))


YEAR_10000 = 253_402_300_800  # in seconds


@pytest.mark.parametrize(
    ("value", "type", "shown"),
    [
        (YEAR_10000, pyarrow.timestamp("s"), "10000-01-01 00:00:00.000"),
        (YEAR_10000 * 1000 - 1, pyarrow.timestamp("ms", "Europe/Berlin"), "10000-01-01 00:59:59.999+0100"),
        (-(2**63) + 1, pyarrow.timestamp("ns"), "1677-09-21 00:12:43.145224193"),
        (-(10**11), pyarrow.timestamp("s"), "-1199-02-15 14:13:20.000"),
        (2_932_897, pyarrow.date32(), "10000-01-01"),
    ],
)
def test_a_kept_value_that_could_not_be_written_is_refused_before_anything_runs(
    tmp_path: Path, value: int, type: pyarrow.DataType, shown: str
) -> None:
    integers = pyarrow.int32() if type == pyarrow.date32() else pyarrow.int64()
    good = pyarrow.array([0] * 69 + [None], integers)
    column = pyarrow.concat_arrays([good, pyarrow.array([value, value], integers)]).cast(type)
    source = write_parquet(tmp_path / "in.parquet", {"p": ["a"] * 72, "when": column})
    with pytest.raises(InputError, match=r"in row 71 of the column when that cannot be kept: ") as found:
        spooled(source, prompt_column="p", keep_columns=("when",))
    assert f"kept: {shown}; change it, or leave the column out of --keep-columns" in str(found.value)
    assert list(tmp_path.iterdir()) == [source]


def test_numbers_have_as_few_digits_as_say_them(tmp_path: Path) -> None:
    float32 = pyarrow.float32()
    tiny = [decimal.Decimal("0E-10"), decimal.Decimal("-1.2E-9"), None]
    columns = {
        "f": pyarrow.array([0.1, 1e-7, 16_777_216], float32),
        "l": pyarrow.array([[0.1, None], [math.nan, -math.inf], None], pyarrow.large_list(float32)),
        "p": pyarrow.array([[0.1, 0.7], [1, 2], None], pyarrow.list_(float32, 2)),
        "s": pyarrow.array([{"x": [{"y": 0.1}], "z": "ä"}] * 3),
        "d": pyarrow.array(tiny, pyarrow.decimal128(20, 10)),
        "e": pyarrow.array(tiny, pyarrow.decimal256(40, 10)),
        "i": pyarrow.array([math.inf, -math.inf, math.nan], float32),
    }
    kind = pyarrow.struct([("x", pyarrow.list_(pyarrow.struct([("y", float32)]))), ("z", pyarrow.string())])
    columns["s"] = columns["s"].cast(kind)
    source = write_parquet(tmp_path / "in.parquet", columns)
    lines = spooled(source, template="{f}|{l}|{p}|{s}|{d}|{e}|{i}", keep_columns=("f", "l", "s", "d", "e"))
    assert contents(lines) == [
        '0.1|[0.1, null]|[0.1, 0.7]|{"x": [{"y": 0.1}], "z": "ä"}|0.0000000000|0.0000000000|Infinity',
        '1e-07|[null, null]|[1.0, 2.0]|{"x": [{"y": 0.1}], "z": "ä"}|-0.0000000012|-0.0000000012|-Infinity',
        None,
    ]
    assert [line["columns"]["f"] for line in lines] == [0.1, 1e-7, 16_777_216]
    assert lines[0]["columns"]["d"] == "0.0000000000"


def test_columns_of_requests_have_numbers_in_few_digits(tmp_path: Path) -> None:
    columns = {
        "custom_id": [decimal.Decimal("0E-10")],
        "prompt": ["a"],
        "temperature": pyarrow.array([0.1], pyarrow.float32()),
    }
    line = spooled(write_parquet(tmp_path / "in.parquet", columns))[0]
    assert (line["custom_id"], line["body"]["temperature"]) == ("0.0000000000", 0.1)


@pytest.mark.proof
def test_every_float_of_a_kept_column_is_given_back() -> None:
    """What is written has the float32 that was read, for a sample over all of them."""
    for start in range(-(2**31), 2**31 - 2**16, 2**25 + 1):
        integers = pyarrow.array(range(start, start + 2**16), pyarrow.int32())
        floats = integers.view(pyarrow.float32()).filter(compute.is_finite(integers.view(pyarrow.float32())))
        rows = pyarrow.RecordBatch.from_arrays([floats], ["f"])
        values = [row["f"] for row in json_rows("in.parquet", rows, ["f"])]
        assert as_array(values, pyarrow.float32()).equals(floats)


def no_utf8() -> pyarrow.Array:
    """70 texts of two bytes, of which the last one is not UTF-8."""
    offsets = pyarrow.array(range(0, 141, 2), pyarrow.int32())
    return pyarrow.StringArray.from_buffers(70, offsets.buffers()[1], pyarrow.py_buffer(b"ab" * 69 + b"a\xff"))


def test_bytes_that_are_no_text_are_named_by_row_and_column(tmp_path: Path) -> None:
    texts = no_utf8()
    columns = {
        "custom_id": [str(n) for n in range(70)],
        "prompt": texts,
        "nested": pyarrow.StructArray.from_arrays([texts], ["a"]),
        "few": texts.dictionary_encode(),
        "user": texts.cast(pyarrow.binary()),
    }
    source = write_parquet(tmp_path / "in.parquet", columns)
    for name in ("prompt", "nested", "few", "user"):
        with pytest.raises(
            InputError, match=rf"in\.parquet has a column {name} that holds bytes .*, first in row 70: "
        ):
            spooled(source, template=f"{{{name}}}")
    with pytest.raises(
        InputError, match="has a column prompt that holds bytes which are not UTF-8 text, first in row 70"
    ):
        spooled(source)
    parquet.write_table(parquet.read_table(source).set_column(1, "prompt", [["x"] * 70]), source)
    with pytest.raises(
        InputError, match="has a column user that holds bytes which are not UTF-8 text, first in row 70"
    ):
        spooled(source)


def test_a_name_of_a_column_that_is_no_text_is_refused(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in.parquet", {"zz": [1]})
    source.write_bytes(source.read_bytes().replace(b"zz", b"z\xff"))
    with pytest.raises(InputError, match=r"in\.parquet has a column whose name is not UTF-8 text: rename it"):
        spooled(source, prompt_column="zz")


def test_a_time_without_a_name_is_refused_in_a_prompt_too(tmp_path: Path) -> None:
    when = pyarrow.array([0, YEAR_10000, YEAR_10000 * 4]).cast(pyarrow.timestamp("s"))
    source = write_parquet(tmp_path / "in.parquet", {"when": when})
    with pytest.raises(InputError, match=r"in row 3 of the column when that cannot be read: it is out of range"):
        spooled(source, prompt_column="when")
    write_parquet(source, {"when": when[:2]})
    assert contents(spooled(source, prompt_column="when"))[1] == "10000-01-01 00:00:00.000"


def test_a_cell_that_python_cannot_hold_is_named(tmp_path: Path) -> None:
    when = pyarrow.array([0, YEAR_10000]).cast(pyarrow.timestamp("s"))
    source = write_parquet(tmp_path / "in.parquet", {"custom_id": when, "prompt": ["a", "b"]})
    with pytest.raises(
        InputError, match=r"has a timestamp\[ms\] in row 2 of the column custom_id that cannot be read: "
    ):
        spooled(source)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty: the first row of CSV names the columns"),
        (b"text,text\na,b\n", "has several columns text: leave one"),
        (b"text,n\na,1\nb,2,3\n", "is not a readable CSV file: CSV parse error: Row #3: Expected 2 columns, got 3"),
        (b"text\n\xff\n", "is not CSV in UTF-8"),
        ("text\na\n".encode("utf-16"), "is not CSV in UTF-8"),
        (b"text\n" + b"a\n" * 99_999 + b"\xff\n", "invalid UTF8"),
        (b"text\nb\n" + b"a" * (9 << 20) + b"\nc\n", "has a row of more than 4 MiB"),
    ],
)
def test_csv_that_cannot_be_read_is_named(tmp_path: Path, data: bytes, reason: str) -> None:
    source = packed(tmp_path / "in.csv", data)
    with pytest.raises(InputError, match=rf"in\.csv {reason}" if "UTF8" not in reason else reason):
        spooled(source, prompt_column="text")
    assert list(tmp_path.iterdir()) == [source]


OPEN_QUOTES = {
    "to the end of the file": (b'id,text\n1,a\n2,"b\n3,c\n', 3),
    "in the last line": (b'id,text\r\n1,a\r\n2,"b\r\n', 3),
    "in a column that is not read": (b'text,id\na,1\nb,"2\nc,3\n', 3),
    "to a quote of another cell": (b'id,text\n1,"a, ""x""\ny"\n2,"b\n3,"c"\n4,d\n', 4),
    "with too few cells": (b'id,text\n1,a\n"2,b\n3,c\n', 3),
    "over more than a row may have": (b'text,id\na,"1\n' + b"b,2\n" * (2 << 20), 2),
    "in the first row": (b'id,"text\n1,a\n', 1),
    "in the first row of a long file": (b'"id,text\n' + b"1,a\n" * 100_000, 1),
    "behind a byte order mark": (b'\xef\xbb\xbf"text\n1,a\n', 1),
    "behind an escaped one": (b'id,text\n1,"a""\n2,c\n', 2),
}


@pytest.mark.parametrize("name", ["in.csv", "in.csv.gz"])
@pytest.mark.parametrize(("data", "line"), OPEN_QUOTES.values(), ids=OPEN_QUOTES)
def test_a_quote_that_is_not_closed_is_named_by_its_line(tmp_path: Path, name: str, data: bytes, line: int) -> None:
    """Else the rows behind it would be one cell."""
    source = packed(tmp_path / name, data)
    with pytest.raises(
        InputError, match=rf"{name} has a cell in line {line} that begins with a quote and does not end"
    ):
        spooled(source, prompt_column="text")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b'id,text\n1,"a\n2,b"\n', ["a\n2,b"]),
        (b'id,text\n1,"a\n""2"",""b"""\n2,c\n', ['a\n"2","b"', "c"]),
        (b'id,text\n1,5" pipe\n2,"x"y\n3,"a\nb" \n', ['5" pipe', "xy", "a\nb "]),
        (b'\xef\xbb\xbf"te\nxt","text"\r\n1,"a\r\n\r\nb"\r\n', ["a\r\n\r\nb"]),
        (b'"text"\r"a\rb"\rc', ["a\rb", "c"]),
        (b'"text"\n""\n"c"', ["", "c"]),
    ],
)
def test_quotes_that_are_closed_are_read(tmp_path: Path, data: bytes, texts: list[str]) -> None:
    assert contents(spooled(packed(tmp_path / "in.csv", data), prompt_column="text")) == texts


@pytest.mark.parametrize(("name", "right"), [("in.csv", ".jsonl"), ("IN.CSV.gz", ".jsonl.gz")])
def test_jsonl_with_the_name_of_csv_is_named(tmp_path: Path, name: str, right: str) -> None:
    data = b'\n{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n'
    source = packed(tmp_path / name, data)
    for options in ({}, {"prompt_column": "text"}):
        with pytest.raises(InputError, match=rf"{name} holds JSONL, not CSV: give it a name that ends with {right}$"):
            spooled(source, **options)


def test_a_cut_compressed_csv_is_named(tmp_path: Path) -> None:
    source = tmp_path / "in.csv.gz"
    source.write_bytes(gzip.compress(CSV_TEXT * 1000)[:-12])
    with pytest.raises(InputError, match=r"in\.csv\.gz is not a readable CSV file: Truncated compressed stream"):
        spooled(source, prompt_column="text")


def test_csv_without_options_has_the_columns_of_requests(tmp_path: Path) -> None:
    data = b"custom_id,prompt,max_tokens,temperature,stop\nx,12,5,0.5,END\ny,Ho,,,\n"
    lines = spooled(packed(tmp_path / "in.csv", data))
    assert [line["body"] for line in lines] == [
        {"prompt": "12", "max_tokens": 5, "temperature": 0.5, "stop": "END"},
        {"prompt": "Ho"},
    ]
    with pytest.raises(InputError, match=r"in\.csv needs a column custom_id, and one of body, .* it has: id, n, text$"):
        spooled(packed(tmp_path / "in.csv", CSV_TEXT))


def test_csv_is_known_by_its_name(tmp_path: Path) -> None:
    for name, is_one in {"a.csv": True, "a.csv.gz": True, "a.jsonl": False, "a.gz": False, "a.parquet": True}.items():
        (tmp_path / name).write_bytes(b"{}")
        assert is_table(str(tmp_path / name)) == is_one
    assert format_of(str(tmp_path / "a.csv.gz")) == ".csv"


def test_the_same_rows_and_options_give_the_same_lines(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in.parquet", ROWS)
    options = RowOptions(template="{text} {n}", id_column="id", keep_columns=("n",))
    hashes = {write_spool(str(source), str(tmp_path / f"{n}.jsonl"), rows=options) for n in range(2)}
    assert len(hashes) == 1


@pytest.mark.proof
def test_csv_of_any_size_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """Arrow reads ahead of what is taken, up to 32 blocks."""
    source = tmp_path / "in.csv"
    with source.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text"])
        writer.writerows([f"some, text\n{number}" + "x" * 4000] for number in range(100_000))
    assert source.stat().st_size > 400_000_000
    rows, spool = RowOptions(prompt_column="text"), tmp_path / "lines.jsonl"
    write_spool(str(source), str(spool), Bounds(memory_bytes=360 << 20), rows=rows)
    with spool.open("rb") as lines:
        assert sum(1 for _ in lines) == 100_000
