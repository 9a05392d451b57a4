"""Each line of an open batch in a bucket counts once, through repeats, kills and several
processes.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from jobs.batch import appended
from jobs.batch.appended import read_appended, write_piece
from jobs.batch.appending import BucketRequests, requests_of, take_appended
from jobs.batch.input_files import InputLine
from jobs.batch.manifest import BatchSpec, Manifest, save_manifest
from jobs.batch.open_requests import SOURCE_NAME, AppendBounds, AppendOutcome
from jobs.batch.plan import PlanEntry, read_plan
from jobs.batch.retention import tidy
from jobs.batch.source import open_lines, open_plan, open_source
from jobs.protocol.results import ApiError
from jobs.store.storage import RandomReader, StoreError, join, write_bytes
from tests.support.control_plane import chat_line
from tests.support.cut_off import cut_off_before_each_step
from tests.support.object_stores import Bucket, bucket, files_below

SERVED = {"m": None}
ANY = AppendBounds()


@pytest.fixture
def remote() -> Iterator[Bucket]:
    with bucket() as made:
        yield made


@pytest.fixture
def spec(remote: Bucket) -> BatchSpec:
    """An open batch in a bucket."""
    root = f"{remote.uri}/batches/one"
    spec = BatchSpec(
        input=join(root, SOURCE_NAME),
        root=root,
        models=("m",),
        error_file="inline",
        skip_invalid_requests=True,
        streams_input=True,
        input_file_id="file-1",
        endpoint="/v1/chat/completions",
    )
    requests_of(spec).create()
    return spec


def numbered(*raws: bytes) -> list[InputLine]:
    return [InputLine(number, 0, raw) for number, raw in enumerate(raws, 1)]


def append(spec: BatchSpec, *names: str, content: str = "hi", bounds: AppendBounds = ANY) -> AppendOutcome:
    return requests_of(spec).append(numbered(*(chat_line(name, content) for name in names)), SERVED, bounds)


def manifest_of(spec: BatchSpec) -> Manifest:
    return Manifest(batch_id="one", created_at=0.0, spec=spec, source=spec.input)


def stored_ids(manifest: Manifest) -> list[str]:
    """The ids of the lines that count, checked against plan and line index."""
    count = requests_of(manifest.spec).committed().lines
    with open_plan(manifest) as plan, open_source(manifest, buffered=False) as source, open_lines(manifest) as index:
        entries = read_plan(plan, 0, count)
        assert sorted(entry.line for entry in entries) == list(range(1, count + 1))
        ids = [index.custom_id(number) for number in range(1, count + 1)]
        for entry in entries:
            source.seek(entry.offset)
            assert json.loads(source.read(entry.length))["custom_id"] == ids[entry.line - 1]
    return ids


def test_lines_are_appended_once(spec: BatchSpec) -> None:
    assert append(spec, "a", "b") == (2, 0, [], 2, 126)
    assert append(spec, "b", "c", "c") == (1, 2, [], 3, 189)
    assert stored_ids(manifest_of(spec)) == ["a", "b", "c"]
    outcome = append(spec, "d", "b", content="other")
    assert (outcome.appended, outcome.repeated, outcome.total) == (1, 0, 4)
    assert [problem.code for problem in outcome.problems] == ["duplicate_custom_id"]
    assert "Line 2 has it" in outcome.problems[0].message
    found = requests_of(spec).committed()
    assert (found.models, found.endpoints, found.closed) == (["m"], ["/v1/chat/completions"], False)


def test_bounds_hold_and_bad_lines_get_placeholders(spec: BatchSpec) -> None:
    append(spec, "a")
    with pytest.raises(ApiError, match="it may have 2: close it") as refused:
        append(spec, "b", "c", bounds=AppendBounds(lines=2))
    assert refused.value.status == 400
    bad = b'{"custom_id": "bad", "method": "POST", "url": "/v1/chat/completions"}\n'
    outcome = requests_of(spec).append(numbered(bad, b"[1]\n"), SERVED, ANY)
    assert (outcome.appended, [problem.line for problem in outcome.problems]) == (1, [2])
    assert stored_ids(manifest_of(spec)) == ["a", "bad"]


def test_many_appends_become_few_pieces(spec: BatchSpec) -> None:
    early = manifest_of(spec)
    names = [f"n{number}" for number in range(300)]
    with open_lines(early) as index:
        for name in names:
            append(spec, name)
            assert index.custom_id(int(name[1:]) + 1) == name
    assert len(read_appended(spec.root).pieces) < 40
    assert append(spec, *names).repeated == 300
    assert stored_ids(manifest_of(spec)) == names


def test_an_append_reads_little_of_what_the_batch_has(spec: BatchSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"n{number}" for number in range(10_000)]
    append(spec, *names)
    read, open_at = list[int](), appended.open_at

    def open_counted(location: str) -> RandomReader:
        reader = open_at(location)
        read_at = reader.read_at
        monkeypatch.setattr(reader, "read_at", lambda offset, length: read.append(length) or read_at(offset, length))
        return reader

    monkeypatch.setattr(appended, "open_at", open_counted)
    for number in (0, 5000, 9999):
        outcome = append(spec, f"n{number}", f"new {number}")
        assert (outcome.appended, outcome.repeated) == (1, 1)
    assert sum(read) < 10_000
    few = [f"n{number}" for number in range(0, 10_000, 300)]
    assert append(spec, *few, *(f"{name} new" for name in few)).repeated == len(few)
    assert append(spec, *names, "last").appended == 1


def test_large_pieces_stay(spec: BatchSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appended, "_MOST_MERGED_BYTES", 1000)
    for number in range(20):
        append(spec, f"n{number}")
    assert len(read_appended(spec.root).pieces) == 20


def test_a_closed_batch_has_the_files_of_any_other(spec: BatchSpec) -> None:
    names = [f"n{number}" for number in range(40)]
    for name in names:
        append(spec, name)
    manifest = manifest_of(spec)
    take_appended(manifest, int)
    assert manifest.is_open
    for _ in range(2):
        requests_of(spec).close()
    with pytest.raises(ApiError, match="is closed") as refused:
        append(spec, "late")
    assert refused.value.status == 409
    take_appended(manifest, int)
    assert (manifest.is_open, manifest.total) == (False, 40)
    assert stored_ids(manifest) == names


def test_a_list_of_requests_that_is_none_is_named(spec: BatchSpec) -> None:
    write_bytes(f"{spec.root}/requests/appended.json", b"<html>")
    with pytest.raises(StoreError, match=r"/requests/appended\.json is no list of requests"):
        read_appended(spec.root)


def test_a_batch_without_lines_can_be_closed(spec: BatchSpec) -> None:
    requests_of(spec).close()
    manifest = manifest_of(spec)
    take_appended(manifest, int)
    assert (manifest.is_open, manifest.total, stored_ids(manifest)) == (False, 0, [])


def test_an_ended_batch_takes_no_requests(spec: BatchSpec) -> None:
    append(spec, "a")
    requests_of(spec).close()
    manifest = manifest_of(spec)
    take_appended(manifest, int)
    manifest.enter("completed")
    appended.remove_appended(spec.root)
    with pytest.raises(ApiError, match="is closed"):
        append(spec, "b")
    requests_of(spec).close()
    assert stored_ids_of_files(manifest) == ["a"]


def test_pieces_that_a_bucket_keeps_at_the_end_are_removed_later(
    spec: BatchSpec, remote: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    append(spec, "a")
    manifest = manifest_of(spec)
    manifest.enter("cancelled")
    save_manifest(manifest)
    remote.server.refused = "prefix=batches%2Fone%2Frequests"
    assert not tidy(spec.root)
    assert f"failed to clean up batch folder {spec.root}: cannot remove {spec.root}/requests: " in caplog.text
    remote.server.refused = ""
    assert tidy(spec.root)
    assert not files_below(f"{spec.root}/requests")


def stored_ids_of_files(manifest: Manifest) -> list[str]:
    with open_source(manifest) as source:
        return [json.loads(line)["custom_id"] for line in source]


def test_processes_that_append_at_once(spec: BatchSpec) -> None:
    """Each line is appended by one of them, and the others find it."""

    def run(_: int) -> int:
        requests = BucketRequests(spec)
        return sum(requests.append(numbered(chat_line(f"n{number}")), SERVED, ANY).appended for number in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(run, range(4))) == 10
    assert sorted(stored_ids(manifest_of(spec))) == sorted(f"n{number}" for number in range(10))


def test_an_append_that_ends_before_any_step_may_be_repeated(spec: BatchSpec, redis_client: redis.Redis) -> None:
    ids: list[str] = []
    for number in range(15):  # the next one merges
        ids.append(f"before {number}")
        append(spec, ids[-1])
    for number in cut_off_before_each_step(redis_client, lambda number: append(spec, "a", "b")):
        assert stored_ids(manifest_of(spec)) in (ids, [*ids, "a", "b"])
        assert number < 10
    assert stored_ids(manifest_of(spec)) == [*ids, "a", "b"]
    assert append(spec, "a", "b", "c")[:2] == (1, 2)


def test_pieces_that_are_not_listed_do_not_count(spec: BatchSpec) -> None:
    append(spec, "a")
    write_piece(spec.root, [PlanEntry(2, 63, 1)], [PlanEntry(2, 63, 1)], {}, b"\n")
    append(spec, "b")
    assert stored_ids(manifest_of(spec)) == ["a", "b"]
