"""What goes beyond the hosted service, still through the official client: early results, other
formats, other limits.
"""

import dataclasses
import gzip
import io
import json
from typing import Any

import openai
import pyarrow
import pytest
from pyarrow import parquet

from api.settings import ApiSettings
from tests.contract.calls import lines, results, said, submit, wait
from tests.contract.conftest import SHORT_WINDOW
from tests.contract.shapes import Recorder
from tests.contract.test_validation import entries
from tests.support.api_server import official_client, running_api
from tests.support.batch_stack import AWAY, BatchStack, serving_the_away
from tests.support.control_plane import chat_line
from tests.support.waiting import wait_until


def test_results_are_read_while_the_batch_runs(client: openai.OpenAI, stack: BatchStack) -> None:
    waiting = [chat_line(f"later {number}", str(number), AWAY) for number in range(5)]
    batch = submit(client, waiting[0] + lines("one", "two", "three") + b"".join(waiting[1:]))
    output = wait_until(lambda: client.batches.retrieve(batch.id).output_file_id, 60, "the first result")
    wait_until(lambda: read(client, output, 0)[1] == 3, 60, "three results")
    first, last, incomplete = read(client, output, 0, limit=2)
    assert (len(first), last, incomplete) == (2, 2, True)
    rest, last, incomplete = read(client, output, last)
    assert (sorted(first + rest), last, incomplete) == (["c1", "c2", "c3"], 3, True)
    assert read(client, output, 3) == ([], 3, True)
    assert sorted(line["custom_id"] for line in results(client, output)) == ["c1", "c2", "c3"]
    assert output not in [file.id for file in client.files.list(purpose="batch_output")]
    with serving_the_away(stack):
        assert wait(client, batch.id).output_file_id == output
    more, last, incomplete = read(client, output, last)
    assert (sorted(more), last, incomplete) == ([f"later {number}" for number in range(5)], 8, False)
    assert read(client, output, 0, limit=2)[0] == first
    assert [line["custom_id"] for line in results(client, output)] == [
        "later 0",
        "c1",
        "c2",
        "c3",
        *(f"later {n}" for n in range(1, 5)),
    ]


@pytest.mark.parametrize(
    "query",
    [
        {"offset": "-1"},
        {"offset": "far"},
        {"offset": "9" * 30},
        {"limit": "0", "offset": "0"},
        {"limit": "x", "offset": "0"},
    ],
)
def test_a_place_that_cannot_be_is_refused(client: openai.OpenAI, query: dict[str, str]) -> None:
    output = wait(client, submit(client, lines("one")).id).output_file_id
    assert output is not None
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.content(output, extra_query=query)
    assert caught.value.param == next(iter(query))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_compressed_lines_are_read(client: openai.OpenAI, suffix: str) -> None:
    plain = lines("one", "two")
    packed = gzip.compress(plain) if suffix.endswith("gz") else bytes(pyarrow.compress(plain, "zstd", asbytes=True))
    batch = wait(client, submit(client, packed, name=f"input{suffix}").id)
    assert [said(line) for line in results(client, batch.output_file_id)] == ["one", "two"]
    assert client.files.retrieve(batch.output_file_id or "").filename == f"{batch.id}_output.jsonl"


def test_parquet_comes_back_as_parquet(client: openai.OpenAI) -> None:
    rows = [json.loads(line) for line in lines("one", "fail 400", "three").splitlines()]
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist([{**row, "body": json.dumps(row["body"])} for row in rows]), buffer)
    batch = wait(client, submit(client, buffer.getvalue(), name="input.parquet").id)
    output = client.files.retrieve(batch.output_file_id or "")
    assert output.filename == f"{batch.id}_output.parquet"
    table = parquet.read_table(io.BytesIO(client.files.content(output.id).content))
    assert table["custom_id"].to_pylist() == ["c1", "c3"]
    assert [line["custom_id"] for line in results(client, batch.error_file_id)] == ["c2"]


def test_an_operator_sets_the_limits(stack: BatchStack) -> None:
    small = dataclasses.replace(stack.settings, max_batch_lines=2, max_file_bytes=1000)
    with running_api(small) as url, official_client(url, on_answer=(recorder := Recorder())) as client:
        batch = wait(client, submit(client, lines("one", "two", "three")).id)
        assert entries(batch) == [("too_many_tasks", None, None)]
        assert wait(client, submit(client, lines("one", "two")).id).status == "completed"
        with pytest.raises(openai.APIStatusError) as caught:
            submit(client, lines("x" * 1000))
        assert caught.value.status_code == 413
    assert recorder.faults == []


def test_windows_are_the_operators_choice(stack: BatchStack) -> None:
    with running_api(ApiSettings(redis_url=stack.redis_url, file_store=str(stack.store))) as url:
        with official_client(url) as client, pytest.raises(openai.BadRequestError) as caught:
            submit(client, lines("one"), completion_window=SHORT_WINDOW)
        assert (caught.value.param, caught.value.code) == ("completion_window", "invalid_value")
        assert "24h" in caught.value.message


def read(client: openai.OpenAI, file_id: str, offset: int, **query: Any) -> tuple[list[str], int, bool]:
    """Custom ids from a place of the completion log on, the place after them, and whether more will
    come.
    """
    answer = client.files.with_raw_response.content(file_id, extra_query={"offset": offset, **query})
    found = [json.loads(line)["custom_id"] for line in answer.content.splitlines()]
    return found, int(answer.headers["x-last-line"]), {"true": True, "false": False}[answer.headers["x-incomplete"]]
