"""What a batch file may be called and hold: a name without a suffix leaves it to the content, and
one that contradicts its content is refused.
"""

import gzip
import io
import tempfile
from typing import Any

import openai
import pyarrow
import pytest
from pyarrow import parquet

from tests.contract.calls import CHAT, WINDOW, lines, results, said, wait

REFUSED = "Invalid file format for Batch API. Must be .jsonl"
CONTENT = lines("one", "two")


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, "zstd", asbytes=True))


def table() -> bytes:
    """The same lines as Parquet."""
    file = io.BytesIO()
    messages = [[{"role": "user", "content": text}] for text in ("one", "two")]
    parquet.write_table(pyarrow.table({"custom_id": ["c1", "c2"], "model": ["m", "m"], "messages": messages}), file)
    return file.getvalue()


def named(content: bytes, name: str) -> io.BytesIO:
    """A file in memory that has a name."""
    file = io.BytesIO(content)
    file.name = name
    return file


KINDS = {"jsonl": CONTENT, "gzip": gzip.compress(CONTENT), "zstd": zstd(CONTENT), "parquet": table()}
WAYS: dict[str, tuple[Any, str]] = {
    "bytes": (CONTENT, "upload"),
    "memory": (io.BytesIO(CONTENT), "upload"),
    "a name without suffix": (("requests", CONTENT), "requests"),
    "memory with a name": (named(CONTENT, "/tmp/requests.jsonl"), "requests.jsonl"),
    "a name of stdin": (("-", CONTENT), "-"),
    "a name in capitals": (("REQUESTS.JSONL", CONTENT), "REQUESTS.JSONL"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_file_in_memory_is_taken(client: openai.OpenAI, way: str) -> None:
    given, name = WAYS[way]
    file = client.files.create(file=given, purpose="batch")
    assert (file.filename, file.bytes, client.files.content(file.id).content) == (name, len(CONTENT), CONTENT)


def test_a_temporary_file_is_taken(client: openai.OpenAI) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(CONTENT)
        file.seek(0)
        assert client.files.create(file=file, purpose="batch").filename == str(file.name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_runs_on_a_file_without_a_suffix(client: openai.OpenAI, kind: str) -> None:
    file = client.files.create(file=KINDS[kind], purpose="batch")
    assert client.files.content(file.id).content == KINDS[kind]
    batch = wait(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window=WINDOW).id)
    assert batch.status == "completed", batch.errors
    output = client.files.retrieve(batch.output_file_id or "")
    if kind == "parquet":
        assert output.filename.endswith(".parquet")
        rows = parquet.read_table(io.BytesIO(client.files.content(output.id).content)).to_pylist()
        assert [(row["custom_id"], row["text"]) for row in rows] == [("c1", "one"), ("c2", "two")]
    else:
        assert [said(line) for line in results(client, output.id)] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.jsonl", KINDS["gzip"]),
        ("in.jsonl", KINDS["zstd"]),
        ("in.jsonl", KINDS["parquet"]),
        ("in.jsonl.gz", CONTENT),
        ("in.jsonl.zst", KINDS["gzip"]),
        ("in.parquet", CONTENT),
        ("in.csv", CONTENT),
        ("in.json", CONTENT),
        ("in.txt", CONTENT),
    ],
)
def test_a_suffix_that_contradicts_is_refused(client: openai.OpenAI, name: str, content: bytes) -> None:
    refused(client, (name, content))


@pytest.mark.parametrize("name", ["in.jsonl", "in"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{malformed json",
        b"{\n" + CONTENT,
        b"[1]\n",
        b"custom_id,prompt\na,b\n",
        b"\xff\xfe{\0}\0",
        b"PK\3\4",
        b"1",
    ],
)
def test_what_is_no_jsonl_is_refused_at_its_upload(client: openai.OpenAI, name: str, content: bytes) -> None:
    refused(client, (name, content))


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + CONTENT,
        b"\r\n\n" + CONTENT,
        b"{}\n" + CONTENT,  # what a line lacks is for the batch to say
        CONTENT + b"{\n",
        b'{"custom_id": "' + b"x" * 2_000_000 + b"\n",  # longer than what is looked at
    ],
    ids=["a byte order mark", "blank lines", "an empty object", "a bad second line", "a long line"],
)
def test_what_comes_later_is_not_looked_at(client: openai.OpenAI, content: bytes) -> None:
    assert client.files.create(file=("in.jsonl", content), purpose="batch").bytes == len(content)


def test_other_files_may_hold_anything(client: openai.OpenAI) -> None:
    assert client.files.create(file=b"{malformed", purpose="user_data").filename == "upload"


def refused(client: openai.OpenAI, file: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=file, purpose="batch")
    assert caught.value.body["message"].startswith(REFUSED)  # type: ignore[index]
    assert (caught.value.type, caught.value.param, caught.value.code) == ("invalid_request_error", None, None)
