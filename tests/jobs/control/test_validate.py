"""Validation names every bad line with its number, in bounded memory, or makes a plan of them
all.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import redis
from pyarrow import parquet

from jobs.batch import input_files, source_check
from jobs.batch.client import BatchRecord
from jobs.batch.plan import Sorter
from jobs.control import validate
from jobs.protocol.lines import read_line
from jobs.protocol.requests import Claim
from jobs.protocol.results import ApiError, Result
from jobs.protocol.unknown_members import UnknownMember
from jobs.protocol.validation import decode_body, parse_call
from jobs.queue import keys
from jobs.queue.registry import WorkerRecord, WorkerState
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from tests.support.batch_steps import begin, run_to_end, step
from tests.support.control_plane import ROOT, chat_line, echo, read_jsonl, write_input


def validated(client: redis.Redis, source: Path, data: bytes, **options: Any) -> BatchRecord:
    source.write_bytes(data)
    return step(client, begin(client, source, **options).id)


def codes(record: BatchRecord) -> list[tuple[int | None, str, str | None]]:
    return [(problem.line, problem.code, problem.param) for problem in record.errors]


def changed(custom_id: str, /, **fields: Any) -> bytes:
    line = json.loads(chat_line(custom_id)) | fields
    return json.dumps({name: value for name, value in line.items() if value is not ...}).encode() + b"\n"


def test_every_bad_line_is_named(redis_client: redis.Redis, tmp_path: Path) -> None:
    lines = [
        chat_line("good"),
        b"not json\n",
        b'{"half": \n',
        b"\xff\xfe\n",
        b"[1]\n",
        b"\n",
        changed("x1", custom_id=...),
        changed("x2", method="GET"),
        changed("x3", method=...),
        changed("x4", url="/v1/responses"),
        changed("x5", body=...),
        changed("x6", body="text"),
        chat_line("x7", stream=True),
        chat_line("x8", model="other"),
        chat_line("x9", model=None),
        chat_line("good"),
        chat_line("x10", temperature=-1),
    ]
    record = validated(redis_client, tmp_path / "in.jsonl", b"".join(lines))
    assert record.state == "failed"
    assert (record.total, record.completed, record.failed) == (0, 0, 0)
    assert codes(record) == [
        (2, "invalid_json_line", None),
        (3, "invalid_json_line", None),
        (4, "invalid_json_line", None),
        (5, "invalid_json_line", None),
        (7, "missing_required_parameter", "custom_id"),
        (8, "invalid_method", "method"),
        (9, "missing_required_parameter", "method"),
        (10, "invalid_url", "url"),
        (11, "missing_required_parameter", "body"),
        (12, "invalid_type", "body"),
        (13, "streaming_unsupported", "body.stream"),
        (14, "model_not_found", "body.model"),
        (15, "missing_required_parameter", "body.model"),
        (16, "duplicate_custom_id", "custom_id"),
    ]
    assert "Line 1 has it" in record.errors[-1].message
    assert "Served here: m" in record.errors[-3].message


def test_unknown_members_are_counted_or_refused(redis_client: redis.Redis, tmp_path: Path) -> None:
    lines = [chat_line("a", max_token=5, user="u"), chat_line("b"), chat_line("c", max_token=5, tempersture=0)]
    data = b"".join(lines)
    refused = validated(redis_client, tmp_path / "in.jsonl", data, strict_parameters=True)
    assert codes(refused) == [(line, "unknown_parameter", "body.max_token") for line in (1, 3)]
    counted = validated(redis_client, tmp_path / "in.jsonl", data)
    expected = [UnknownMember("max_token", 2, "max_tokens"), UnknownMember("tempersture", 1, "temperature")]
    assert (counted.state, counted.unknown_members) == ("in_progress", expected)


def test_at_most_a_thousand_are_listed_in_line_order_and_the_rest_counted(
    redis_client: redis.Redis, tmp_path: Path
) -> None:
    lines = [b"bad\n" if number % 2 else chat_line("same") for number in range(3000)]
    record = validated(redis_client, tmp_path / "in.jsonl", b"".join(lines))
    assert len(record.errors) == 1001
    bad, repeated = ("invalid_json_line", None), ("duplicate_custom_id", "custom_id")
    assert codes(record)[:4] == [(2, *bad), (3, *repeated), (4, *bad), (5, *repeated)]
    assert record.errors[-1].line is None
    assert record.errors[-1].message.startswith("1999 more lines are bad")


def test_all_duplicates_are_found(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(source_check, "Sorter", lambda size, folder: Sorter(size, folder, 50))
    rng = random.Random(seed)
    names = [f"id{rng.randrange(300)}" for _ in range(600)]
    record = validated(redis_client, tmp_path / "in.jsonl", b"".join(map(chat_line, names)))
    first = {name: number for number, name in reversed(list(enumerate(names, 1)))}
    expected = [number for number, name in enumerate(names, 1) if first[name] != number]
    assert [problem.line for problem in record.errors] == expected, seed


def test_a_line_too_long_is_named(redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "MAX_LINE_BYTES", 1000)
    record = validated(
        redis_client, tmp_path / "in.jsonl", chat_line("a") + chat_line("b", "x" * 2000) + chat_line("c")
    )
    assert codes(record) == [(2, "line_too_long", None)]


def test_the_default_model_is_filled_in(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(chat_line("a", model=None) + chat_line("b", model="m"))
    record = run_to_end(redis_client, begin(redis_client, source, default_model="m").id)
    assert (record.state, record.completed) == ("completed", 2)
    assert [line["response"]["body"]["model"] for line in read_jsonl(tmp_path / "out.jsonl")] == ["m", "m"]


def judge(claim: Claim) -> Result:
    """What a worker does first with a request."""
    try:
        parse_call(claim.request.endpoint, decode_body(claim.request.body))
    except ApiError as error:
        return error.result(f"req_{claim.key.line}")
    return echo(claim)


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet"])
@pytest.mark.parametrize("default_model", [None, "m"])
def test_odd_lines_go_all_the_way_and_stop_no_process(
    redis_client: redis.Redis, tmp_path: Path, output: str, default_model: str | None
) -> None:
    """What validation lets pass, every later stage reads; a bad value in a body costs that line
    alone.
    """
    model = None if default_model else "m"
    ids = ["plain", "\x00\u2028 \U0001f600 e\u0301", '"\\"', "\ufffe\uffff", "ﬀ\t/"]
    good = [chat_line(custom_id, "yes", model) for custom_id in ids]
    good.append(
        chat_line("outer", "yes", model).replace(b'{"custom_id"', b'{"x": "\\ud800", "y": NaN, "z": 1e999, "custom_id"')
    )
    good.append(chat_line("ignored", "yes", model, unknown="\ud800", deep=json.loads("[" * 400 + "]" * 400)))
    bad = [
        chat_line(f"bad{n}", "no", model, **{name: 0})
        for n, name in enumerate(["stop", "temperature", "temperature", "seed", "top_p"])
    ]
    values = [b'"\\ud800"', b"1e999", b"NaN", b"9" * 5000, b"-Infinity"]
    bad = [line.replace(b": 0", b": " + value) for line, value in zip(bad, values, strict=True)]
    bad.append(chat_line("badtext", "\udfff", model))
    bad.append(chat_line("badrole", "no", model).replace(b'"role": "user"', b'"role": ' + b"[" * 300 + b"]" * 300))
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"".join(line for pair in zip(good, bad, strict=True) for line in pair))
    batch = begin(redis_client, source, default_model=default_model, output=str(tmp_path / output)).id
    record = run_to_end(redis_client, batch, judge)
    assert (record.state, record.completed, record.failed) == ("completed", len(good), len(bad))
    expected = [read_line(line).custom_id for line in source.read_bytes().splitlines()]
    if output == "out.jsonl":
        lines = read_jsonl(tmp_path / output)
        found = [(line["custom_id"], line["response"]["status_code"]) for line in lines]
    else:
        table = parquet.read_table(tmp_path / output)
        found = list(zip(table["custom_id"].to_pylist(), table["status_code"].to_pylist(), strict=True))
    assert found == [(custom_id, 400 if n % 2 else 200) for n, custom_id in enumerate(expected)]


def test_what_is_not_utf8_is_named(redis_client: redis.Redis, tmp_path: Path) -> None:
    lines = [b"\xef\xbb\xbf", chat_line("a"), b"\xef\xbb\xbf", chat_line("b"), chat_line("c").replace(b"hi", b"\xfc")]
    record = validated(redis_client, tmp_path / "in.jsonl", b"".join(lines))
    assert codes(record) == [(2, "invalid_json_line", None), (3, "invalid_json_line", None)]
    assert "byte order mark" in record.errors[0].message
    assert "not UTF-8" in record.errors[1].message
    for codec in ("utf-16", "utf-16-le"):
        text = (chat_line("a") + chat_line("b")).decode().encode(codec)
        record = validated(redis_client, tmp_path / "in.jsonl", text)
        assert record.state == "failed"
        assert {problem.code for problem in record.errors} == {"invalid_json_line"}


def test_only_the_batch_s_endpoint_is_allowed(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = validated(redis_client, tmp_path / "in.jsonl", chat_line("a"), endpoint="/v1/completions")
    assert codes(record) == [(1, "invalid_url", "url")]


def test_without_names_the_registry_says_what_is_served(redis_client: redis.Redis, tmp_path: Path) -> None:
    Queue(redis_client).register_worker(WorkerRecord("w", ["served"], "ready", 100, 1.0, "h", 1))
    data = chat_line("a", model="served") + chat_line("b", model="m")
    record = validated(redis_client, tmp_path / "in.jsonl", data, models=None)
    assert codes(record) == [(2, "model_not_found", "body.model")]
    assert "Served here: served" in record.errors[0].message


@pytest.mark.parametrize("state", ["loading", "initializing"])
def test_lines_may_name_a_model_that_a_worker_is_loading(
    redis_client: redis.Redis, tmp_path: Path, state: WorkerState
) -> None:
    Queue(redis_client).register_worker(WorkerRecord("w", ["coming"], state, 0, 1.0, "h", 1))
    Queue(redis_client).register_worker(WorkerRecord("gone", ["never"], "stopped", 0, 1.0, "h", 1))
    data = chat_line("a", model="coming") + chat_line("b", model="never")
    record = validated(redis_client, tmp_path / "in.jsonl", data, models=None)
    assert codes(record) == [(2, "model_not_found", "body.model")]
    assert "Served here: coming" in record.errors[0].message


def test_a_model_that_an_autoscaler_starts_needs_no_worker(redis_client: redis.Redis, tmp_path: Path) -> None:
    """Also where Redis came back empty, and names the model of another worker alone."""
    queue = Queue(redis_client, QueueSettings(on_demand_models=("asleep",)))
    queue.register_worker(WorkerRecord("w", ["served"], "ready", 100, 1.0, "h", 1))
    for model, problems in (("served", []), ("typo", [(2, "model_not_found", "body.model")])):
        source = tmp_path / model / "in.jsonl"
        source.parent.mkdir()
        source.write_bytes(chat_line("a", model="asleep") + chat_line("b", model=model))
        record = step(redis_client, begin(redis_client, source, models=None).id, queue)
        assert (record.state, codes(record)) == ("failed" if problems else "in_progress", problems)


class Pauses:
    """In place of `time` in the module that waits: what happens meanwhile."""

    monotonic, time = time.monotonic, time.time

    def __init__(self, happens: Callable[[], None]) -> None:
        self.count = 0
        self._happens = happens

    def sleep(self, _: float) -> None:
        """Let it happen once, and no time pass."""
        if not self.count:
            self._happens()
        self.count += 1


@pytest.mark.parametrize("known", ["of the settings", "of another worker"])
def test_a_batch_waits_for_a_model_that_an_emptied_redis_does_not_know_yet(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    queue = Queue(redis_client, QueueSettings(on_demand_models=("asleep",) if known == "of the settings" else ()))
    if known == "of another worker":
        queue.register_worker(WorkerRecord("first", ["another"], "ready", 100, 1.0, "h", 1))
    worker = WorkerRecord("w", ["m"], "ready", 100, 1.0, "h", 1)
    pauses = Pauses(lambda: Queue(redis_client).register_worker(worker))
    monkeypatch.setattr(validate, "time", pauses)
    source = write_input(tmp_path / "in.jsonl", 1)
    waiting = begin(redis_client, source, models=None, input_file_id="file-1", endpoint="/v1/chat/completions")
    assert step(redis_client, waiting.id, queue).state == "in_progress"
    assert pauses.count == 1


def test_a_batch_does_not_wait_for_a_model_where_the_registry_is_old(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Queue(redis_client).register_worker(WorkerRecord("w", ["another"], "ready", 100, 1.0, "h", 1))
    redis_client.decrby(keys.REGISTRY_SINCE, 3600_000)
    monkeypatch.setattr(validate, "time", Pauses(lambda: pytest.fail("it waits")))
    source = write_input(tmp_path / "in.jsonl", 2)
    refused = begin(redis_client, source, models=None, input_file_id="file-1", endpoint="/v1/chat/completions")
    assert codes(step(redis_client, refused.id)) == [(line, "model_not_found", "body.model") for line in (1, 2)]


@pytest.mark.parametrize("data", [b"", b"\n\n  \n", b"\xef\xbb\xbf"])
def test_an_empty_file_gives_an_empty_output(redis_client: redis.Redis, tmp_path: Path, data: bytes) -> None:
    record = validated(redis_client, tmp_path / "in.jsonl", data)
    assert (record.state, record.total) == ("in_progress", 0)
    assert run_to_end(redis_client, record.id).state == "completed"
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_broken_file_is_refused_as_a_whole(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = validated(redis_client, tmp_path / "in.parquet", b"junk")
    assert (record.state, codes(record)) == ("failed", [(None, "invalid_file", None)])


def test_parquet_rows_are_numbered_like_lines(redis_client: redis.Redis, tmp_path: Path) -> None:
    rows = [{"custom_id": f"c{n % 3}", "prompt": "x", "model": "m"} for n in range(4)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    record = step(redis_client, begin(redis_client, tmp_path / "in.parquet").id)
    assert codes(record) == [(4, "duplicate_custom_id", "custom_id")]


@pytest.mark.proof
def test_memory_does_not_follow_the_file(redis_client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    """150,000 lines of 1 KB in a process of its own: less than 60 MB more at the peak than its
    imports take.
    """
    source = write_input(tmp_path / "in.jsonl", 150_000, user="x" * 900)
    record = begin(redis_client, source)
    script = (
        "import sys\nfrom jobs.control.runner import Runner\nfrom jobs.queue.connection import connect\n"
        "from jobs.queue.request_queue import Queue\n"
        "peak = lambda: int(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
        "imported = peak(); Runner(Queue(connect(sys.argv[1]))).run(sys.argv[2])\n"
        "print(peak() - imported)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, redis_url, record.id], cwd=ROOT, capture_output=True, check=True
    )
    assert int(done.stdout) < 60_000
    assert Queue(redis_client).batch_fields(record.id).total == 150_000
