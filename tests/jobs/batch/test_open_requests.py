"""Each line of an open batch counts once, through repeats, kills and several processes."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import redis

from jobs.batch import open_requests
from jobs.batch.append_groups import group_of
from jobs.batch.client import BatchRecord, BatchSpec, cancel_batch, create_batch, get_batch
from jobs.batch.input_files import InputLine
from jobs.batch.line_index import INDEX_NAME, LineIndex
from jobs.batch.manifest import Manifest, load_manifest
from jobs.batch.open_requests import (
    APPEND_LOCK,
    DATABASE_NAME,
    NEXT_LOCK,
    SOURCE_NAME,
    AppendBounds,
    AppendOutcome,
    CheckedLines,
    OpenRequests,
)
from jobs.batch.plan import PLAN_NAME, read_plan
from jobs.batch.rebuild import rebuild
from jobs.batch.result_files import publish_input
from jobs.control import advance
from jobs.protocol.ids import FILE, new_id
from jobs.protocol.results import ApiError
from jobs.queue.request_queue import Queue
from jobs.store.storage import Busy, StoreError, exclusive
from tests.support.batch_steps import answer_all, run_to_end, step
from tests.support.control_plane import chat_line, echo, read_jsonl
from tests.support.rollback import EarlierRedis
from tests.support.waiting import wait_until

SERVED = {"m": None}
ANY = AppendBounds()


def spec_in(folder: Path, **options: object) -> BatchSpec:
    root = folder / "batch"
    return BatchSpec(
        input=str(root / SOURCE_NAME),
        root=str(root),
        models=("m",),
        error_file="inline",
        skip_invalid_requests=True,
        streams_input=True,
        **options,  # type: ignore[arg-type]
    )


def numbered(*raws: bytes) -> list[InputLine]:
    return [InputLine(number, 0, raw) for number, raw in enumerate(raws, 1)]


def lines(*names: str, content: str = "hi") -> list[InputLine]:
    return numbered(*(chat_line(name, content) for name in names))


def append(spec: BatchSpec, *names: str, content: str = "hi") -> AppendOutcome:
    return OpenRequests(spec).append(lines(*names, content=content), SERVED, ANY)


def begin(client: redis.Redis, folder: Path) -> BatchRecord:
    return create_batch(client, spec_in(folder))


def stored_ids(spec: BatchSpec) -> list[str]:
    """The ids of the lines that count, checked against plan and line index."""
    found = OpenRequests(spec).committed()
    content = Path(spec.input).read_bytes()[: found.bytes]
    with open(Path(spec.root, PLAN_NAME), "rb") as file:
        plan = read_plan(file, 0, found.lines)
    assert sorted(entry.line for entry in plan) == list(range(1, found.lines + 1))
    ids = [json.loads(line)["custom_id"] for line in content.splitlines()]
    for entry in plan:
        line = json.loads(content[entry.offset : entry.offset + entry.length])
        assert line["custom_id"] == ids[entry.line - 1]
    if spec.of_api:
        with LineIndex(spec.root, spec.input) as index:
            assert [index.custom_id(number) for number in range(1, found.lines + 1)] == ids
    return ids


@pytest.fixture
def spec(tmp_path: Path) -> BatchSpec:
    """An open batch of the API on disk."""
    spec = spec_in(tmp_path, input_file_id="file-1", endpoint="/v1/chat/completions")
    OpenRequests(spec).create()
    return spec


def test_what_cannot_be_read_for_a_moment_is_said_of_the_file_store(
    spec: BatchSpec, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    append(spec, "a")
    with LineIndex(spec.root, spec.input) as index, monkeypatch.context() as patch:
        patch.setattr(os, "pread", stale)
        with pytest.raises(StoreError, match=r"lines\.index"):
            index.custom_id(1)
    named = msgspec.structs.replace(spec, input_file_id=new_id(FILE, 0.0))
    os.unlink(spec.input)
    with pytest.raises(StoreError, match=f"cannot link {spec.input} to"):
        publish_input(queue, Manifest(batch_id="batch_a", created_at=0.0, spec=named))


def test_lines_are_appended_once(spec: BatchSpec) -> None:
    assert append(spec, "a", "b") == (2, 0, [], 2, 126)
    assert append(spec, "b", "c", "c") == (1, 2, [], 3, 189)
    assert stored_ids(spec) == ["a", "b", "c"]
    found = OpenRequests(spec).committed()
    assert (found.models, found.endpoints, found.closed) == (["m"], ["/v1/chat/completions"], False)
    assert 0 < found.body_bytes < found.bytes


def test_an_id_of_another_line_is_named_and_the_first_counts(spec: BatchSpec) -> None:
    append(spec, "a", "b")
    outcome = append(spec, "c", "b", content="other")
    assert (outcome.appended, outcome.repeated, outcome.total) == (1, 0, 3)
    [problem] = outcome.problems
    assert (problem.code, problem.line, problem.param) == ("duplicate_custom_id", 2, "custom_id")
    assert "'b'" in problem.message
    assert "Line 2 has it" in problem.message


def test_bad_lines_get_placeholders_and_those_without_an_id_are_listed(spec: BatchSpec) -> None:
    bad = numbered(
        b"{broken\n",
        b'{"custom_id": "no-body", "method": "POST", "url": "/v1/chat/completions"}\n',
        chat_line("good"),
        b'{"custom_id": 7, "method": "POST"}\n',
        chat_line("elsewhere", model="unknown"),
        b"[1]\n",
    )
    bad.append(InputLine(7, 0, None))
    outcome = OpenRequests(spec).append(bad, SERVED, ANY)
    assert (outcome.appended, outcome.total) == (3, 3)
    assert [problem.line for problem in outcome.problems] == [1, 4, 6, 7]
    assert stored_ids(spec) == ["no-body", "good", "elsewhere"]
    assert OpenRequests(spec).committed().models == ["m"]
    assert OpenRequests(spec).append(bad, SERVED, ANY).repeated == 3


def test_a_line_that_is_stored_is_no_longer_than_any_may_be(spec: BatchSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its line feed, and with the error of an invalid one in its placeholder."""
    fits, invalid = chat_line("a"), chat_line("b", model="unknown")
    monkeypatch.setattr(open_requests, "MAX_LINE_BYTES", len(fits))
    longer = chat_line("c", "hi!").rstrip()
    outcome = OpenRequests(spec).append(numbered(fits.rstrip(), invalid, longer), SERVED, ANY)
    assert (outcome.appended, [problem.line for problem in outcome.problems]) == (1, [2, 3])
    assert "longer than" in outcome.problems[1].message


def test_bounds_refuse_what_would_exceed_them(spec: BatchSpec) -> None:
    append(spec, "a", "b")
    for bounds, status in (
        (AppendBounds(lines=2), 400),
        (AppendBounds(bytes=300), 400),
        (AppendBounds(tokens=40), 429),
    ):
        with pytest.raises(ApiError) as raised:
            OpenRequests(spec).append(lines("c", "d", "e"), SERVED, bounds)
        assert raised.value.status == status
        assert OpenRequests(spec).append(lines("a", "b"), SERVED, bounds).repeated == 2
    assert stored_ids(spec) == ["a", "b"]


def test_a_closed_batch_takes_nothing(spec: BatchSpec) -> None:
    append(spec, "a")
    OpenRequests(spec).close()
    OpenRequests(spec).close()
    with pytest.raises(ApiError) as raised:
        append(spec, "a")
    assert raised.value.status == 409


def test_what_a_killed_append_left_is_cut_off(spec: BatchSpec) -> None:
    append(spec, "a")
    for name in (SOURCE_NAME, PLAN_NAME, INDEX_NAME):
        with open(Path(spec.root, name), "ab") as file:
            file.write(b"\0torn" * 10)
    assert append(spec, "b").total == 2
    assert stored_ids(spec) == ["a", "b"]
    with open(spec.input, "ab") as file:
        file.write(b"torn")
    OpenRequests(spec).close()
    assert [json.loads(line)["custom_id"] for line in Path(spec.input).read_bytes().splitlines()] == ["a", "b"]


def test_its_lines_run_before_it_is_closed(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = begin(redis_client, tmp_path)
    batch, spec = record.id, record.spec
    assert (step(redis_client, batch).state, record.open) == ("in_progress", True)
    append(spec, "a", "b")
    assert step(redis_client, batch).waiting == 2
    assert answer_all(redis_client) == 2
    append(spec, "c")
    record = step(redis_client, batch)
    assert (record.state, record.total, record.completed, record.waiting) == ("in_progress", 3, 2, 1)
    answer_all(redis_client)
    assert step(redis_client, batch).state == "in_progress"
    OpenRequests(spec).close()
    record = run_to_end(redis_client, batch)
    assert (record.state, record.open, record.total, record.completed) == ("completed", False, 3, 3)
    assert [line["custom_id"] for line in read_jsonl(tmp_path / "batch" / "output.jsonl")] == ["a", "b", "c"]


def test_a_claim_asks_for_lines_that_were_appended_while_others_waited(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are fed before the ready list is empty."""
    monkeypatch.setattr(advance, "WINDOW_LINES", 8)
    record, queue = begin(redis_client, tmp_path), Queue(redis_client)
    step(redis_client, record.id)
    append(record.spec, *(f"a{number}" for number in range(6)))
    assert step(redis_client, record.id).waiting == 6
    assert queue.batch_fields(record.id).low_water == -1
    append(record.spec, "b")
    assert step(redis_client, record.id).waiting == 6
    assert queue.batch_fields(record.id).low_water == 4
    answer_all(redis_client, most=2)
    assert step(redis_client, record.id).waiting == 5


def test_a_bad_line_becomes_an_error_line(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = begin(redis_client, tmp_path)
    bad = b'{"custom_id": "b", "method": "GET", "url": "/v1/chat/completions", "body": {"model": "m"}}\n'
    OpenRequests(record.spec).append(numbered(chat_line("a"), bad, chat_line("c")), SERVED, ANY)
    OpenRequests(record.spec).close()

    def answer(claim):  # type: ignore[no-untyped-def]
        if not isinstance(json.loads(claim.request.body)["messages"], list):
            return ApiError(400, "refused").result(f"req_{claim.key.line}")
        return echo(claim)

    record = run_to_end(redis_client, record.id, answer)
    found = read_jsonl(tmp_path / "batch" / "output.jsonl")
    assert [line["custom_id"] for line in found] == ["a", "b", "c"]
    assert [line["response"]["status_code"] for line in found] == [200, 400, 200]
    assert found[1]["response"]["body"]["error"]["code"] == "invalid_method"
    assert (record.completed, record.failed) == (2, 1)


def test_a_cancelled_batch_has_an_error_line_for_each_of_its_lines(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = begin(redis_client, tmp_path)
    step(redis_client, record.id)
    append(record.spec, "a")
    step(redis_client, record.id)
    answer_all(redis_client)
    append(record.spec, "b", "c")
    cancel_batch(redis_client, record.id)
    append(record.spec, "d")
    record = run_to_end(redis_client, record.id)
    assert (record.state, record.completed, record.failed) == ("cancelled", 1, 3)
    with pytest.raises(ApiError):
        append(record.spec, "e")
    found = read_jsonl(tmp_path / "batch" / "output.jsonl")
    assert [(line["custom_id"], line["error"] is None) for line in found] == [
        ("a", True),
        ("b", False),
        ("c", False),
        ("d", False),
    ]


def test_an_empty_redis_is_rebuilt_with_what_was_appended(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = begin(redis_client, tmp_path)
    for names in (("a", "b"), ("c",)):
        append(record.spec, *names)
        step(redis_client, record.id)
        answer_all(redis_client, most=2)
        step(redis_client, record.id)
        redis_client.flushall()
        assert rebuild(Queue(redis_client), record.spec.root)
    step(redis_client, record.id)
    assert get_batch(redis_client, record.id).open
    append(record.spec, "d")
    OpenRequests(record.spec).close()
    record = run_to_end(redis_client, record.id)
    assert (record.total, record.completed) == (4, 4)
    assert [line["custom_id"] for line in read_jsonl(tmp_path / "batch" / "output.jsonl")] == ["a", "b", "c", "d"]


def test_a_redis_that_goes_back_runs_every_line_once(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = begin(redis_client, tmp_path)
    step(redis_client, record.id)
    append(record.spec, "a", "b")
    step(redis_client, record.id)
    earlier = EarlierRedis(redis_client)
    answer_all(redis_client)
    append(record.spec, "c")
    step(redis_client, record.id)
    earlier.restore()
    assert step(redis_client, record.id).total == 3
    answer_all(redis_client)
    open_again = EarlierRedis(redis_client)
    OpenRequests(record.spec).close()
    assert not step(redis_client, record.id).open
    open_again.restore()
    record = run_to_end(redis_client, record.id)
    assert (record.state, record.total, record.completed) == ("completed", 3, 3)


def test_a_folder_that_goes_back_runs_again_from_what_is_there(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = begin(redis_client, tmp_path)
    step(redis_client, record.id)
    append(record.spec, "a", "b")
    step(redis_client, record.id)
    shutil.copytree(record.spec.root, tmp_path / "earlier")
    append(record.spec, "lost", "lost-too")
    step(redis_client, record.id)
    answer_all(redis_client)
    shutil.rmtree(record.spec.root)
    shutil.copytree(tmp_path / "earlier", record.spec.root)
    for _ in range(2):
        step(redis_client, record.id)
    append(record.spec, "c")
    OpenRequests(record.spec).close()
    record = run_to_end(redis_client, record.id)
    assert [line["custom_id"] for line in read_jsonl(tmp_path / "batch" / "output.jsonl")] == ["a", "b", "c"]


def test_threads_of_a_process_share_commits(spec: BatchSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them may not append is refused to it alone."""
    commits: list[int] = []
    real, both = OpenRequests.commit, threading.Barrier(9)

    def commit(self: OpenRequests, appends: Sequence[CheckedLines]) -> list[AppendOutcome | ApiError]:
        if not commits:
            both.wait(60)  # until all others have come, of which none can commit
            wait_until(lambda: len(group._waiting) == 8, 60, "the others")
        commits.append(len(appends))
        return real(self, appends)

    monkeypatch.setattr(OpenRequests, "commit", commit)
    group = group_of(spec)
    assert group_of(spec) is group
    outcomes: list[AppendOutcome | ApiError] = []

    def run(number: int) -> None:
        try:
            bounds = AppendBounds(lines=1) if number == 8 else ANY
            outcomes.append(group.append(lines("same", f"own{number}"), SERVED, bounds))
        except ApiError as error:
            outcomes.append(error)

    first = threading.Thread(target=run, args=(0,))
    first.start()
    wait_until(lambda: both.n_waiting == 1, 60, "the first commit")
    others = [threading.Thread(target=lambda number=number: (both.wait(60), run(number))) for number in range(1, 9)]
    for thread in others:
        thread.start()
    for thread in [first, *others]:
        thread.join()
    assert commits == [1, 8]
    found = [outcome for outcome in outcomes if isinstance(outcome, AppendOutcome)]
    assert sorted(outcome.repeated for outcome in found) == [0, *[1] * 7]
    assert sorted(stored_ids(spec)) == [*(f"own{number}" for number in range(8)), "same"]


_APPENDER = """
import json, sys
from pathlib import Path
import msgspec
from jobs.batch.input_files import InputLine
from jobs.batch.manifest import BatchSpec
from jobs.batch.open_requests import AppendBounds, OpenRequests
from tests.support.control_plane import chat_line
spec = msgspec.json.decode(sys.argv[1], type=BatchSpec)
for start in range(0, 400, 20):
    names = [f"{sys.argv[2]}{number}" for number in range(start, start + 20)]
    lines = [InputLine(number, 0, chat_line(name)) for number, name in enumerate(names, 1)]
    outcome = OpenRequests(spec).append(lines, {"m": None}, AppendBounds())
    assert outcome.appended + outcome.repeated == 20, outcome
    print(*names, flush=True)
"""


def appender(spec: BatchSpec, prefix: str) -> "subprocess.Popen[str]":
    import msgspec

    command = [sys.executable, "-c", _APPENDER, msgspec.json.encode(spec).decode(), prefix]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_append_at_once(spec: BatchSpec) -> None:
    appenders = [appender(spec, prefix) for prefix in ("x", "y", "x")]
    for process in appenders:
        process.communicate()
        assert process.returncode == 0
    assert sorted(stored_ids(spec)) == sorted(f"{prefix}{number}" for prefix in "xy" for number in range(400))


def is_held(spec: BatchSpec, lock: str) -> bool:
    try:
        with exclusive(spec.root, 0, lock):
            return False
    except Busy:
        return True


def test_processes_that_append_take_turns(spec: BatchSpec) -> None:
    """One that appends without a pause does not come before those that wait."""
    with exclusive(spec.root, 0, APPEND_LOCK):
        first = appender(spec, "first")
        wait_until(lambda: is_held(spec, NEXT_LOCK), 60, "the first one to wait")
        others = [appender(spec, prefix) for prefix in ("x", "y")]
        own = threading.Thread(target=append, args=(spec, "own"))
        own.start()
    for process in (first, *others):
        process.communicate()
        assert process.returncode == 0
    own.join()
    ids = stored_ids(spec)
    assert ids[:20] == [f"first{number}" for number in range(20)]
    assert len(ids) == 1201


def test_a_batch_whose_end_removed_its_files_is_closed(spec: BatchSpec) -> None:
    append(spec, "a")
    opened = OpenRequests(spec)
    os.unlink(Path(spec.root, DATABASE_NAME))
    with pytest.raises(ApiError) as raised:
        opened.append(lines("b"), SERVED, ANY)
    assert raised.value.status == 409
    with pytest.raises(ApiError) as raised:
        opened.append(numbered(b'{"custom_id": "bad"}'), SERVED, ANY)
    assert raised.value.status == 409
    opened.close()
    shutil.rmtree(spec.root)
    opened.close()


def test_a_kill_anywhere_loses_nothing_acknowledged(spec: BatchSpec, seed: int) -> None:
    draw, acknowledged = random.Random(seed), list[str]()
    for _ in range(10):
        process = appender(spec, "k")
        assert process.stdout is not None
        acknowledged += process.stdout.readline().split()
        time.sleep(draw.random() / 20)
        process.send_signal(signal.SIGKILL)
        acknowledged += process.stdout.read().rpartition("\n")[0].split()
        process.wait()
        found = stored_ids(spec)
        assert len(found) == len(set(found))
        assert set(acknowledged) <= set(found)
    process = appender(spec, "k")
    process.communicate()
    assert stored_ids(spec) == [f"k{number}" for number in range(400)]


def test_a_power_cut_during_an_append_loses_nothing_acknowledged(spec: BatchSpec, tmp_path: Path, seed: int) -> None:
    """Whatever of the files' new bytes came to disk, and with or without the database's journal."""
    append(spec, "a", "b")
    shutil.copytree(spec.root, tmp_path / "before")
    append(spec, "c", "d")
    draw = random.Random(seed)
    for _ in range(20):
        for name in (SOURCE_NAME, PLAN_NAME, INDEX_NAME):
            whole = Path(spec.root, name).read_bytes()
            kept = (tmp_path / "before" / name).stat().st_size
            cut = draw.randint(kept, max(kept, len(whole)))
            (tmp_path / "cut").mkdir(exist_ok=True)
            (tmp_path / "cut" / name).write_bytes(whole[:cut] + bytes(draw.randint(0, 30)))
        shutil.copy(tmp_path / "before" / DATABASE_NAME, tmp_path / "cut" / DATABASE_NAME)
        for name in os.listdir(tmp_path / "cut"):
            shutil.copy(tmp_path / "cut" / name, Path(spec.root, name))
        assert stored_ids(spec) == ["a", "b"]
        assert append(spec, "b", "d", "c") == (2, 1, [], 4, 252)
        assert stored_ids(spec) == ["a", "b", "d", "c"]


def test_what_was_acknowledged_was_synced(spec: BatchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that has only what was synced has it."""
    disk, sync = tmp_path / "disk", os.fsync
    disk.mkdir()
    for name in (SOURCE_NAME, PLAN_NAME, INDEX_NAME):
        shutil.copy(Path(spec.root, name), disk)

    def sync_copied(handle: int) -> None:
        sync(handle)
        file = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if file.is_file():
            shutil.copy(file, disk)

    monkeypatch.setattr(os, "fsync", sync_copied)
    for number in range(3):
        append(spec, f"a{number}")
        for name in (SOURCE_NAME, PLAN_NAME, INDEX_NAME):
            shutil.copy(disk / name, Path(spec.root, name))
        assert stored_ids(spec) == [f"a{earlier}" for earlier in range(number + 1)]
    with OpenRequests(spec)._connected("rw") as database:  # which syncs by itself
        settings = [database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode")]
    assert settings == [2, "truncate"]


def test_the_manifest_of_a_closed_batch_has_what_any_other_has(redis_client: redis.Redis, tmp_path: Path) -> None:
    record = begin(redis_client, tmp_path)
    append(record.spec, "a")
    OpenRequests(record.spec).close()
    step(redis_client, record.id)
    manifest = load_manifest(record.spec.root)
    assert manifest is not None
    assert not manifest.is_open
    assert None not in (manifest.source_sha256, manifest.plan_sha256, manifest.input_sha256)
    assert manifest.source_bytes == manifest.input_bytes == Path(record.spec.input).stat().st_size
