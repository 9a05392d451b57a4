"""Lines that are no requests end as errors with `skip_invalid_requests`, and the others run."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import redis
from pyarrow import parquet

from jobs.batch.client import BatchRecord, InputChanged
from jobs.control import validate
from jobs.protocol.requests import Claim
from jobs.protocol.results import ApiError, Result
from tests.support.batch_steps import answer_all, begin, run_to_end, step
from tests.support.control_plane import chat_line, echo
from tests.support.kills import killed_at


def other(custom_id: str, **members: Any) -> bytes:
    """A line with other members than a good one's."""
    return json.dumps(json.loads(chat_line(custom_id)) | members).encode() + b"\n"


LINES = {
    "a": (chat_line("a", "one"), None),
    "b": (chat_line("b", model="gone"), "model_not_found"),
    "c": (other("c", url="/v1/responses"), "invalid_url"),
    "d": (b"\n \n" + other("d", method="GET"), "invalid_method"),
    "e": (chat_line("e", "two"), None),
    "f": (other("f", body=None), "missing_required_parameter"),
    "g": (chat_line("g", stream=True), "streaming_unsupported"),
    "h": (other("h", invalid_request=5, url=["x"]), "invalid_url"),
    "i": (b'{"invalid_request":{"code":"x","message":"y","param":null},' + chat_line("i", "three")[1:], None),
}
REASONS = {name: reason for name, (_, reason) in LINES.items()}


def write(path: Path, data: bytes = b"".join(line for line, _ in LINES.values())) -> Path:
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def answer(claim: Claim) -> Result:
    """What was said; a worker refuses a body without messages."""
    if isinstance(json.loads(claim.request.body)["messages"], list):
        return echo(claim)
    return ApiError(400, "no messages").result(f"req_{claim.key.line}")


def begin_skipping(client: redis.Redis, source: Path, **options: Any) -> BatchRecord:
    return begin(client, source, skip_invalid_requests=True, **options)


def reasons(output: Path) -> dict[str, str | None]:
    """Each line's code of its error, None for an answer."""
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert all(line["response"]["status_code"] == (400 if line["error"] else 200) for line in found)
    return {line["custom_id"]: line["error"] and line["error"]["code"] for line in found}


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_lines_that_are_no_requests_have_error_lines(redis_client: redis.Redis, tmp_path: Path, name: str) -> None:
    source = write(tmp_path / name)
    record = run_to_end(redis_client, begin_skipping(redis_client, source).id, answer)
    assert (record.state, record.total, record.failed) == ("completed", len(LINES), 6)
    assert reasons(tmp_path / "out.jsonl") == REASONS
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines[1]["error"]["message"].startswith("The provided model 'gone' is not supported by the Batch API.")
    assert lines[-1]["response"]["body"]["choices"][0]["message"]["content"] == "three"


def test_lines_keep_their_numbers(redis_client: redis.Redis, tmp_path: Path) -> None:
    """From which seeds and ids of results come."""
    run_to_end(redis_client, begin_skipping(redis_client, write(tmp_path / "in.jsonl")).id, answer)
    ids = [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [int(one.rpartition("_")[2]) for one in ids] == [1, 2, 3, 6, 7, 8, 9, 10, 11]


def test_rows_of_a_table_too(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    columns = {"custom_id": ["a", "b"], "prompt": ["x", "y"], "model": ["m", "gone"]}
    parquet.write_table(pyarrow.table(columns), source)
    run_to_end(redis_client, begin_skipping(redis_client, source).id, completion)
    assert reasons(tmp_path / "out.jsonl") == {"a": None, "b": "model_not_found"}


def completion(claim: Claim) -> Result:
    prompt = json.loads(claim.request.body).get("prompt")
    return echo(claim) if isinstance(prompt, str) else ApiError(400, "no prompt").result(f"req_{claim.key.line}")


@pytest.mark.parametrize("line", [b"{", b"[]", chat_line("").replace(b'""', b"5"), chat_line("a")])
def test_a_line_without_an_id_of_its_own_still_refuses_the_file(
    redis_client: redis.Redis, tmp_path: Path, line: bytes
) -> None:
    source = write(tmp_path / "in.jsonl", chat_line("a") + chat_line("b", model="gone") + line)
    record = step(redis_client, begin_skipping(redis_client, source).id)
    assert (record.state, [problem.line for problem in record.errors]) == ("failed", [3])


def test_placeholders_need_no_other_model_than_the_valid_lines(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", chat_line("a", model="gone") + chat_line("b"))
    record = run_to_end(redis_client, begin_skipping(redis_client, source, models=("dead", "m")).id, answer, ("m",))
    assert (record.state, record.failed) == ("completed", 1)


def test_a_file_without_a_valid_line_is_refused(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", chat_line("a", model="gone") + chat_line("b", model="gone"))
    record = step(redis_client, begin_skipping(redis_client, source).id)
    assert (record.state, [problem.line for problem in record.errors]) == ("failed", [1, 2])


def test_invalid_lines_may_be_skipped_from_a_later_start_on(redis_client: redis.Redis, tmp_path: Path) -> None:
    source, models = write(tmp_path / "in.jsonl", chat_line("a") + chat_line("b", model="gone")), ("m", "gone")
    batch = begin(redis_client, source, models=models).id
    step(redis_client, batch)
    answer_all(redis_client, answer, most=1)
    step(redis_client, batch)
    redis_client.flushall()
    run_to_end(redis_client, begin_skipping(redis_client, source).id, answer)
    assert reasons(tmp_path / "out.jsonl") == {"a": None, "b": "model_not_found"}


def test_without_a_model_the_file_is_refused(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = step(redis_client, begin_skipping(redis_client, write(tmp_path / "in.jsonl"), models=()).id)
    assert record.state == "failed"
    assert len(record.errors) == len(LINES)


def test_a_second_start_goes_on_and_judges_lines_by_the_models_of_its_own(
    redis_client: redis.Redis, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl")
    batch = begin_skipping(redis_client, source).id
    step(redis_client, batch)
    answer_all(redis_client, answer, most=4)
    step(redis_client, batch)
    redis_client.flushall()
    run_to_end(redis_client, begin_skipping(redis_client, source).id, answer)
    assert reasons(tmp_path / "out.jsonl") == REASONS
    redis_client.flushall()
    with pytest.raises(InputChanged, match="was begun with skip_invalid_requests True, not False"):
        begin(redis_client, source)
    models = ("m", "gone")
    run_to_end(redis_client, begin_skipping(redis_client, source, models=models).id, answer, models)
    assert reasons(tmp_path / "out.jsonl") == REASONS | {"b": None}


def test_an_answer_stays_where_its_model_is_no_longer_served(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", chat_line("a", model="gone") + chat_line("b", model="gone") + chat_line("c"))
    batch = begin_skipping(redis_client, source, models=("m", "gone")).id
    step(redis_client, batch)
    answer_all(redis_client, answer, ("gone",), most=1)
    step(redis_client, batch)
    redis_client.flushall()
    run_to_end(redis_client, begin_skipping(redis_client, source).id, answer)
    found = reasons(tmp_path / "out.jsonl")
    assert found.pop("c") is None
    assert sorted(found.values(), key=str) == [None, "model_not_found"]


def test_failed_lines_run_again_and_end_alike(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl")
    run_to_end(redis_client, begin_skipping(redis_client, source).id, answer)
    redis_client.flushall()
    record = run_to_end(redis_client, begin_skipping(redis_client, source, retry_failed=True).id, answer)
    assert (record.completed, record.failed) == (3, 6)
    assert reasons(tmp_path / "out.jsonl") == REASONS


@pytest.mark.parametrize("name", ["write_spool", "mark_invalid", "note_source"])
@pytest.mark.parametrize("after", [False, True])
def test_a_kill_while_lines_are_judged_changes_nothing(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: bool
) -> None:
    source = write(tmp_path / "in.jsonl.gz")
    batch = begin_skipping(redis_client, source).id
    with killed_at(monkeypatch, validate, name, after):
        step(redis_client, batch)
    redis_client.flushall()
    run_to_end(redis_client, begin_skipping(redis_client, source).id, answer)
    assert reasons(tmp_path / "out.jsonl") == REASONS
