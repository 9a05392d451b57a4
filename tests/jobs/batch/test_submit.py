"""Batches of the API: made out of uploaded files, wholly or not at all, within limits, and checked
as OpenAI checks them.
"""

import errno
import gzip
import json
import os
import threading
from pathlib import Path, PurePath
from typing import Any

import pyarrow
import pytest
import redis
from pyarrow import parquet

from jobs.batch import input_files
from jobs.batch import register as register_module
from jobs.batch.client import BatchRecord, list_batches
from jobs.batch.line_index import LineIndex
from jobs.batch.submit import BatchSubmission, TooManyBatches, submit_batch
from jobs.control import validate
from jobs.control.ticker import Ticker
from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.ids import BATCH, new_id
from jobs.protocol.period import Period
from jobs.queue import keys
from jobs.queue.request_queue import Queue, QueueFull
from jobs.queue.settings import QueueSettings
from jobs.store.storage import StoreError, StoreFull, is_local
from tests.support.batch_steps import run_to_end, step, tick
from tests.support.control_plane import chat_line, failing
from tests.support.integrity import faults
from tests.support.kills import killed_at
from tests.support.object_stores import LOCAL
from tests.support.store_batches import (
    check_every_line_once,
    content_of,
    custom_ids,
    lines_of,
    log_of,
    manifest_of,
    put,
    serve,
    store_of,
    submit,
    submit_file,
)


def codes(record: BatchRecord) -> list[tuple[str, int | None, str | None]]:
    return [(problem.code, problem.line, problem.param) for problem in record.errors]


@LOCAL
def test_a_batch_keeps_its_input(redis_client: redis.Redis, folder: PurePath) -> None:
    serve(redis_client, "m")
    store = store_of(redis_client, folder)
    file_id = put(store, lines_of(10))
    record = submit_file(redis_client, folder, file_id, metadata={"a": "b"})
    assert os.stat(record.spec.input).st_nlink == 2
    store.delete("", file_id)
    assert (record.state, record.spec.input_file_id, record.spec.metadata) == ("validating", file_id, {"a": "b"})
    ended = run_to_end(redis_client, record.id, failing(3))
    assert (ended.state, ended.completed, ended.failed) == ("completed", 9, 1)
    check_every_line_once(redis_client, folder, ended, 10)


def test_a_file_stored_under_the_suffix_of_its_name_is_read_by_its_content(
    redis_client: redis.Redis, folder: PurePath
) -> None:
    """As a version stored it that looked at names only."""
    serve(redis_client, "m")
    store = store_of(redis_client, folder)
    record = store.get("", put(store, lines_of(3)))
    store.content_path(record).write_bytes(gzip.compress(lines_of(3)))
    assert record.suffix == ".jsonl"
    assert run_to_end(redis_client, submit_file(redis_client, folder, record.id).id).completed == 3


@LOCAL
def test_where_there_are_no_links_it_is_copied(
    redis_client: redis.Redis, folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    record = submit(redis_client, folder, lines_of(5))
    assert os.stat(record.spec.input).st_nlink == 1
    assert run_to_end(redis_client, record.id).completed == 5


@LOCAL
def test_a_full_disk_makes_no_batch(
    redis_client: redis.Redis, folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for call in ("link", "fsync"):
        with monkeypatch.context() as patch:
            serve(redis_client, "m")
            file_id = put(store_of(redis_client, folder), lines_of(1))
            patch.setattr(os, call, refuse)
            with pytest.raises(StoreFull):
                submit_file(redis_client, folder, file_id, open_batches=1)
        assert list_batches(Queue(redis_client), "", None, 10).items == []
        assert list((folder / "store" / "batches").iterdir()) == []
        assert Queue(redis_client).open_batches("") == []


def test_a_full_redis_makes_no_batch(redis_client: redis.Redis, folder: PurePath) -> None:
    serve(redis_client, "m")
    file_id = put(store_of(redis_client, folder), lines_of(1))
    new = BatchSubmission(input_file_id=file_id, endpoint=CHAT, completion_window="24h", seconds=60.0)
    queue = Queue(redis_client, QueueSettings(redis_retry_seconds=0))
    redis_client.config_set("maxmemory", "1")
    try:
        with pytest.raises(QueueFull):
            submit_batch(queue, store_of(redis_client, folder), new)
    finally:
        redis_client.config_set("maxmemory", "0")
    assert list((folder / "store").glob("batches/*")) == []
    assert (queue.open_batches(""), queue.listed_batches("", None, 9)) == ([], [])


def test_a_batch_is_listed_by_the_time_that_it_shows(redis_client: redis.Redis, folder: PurePath) -> None:
    """Its id was made in the second before."""
    store, queue = store_of(redis_client, folder), Queue(redis_client)
    new = BatchSubmission(input_file_id=put(store, lines_of(3)), endpoint=CHAT, completion_window="24h", seconds=60.0)
    second = int(queue.now()) - 1
    record = submit_batch(queue, store, new, new_id(BATCH, second + 0.9999995))
    assert int(record.timestamps["created"]) == second
    assert queue.listed_batches("", None, 9, Period(second, second + 1)) == [record.id]


@pytest.mark.parametrize("refused", ["ZADD", "SADD", "EVALSHA", "hand_out"])
def test_a_redis_that_fills_up_while_a_batch_is_made(
    redis_client: redis.Redis, folder: PurePath, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Before its record none is made and nothing is left behind; after it the ticker does the
    rest.
    """
    serve(redis_client, "m")
    store = store_of(redis_client, folder)
    new = BatchSubmission(input_file_id=put(store, lines_of(3)), endpoint=CHAT, completion_window="24h", seconds=60.0)
    queue = Queue(redis_client, QueueSettings(redis_retry_seconds=0.0))
    owners = {"hand_out": register_module, "EVALSHA": redis.Redis}
    owner: Any = owners.get(refused, redis.client.Pipeline)
    real = getattr(owner, name := "hand_out" if refused == "hand_out" else "execute_command")

    def refuse(*arguments: Any, **options: Any) -> Any:
        if refused == "hand_out" or (refused in arguments and (refused != "EVALSHA" or "validating" in arguments)):
            raise redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'")
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, refuse)
    if refused == "hand_out":
        record = submit_batch(queue, store, new)
        check_every_line_once(redis_client, folder, run_to_end(redis_client, record.id, failing(3)), 3)
        return
    with pytest.raises(QueueFull):
        submit_batch(queue, store, new)
    monkeypatch.undo()
    assert list((folder / "store").glob("batches/*")) == []
    assert (queue.open_batches(""), queue.listed_batches("", None, 9), queue.batches()) == ([], [], [])
    assert redis_client.smembers(keys.ACTIVE) == set()


@pytest.mark.proof
@pytest.mark.parametrize(
    "point", ["open_batch", "mkdir", "link", "save_manifest", "announce", "transition", "hand_out"]
)
@pytest.mark.parametrize("after", [False, True])
def test_a_maker_killed_anywhere_leaves_a_batch_or_none(
    redis_client: redis.Redis, folder: PurePath, monkeypatch: pytest.MonkeyPatch, point: str, after: bool
) -> None:
    if point in ("mkdir", "link") and not is_local(str(folder)):
        pytest.skip("a bucket needs no folder, and has no links")
    serve(redis_client, "m")
    file_id = put(store_of(redis_client, folder), lines_of(20))
    leader = Ticker(Queue(redis_client), str(folder / "store"))
    tick(leader)
    (folder / "store" / "batches").mkdir()
    owners = {"mkdir": Path, "link": os, "save_manifest": register_module, "hand_out": register_module}
    owner: Any = owners.get(point, Queue)
    with killed_at(monkeypatch, owner, point, after):
        submit_file(redis_client, folder, file_id)
    monkeypatch.setattr(leader.upkeep, "_next_sweep", 0.0)  # a minute later
    tick(leader)
    tick(leader)
    durable = list((folder / "store").glob("batches/*/manifest.json"))
    found = list_batches(Queue(redis_client), "", None, 10).items
    assert [record.spec.root for record in found] == [str(path.parent) for path in durable]
    assert len(found) == (points_in_order(point, after) > points_in_order("save_manifest", False))
    for record in found:
        check_every_line_once(redis_client, folder, run_to_end(redis_client, record.id, failing(3)), 20)


def points_in_order(point: str, after: bool) -> int:
    """When a kill comes."""
    order = ["open_batch", "mkdir", "link", "save_manifest", "announce", "transition", "hand_out"]
    return 2 * order.index(point) + after


@LOCAL
def test_an_input_file_that_cannot_be_used_fails_the_batch(redis_client: redis.Redis, folder: PurePath) -> None:
    serve(redis_client, "m")
    store = store_of(redis_client, folder)
    gone = put(store, lines_of(1))
    store.delete("", gone)
    others = [put(store, lines_of(1), tenant="other"), put(store, b"text", "a.txt", "assistants")]
    for file_id in ("file-unknown", "../../../etc/passwd", "", gone, *others):
        record = step(redis_client, submit_file(redis_client, folder, file_id).id)
        assert (record.state, codes(record)) == ("failed", [("invalid_request", None, "file_id")]), file_id
        assert (record.total, record.completed, record.failed, record.output_file_id, record.error_file_id) == (
            0,
            0,
            0,
            None,
            None,
        )
        assert [path.name for path in Path(record.spec.root).iterdir() if not path.name.startswith(".")] == [
            "manifest.json"
        ]
    assert len(list_batches(Queue(redis_client), "", None, 10).items) == 6
    assert faults(redis_client) == []


def changed(custom_id: str, /, **fields: Any) -> bytes:
    line = json.loads(chat_line(custom_id)) | fields
    return json.dumps({name: value for name, value in line.items() if value is not ...}).encode() + b"\n"


def test_every_bad_line_has_an_entry_with_openai_s_code(redis_client: redis.Redis, folder: PurePath) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    lines = [
        chat_line("good"),
        b"not json\n",
        b"[1]\n",
        changed("x1", custom_id=...),
        changed("x2", custom_id=7),
        changed("x3", method=...),
        changed("x4", method="GET"),
        changed("x5", url=...),
        changed("x6", url="/v1/completions"),
        changed("x7", body=...),
        changed("x8", body="text"),
        chat_line("x9", stream=True),
        chat_line("x10", model="other"),
        chat_line("x11", model=None),
        chat_line("x12", model=3),  # type: ignore[arg-type]
        changed("x13", body={"model": "m"}),
        changed("x14", body=body | {"messages": "hi"}),
        chat_line("good"),
        chat_line("x15", temperature=-1),
        changed("x16", body=body | {"stream": "yes"}),
    ]
    record = step(redis_client, submit(redis_client, folder, b"".join(lines)).id)
    assert (record.state, record.total) == ("failed", 0)
    assert codes(record) == [
        ("invalid_json_line", 2, None),
        ("invalid_json_line", 3, None),
        ("missing_required_parameter", 4, "custom_id"),
        ("invalid_request", 5, "custom_id"),
        ("missing_required_parameter", 6, "method"),
        ("invalid_request", 7, "method"),
        ("missing_required_parameter", 8, "url"),
        ("invalid_url", 9, "url"),
        ("missing_required_parameter", 10, "body"),
        ("invalid_request", 11, "body"),
        ("streaming_unsupported", 12, "body.stream"),
        ("model_not_found", 13, "body.model"),
        ("invalid_request", 14, "body.model"),
        ("invalid_request", 15, "body.model"),
        ("invalid_request", 16, "body.messages"),
        ("invalid_request", 17, "body.messages"),
        ("duplicate_custom_id", 18, "custom_id"),
        ("invalid_request", 20, "body.stream"),
    ]


def test_a_prompt_is_text_tokens_or_nothing_and_no_messages(redis_client: redis.Redis, folder: PurePath) -> None:
    bodies: list[dict[str, Any]] = [{"prompt": "a"}, {"prompt": ["a", "b"]}, {"prompt": [1, 2]}, {}, {"prompt": None}]
    bodies += [{"prompt": 3}, {"messages": []}]
    lines = [changed(f"c{n}", url=COMPLETIONS, body={"model": "m", **body}) for n, body in enumerate(bodies)]
    record = step(redis_client, submit(redis_client, folder, b"".join(lines), endpoint=COMPLETIONS).id)
    assert codes(record) == [("invalid_request", 6, "body.prompt"), ("invalid_request", 7, "body.prompt")]


@pytest.mark.parametrize(
    ("data", "filename", "expected"),
    [
        (b"", "in.jsonl", ("empty_file", None, None)),
        (b"\n \n", "in.jsonl", ("empty_file", None, None)),
        (lines_of(6), "in.jsonl", ("too_many_tasks", None, None)),
        (b"\x1f\x8b no gzip", "in.jsonl.gz", ("invalid_request", None, "file_id")),
        (b"PAR1 no parquet", "in.parquet", ("invalid_request", None, "file_id")),
    ],
)
def test_a_file_that_is_bad_as_a_whole(
    redis_client: redis.Redis,
    folder: PurePath,
    data: bytes,
    filename: str,
    expected: tuple[str, None, str | None],
) -> None:
    record = step(redis_client, submit(redis_client, folder, data, filename, max_lines=5).id)
    assert (record.state, codes(record)) == ("failed", [expected])
    assert str(folder) not in record.errors[0].message


@LOCAL
@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl", ".parquet"])
def test_a_file_that_unfolds_fails_its_batch_in_one_sentence(
    redis_client: redis.Redis, folder: PurePath, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """A few bytes can hold gigabytes; blank lines, too, take room in the index and in Redis."""
    monkeypatch.setattr(input_files, "_UNPACKED_BYTES", 5_000_000)
    monkeypatch.setattr(validate, "_MOST_BLANK", 10_000)
    monkeypatch.setattr(input_files, "_PARQUET_MEMORY_BYTES", 300 << 20)
    if suffix == ".parquet":
        path = folder / "in.parquet"
        prompts = pyarrow.DictionaryArray.from_arrays(
            pyarrow.array([0] * 64, pyarrow.int32()), pyarrow.array(["x" * (4 << 20)])
        )
        parquet.write_table(
            pyarrow.table({"custom_id": [str(n) for n in range(64)], "prompt": prompts}), path, compression="zstd"
        )
        data, why = (
            path.read_bytes(),
            "The input file needs more than 300 MiB of memory to be read: write it with smaller pages",
        )
    elif suffix == ".jsonl.gz":
        data, why = (
            gzip.compress(b"\n" * 10_000_000),
            "The input file holds more than 5000000 bytes when it is unpacked",
        )
    else:
        data, why = b"\n" * 10_001 + lines_of(1), "The input file holds more than 10000 blank lines."
    record = step(redis_client, submit(redis_client, folder, data, f"in{suffix}", max_lines=50).id)
    assert (record.state, codes(record)) == ("failed", [("invalid_request", None, "file_id")])
    assert record.errors[0].message == why
    assert not {name.name for name in Path(record.spec.root).iterdir()} & {"lines.jsonl", "lines.index"}


def test_a_thousand_bad_lines_are_listed_and_the_rest_counted(redis_client: redis.Redis, folder: PurePath) -> None:
    record = step(redis_client, submit(redis_client, folder, b"bad\n" * 1500).id)
    assert len(record.errors) == 1001
    assert (record.errors[999].line, record.errors[1000].line) == (1000, None)
    assert record.errors[1000].message.startswith("500 more lines are bad")


def test_a_model_without_a_worker_is_known_and_waited_for(redis_client: redis.Redis, folder: PurePath) -> None:
    record = submit(redis_client, folder, lines_of(3, model="idle"))
    serve(redis_client, "idle")
    Queue(redis_client).remove_worker("w")
    assert step(redis_client, record.id).state == "in_progress"


def test_a_model_that_is_registered_while_the_file_is_checked(
    redis_client: redis.Redis, redis_url: str, folder: PurePath
) -> None:
    """Models come back to an emptied Redis as their workers renew their leases."""
    record = submit(redis_client, folder, lines_of(3))
    redis_client.delete("{q}:models")
    served = threading.Timer(0.3, serve, (redis_client, redis_url, "m"))
    served.start()
    assert step(redis_client, record.id).state == "in_progress"
    served.join()


def test_tokens_that_may_be_queued(redis_client: redis.Redis, folder: PurePath) -> None:
    data = lines_of(100)
    bodies = sum(len(json.dumps(json.loads(line)["body"])) for line in data.splitlines())
    most = int(1.5 * bodies / 4)
    first = submit(redis_client, folder, data, tenant="t", queued_tokens=most)
    assert step(redis_client, first.id).state == "in_progress"
    second = submit(redis_client, folder, data, tenant="t", queued_tokens=most)
    refused = step(redis_client, second.id)
    assert (refused.state, codes(refused)) == ("failed", [("token_limit_exceeded", None, None)])
    assert (
        step(redis_client, submit(redis_client, folder, data, tenant="u", queued_tokens=most).id).state == "in_progress"
    )
    run_to_end(redis_client, first.id)
    # It has ended, and is still counted for a moment
    Queue(redis_client).open_batch("t", first.id, None)
    third = submit(redis_client, folder, data, tenant="t", queued_tokens=most)
    assert step(redis_client, third.id).state == "in_progress"


def test_a_tenant_has_no_more_open_batches_than_it_may(redis_client: redis.Redis, folder: PurePath) -> None:
    serve(redis_client, "m")
    file_id = put(store_of(redis_client, folder), lines_of(2), tenant="t")
    made: list[BatchRecord] = []
    refused: list[TooManyBatches] = []

    def ask() -> None:
        try:
            made.append(submit_file(redis_client, folder, file_id, tenant="t", open_batches=3))
        except TooManyBatches as error:
            refused.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(made), len(refused)) == (3, 5)
    assert len(list((folder / "store" / "batches").iterdir())) == 3
    submit_file(
        redis_client,
        folder,
        put(store_of(redis_client, folder), lines_of(2), tenant="u"),
        tenant="u",
        open_batches=1,
    )
    run_to_end(redis_client, made[0].id)
    ask()
    ask()
    assert (len(made), len(refused)) == (4, 6)


def test_a_place_that_a_killed_maker_took_is_given_away(redis_client: redis.Redis, folder: PurePath) -> None:
    serve(redis_client, "m")
    queue = Queue(redis_client)
    old, fresh = (f"batch_{int((queue.now() - age) * 1e6):013x}{0:011x}" for age in (90, 1))
    file_id = put(store_of(redis_client, folder), lines_of(2))
    assert queue.open_batch("", fresh, 1)
    with pytest.raises(TooManyBatches):
        submit_file(redis_client, folder, file_id, open_batches=1)
    queue.dismiss("", fresh)
    assert queue.open_batch("", old, 1)
    submit_file(redis_client, folder, file_id, open_batches=1)


def test_lines_are_found_by_number(redis_client: redis.Redis, folder: PurePath) -> None:
    data = b"\xef\xbb\xbf" + chat_line("a") + b"\n" + chat_line("\u20ac") + b" \n" + chat_line("z")
    record = submit(redis_client, folder, data)
    step(redis_client, record.id)
    with LineIndex(manifest_of(record).made_root, record.spec.input) as index:
        assert [index.custom_id(line) for line in (5, 3, 1)] == ["z", "\u20ac", "a"]
        for line in (2, 6):
            with pytest.raises(StoreError, match=f"no line {line}"):
                index.custom_id(line)


@pytest.mark.parametrize("form", ["in.jsonl.gz", "in.jsonl.zst", "in.parquet"])
def test_other_forms_of_input(redis_client: redis.Redis, folder: PurePath, form: str) -> None:
    if form.endswith("parquet"):
        rows = [
            {"custom_id": f"c{n}", "messages": [{"role": "user", "content": f"say {n}"}], "model": "m"}
            for n in range(1, 8)
        ]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / form)
        data = (folder / form).read_bytes()
    else:
        data = (
            gzip.compress(lines_of(7)) if form.endswith("gz") else pyarrow.compress(lines_of(7), "zstd", asbytes=True)
        )
    record = submit(redis_client, folder, data, form)
    ended = run_to_end(redis_client, record.id, failing(3))
    assert (ended.completed, ended.failed) == (6, 1)
    assert sorted(custom_ids(log_of(record))) == ["c1", "c2", "c4", "c5", "c6", "c7"]
    if form.endswith("parquet"):
        found = store_of(redis_client, folder).get("", ended.output_file_id or "")
        assert (found.suffix, found.filename) == (".parquet", f"{record.id}_output.parquet")
        table = parquet.read_table(store_of(redis_client, folder).content_path(found))
        assert table["custom_id"].to_pylist() == ["c1", "c2", "c4", "c5", "c6", "c7"]
        assert custom_ids(content_of(redis_client, folder, ended.error_file_id)) == ["c3"]
    else:
        check_every_line_once(redis_client, folder, ended, 7)


def test_listings_show_a_tenant_its_own_newest_first(redis_client: redis.Redis, folder: PurePath) -> None:
    ids = [submit(redis_client, folder, lines_of(1), tenant="t").id for _ in range(7)][::-1]
    other = submit(redis_client, folder, lines_of(1), tenant="u").id
    queue = Queue(redis_client)
    assert [found.id for found in list_batches(queue, "u", None, 10).items] == [other]
    seen: list[str] = []
    after = None
    while True:
        page = list_batches(queue, "t", after, 3)
        seen += [found.id for found in page.items]
        # What comes meanwhile moves nothing
        submit(redis_client, folder, lines_of(1), tenant="t")
        if not page.has_more:
            break
        after = seen[-1]
    assert seen == ids
    queue.forget(ids[2])
    assert [found.id for found in list_batches(queue, "t", ids[1], 2).items] == ids[3:5]
    assert [found.id for found in list_batches(queue, "t", ids[2], 2).items] == ids[3:5]
