"""One key makes one thing, at whichever step a process is killed; it is kept for a day."""

import contextlib
import itertools
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs.batch.retention import forget_output
from jobs.protocol.results import ApiError
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue, QueueFull
from jobs.store.file_store import FileStore
from jobs.store.idempotency import HeldKey, IdempotencyKeys
from jobs.store.storage import StoreError, StoreFull, list_names, read_bytes, write_new
from tests.support.control_plane import ROOT
from tests.support.killed_steps import killed_before_each_step
from tests.support.object_stores import bucket

DAY = 24 * 3600


@pytest.fixture
def idempotency_keys(queue: Queue, tmp_path: Path) -> IdempotencyKeys:
    return IdempotencyKeys(queue, FileStore(queue, str(tmp_path / "store"), forget_output))


@pytest.fixture
def keys_anywhere(queue: Queue, location: str) -> IdempotencyKeys:
    """Of a store in a folder, and in a bucket."""
    return IdempotencyKeys(queue, FileStore(queue, location, forget_output))


class Things:
    """A folder of what was made, each a file under its id."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        folder.mkdir()

    def once(self, held: HeldKey, digest: str = "digest") -> tuple[dict[str, Any], bool]:
        with held:
            return held.make_once(digest, f"id{next(self._numbers)}-{os.getpid()}", self.find, self.make)

    def make(self, thing: str) -> dict[str, Any]:
        os.mkdir(self.folder / thing)
        return {"id": thing}

    def find(self, thing: str) -> dict[str, Any] | None:
        return {"id": thing} if (self.folder / thing).exists() else None

    @property
    def names(self) -> list[str]:
        return os.listdir(self.folder)


@pytest.fixture
def things(tmp_path: Path) -> Things:
    return Things(tmp_path / "things")


def files_in(tmp_path: Path) -> list[str]:
    return os.listdir(tmp_path / "store" / "idempotency")


def refused(status: int, code: str, held: Any) -> None:
    with pytest.raises(ApiError) as caught:
        held()
    assert (caught.value.status, caught.value.code, caught.value.param) == (status, code, "Idempotency-Key")


def test_a_repeated_call_gets_the_first_answer(keys_anywhere: IdempotencyKeys, things: Things) -> None:
    first, replayed = things.once(keys_anywhere.hold("t", "batch_", "k"))
    assert not replayed
    for _ in range(3):
        assert things.once(keys_anywhere.hold("t", "batch_", "k")) == (first, True)
    refused(422, "idempotency_key_reused", lambda: things.once(keys_anywhere.hold("t", "batch_", "k"), "other"))
    assert things.names == [first["id"]]
    for other in (("u", "batch_", "k"), ("t", "file-", "k"), ("t", "batch_", "K"), ("", "t\0batch_", "k")):
        assert things.once(keys_anywhere.hold(*other), "other")[1] is False
    assert len(things.names) == 5


def test_of_calls_at_once_one_makes_something(keys_anywhere: IdempotencyKeys, things: Things) -> None:
    def call(_: int) -> str:
        try:
            return things.once(keys_anywhere.hold("t", "batch_", "k"))[0]["id"]
        except ApiError as error:
            return f"{error.status}"

    with ThreadPoolExecutor(8) as threads:
        answers = set(threads.map(call, range(200)))
    assert answers - {"409"} == set(things.names)
    assert len(things.names) == 1


def test_an_answer_that_cannot_be_stored_is_given_all_the_same(
    idempotency_keys: IdempotencyKeys, things: Things, tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def make(thing: str) -> dict[str, Any]:
        made = things.make(thing)
        (name,) = files_in(tmp_path)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (os.stat(tmp_path / "store" / "idempotency" / name).st_size, limits[1])
        )
        return made

    try:
        with idempotency_keys.hold("", "thing", "key") as held:
            assert held.make_once("digest", "one", things.find, make) == ({"id": "one"}, False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert things.once(idempotency_keys.hold("", "thing", "key")) == ({"id": "one"}, True)
    assert things.names == ["one"]


def test_a_key_is_in_use_until_its_process_dies(
    idempotency_keys: IdempotencyKeys, redis_url: str, things: Things, tmp_path: Path
) -> None:
    script = f"""
from jobs.queue.connection import connect
from jobs.batch.retention import forget_output
from jobs.store.file_store import FileStore
from jobs.store.idempotency import IdempotencyKeys
from jobs.queue.request_queue import Queue, QueueFull
queue = Queue(connect({redis_url!r}))
held = IdempotencyKeys(queue, FileStore(queue, {str(tmp_path / "store")!r}, forget_output)).hold("t", "batch_", "k")
print("held", flush=True)
input()
"""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        refused(409, "idempotency_key_in_use", lambda: idempotency_keys.hold("t", "batch_", "k"))
        process.kill()
    assert things.once(idempotency_keys.hold("t", "batch_", "k"))[1] is False


def test_a_call_that_begins_nothing_leaves_nothing(idempotency_keys: IdempotencyKeys, tmp_path: Path) -> None:
    held = idempotency_keys.hold("t", "batch_", "k")
    held.close()
    assert files_in(tmp_path) == []
    with idempotency_keys.hold("t", "batch_", "k"):
        held.close()  # again, which takes nothing from the other
        assert len(files_in(tmp_path)) == 1
        refused(409, "idempotency_key_in_use", lambda: idempotency_keys.hold("t", "batch_", "k"))


def test_a_failed_call_may_be_repeated(keys_anywhere: IdempotencyKeys, things: Things) -> None:
    things.folder.rmdir()
    with pytest.raises(FileNotFoundError):
        things.once(keys_anywhere.hold("t", "batch_", "k"))
    things.folder.mkdir()
    refused(422, "idempotency_key_reused", lambda: things.once(keys_anywhere.hold("t", "batch_", "k"), "other"))
    first, replayed = things.once(keys_anywhere.hold("t", "batch_", "k"))
    assert (replayed, things.names) == (False, [first["id"]])


REFUSALS = [ApiError(429, "too many"), QueueFull("no memory"), StoreFull("no room")]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__)
def test_a_refused_call_leaves_its_key_to_a_corrected_one(
    idempotency_keys: IdempotencyKeys, things: Things, tmp_path: Path, refusal: Exception
) -> None:
    def refuse(_: str) -> dict[str, Any]:
        raise refusal

    for digest in ("first", "second"):
        with pytest.raises(type(refusal)), idempotency_keys.hold("t", "batch_", "k") as held:
            held.make_once(digest, "id", things.find, refuse)
        assert files_in(tmp_path) == []
    first, replayed = things.once(idempotency_keys.hold("t", "batch_", "k"), "corrected")
    assert not replayed
    assert things.once(idempotency_keys.hold("t", "batch_", "k"), "corrected") == (first, True)


@pytest.mark.parametrize("known", [True, False])
def test_a_call_that_was_refused_after_it_made_something_keeps_its_key(
    keys_anywhere: IdempotencyKeys, things: Things, known: bool
) -> None:
    def make(thing: str) -> dict[str, Any]:
        things.make(thing)
        raise StoreFull("no room")

    def find(thing: str) -> dict[str, Any] | None:
        if not known:
            raise StoreError(f"cannot read {thing}")
        return things.find(thing)

    with pytest.raises(StoreFull), keys_anywhere.hold("t", "batch_", "k") as held:
        held.make_once("digest", "one", find, make)
    refused(422, "idempotency_key_reused", lambda: things.once(keys_anywhere.hold("t", "batch_", "k"), "other"))
    assert things.once(keys_anywhere.hold("t", "batch_", "k")) == ({"id": "one"}, True)
    assert things.names == ["one"]


def test_a_key_is_in_use_until_it_was_freed(idempotency_keys: IdempotencyKeys, things: Things, tmp_path: Path) -> None:
    """A call that opened its file before that takes another file, which each later call finds."""
    opened: list[Any] = []

    def refuse(_: str) -> dict[str, Any]:
        refused(409, "idempotency_key_in_use", lambda: idempotency_keys.hold("t", "batch_", "k"))
        [name] = files_in(tmp_path)
        opened.append(open(tmp_path / "store" / "idempotency" / name, "ab+"))  # noqa: SIM115 - closed below
        raise REFUSALS[0]

    with pytest.raises(ApiError), idempotency_keys.hold("t", "batch_", "k") as held:
        held.make_once("first", "id", things.find, refuse)
    with opened[0] as file:
        assert (os.fstat(file.fileno()).st_nlink, os.fstat(file.fileno()).st_size) == (0, 0)
    first, _ = things.once(idempotency_keys.hold("t", "batch_", "k"), "corrected")
    assert things.once(idempotency_keys.hold("t", "batch_", "k"), "corrected") == (first, True)


def test_kills_between_any_two_steps_of_a_refusal_bind_no_corrected_call(
    redis_url: str, idempotency_keys: IdempotencyKeys, things: Things, tmp_path: Path
) -> None:
    """Of a killed call no client has an answer, so each sends the same once more."""

    def refuse(thing: str) -> dict[str, Any]:
        things.make(thing)
        os.rmdir(things.folder / thing)
        raise REFUSALS[0]

    def call(keys: IdempotencyKeys) -> None:
        with pytest.raises(ApiError) as caught, keys.hold("t", "batch_", "k") as held:
            held.make_once("first", f"id{os.getpid()}", find, refuse)
        assert caught.value is REFUSALS[0]

    def find(thing: str) -> dict[str, Any] | None:
        found = things.find(thing)
        if found is not None:
            os.rmdir(things.folder / thing)
        return None

    def call_elsewhere() -> None:
        queue = Queue(connect(redis_url))
        call(IdempotencyKeys(queue, FileStore(queue, str(tmp_path / "store"), forget_output)))

    for number in killed_before_each_step(call_elsewhere):
        call(idempotency_keys)
        assert files_in(tmp_path) == [], number
        things.once(idempotency_keys.hold("t", "batch_", "k"), f"corrected {number}")
        os.unlink(tmp_path / "store" / "idempotency" / files_in(tmp_path)[0])
    assert number > 5


def test_a_key_is_kept_for_a_day(
    idempotency_keys: IdempotencyKeys, things: Things, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = things.once(idempotency_keys.hold("t", "batch_", "k"))
    now = time.time()
    assert idempotency_keys.sweep(now + DAY) == 0
    monkeypatch.setattr(Queue, "now", lambda queue: now + DAY - 60)
    assert things.once(idempotency_keys.hold("t", "batch_", "k")) == (first, True)
    monkeypatch.setattr(Queue, "now", lambda queue: now + DAY + 60)
    second, replayed = things.once(idempotency_keys.hold("t", "batch_", "k"), "other")
    assert not replayed
    assert second != first
    with idempotency_keys.hold("t", "batch_", "k"):
        assert idempotency_keys.sweep(now + 2 * DAY) == 0
    assert idempotency_keys.sweep(now + 2 * DAY) == 1
    assert files_in(tmp_path) == []


def test_a_sweep_goes_on_where_the_last_one_had_no_more_time(
    idempotency_keys: IdempotencyKeys, things: Things, tmp_path: Path
) -> None:
    for number in range(8):
        things.once(idempotency_keys.hold("t", "batch_", f"{number}"))
    names = [entry.name for entry in os.scandir(tmp_path / "store" / "idempotency")]
    for name in names[-2:]:
        age(tmp_path, name)
    removed = [idempotency_keys.sweep(time.time(), 0.0) for _ in names]
    assert removed == [0] * 6 + [1] * 2
    assert set(files_in(tmp_path)) == set(names[:-2])
    assert idempotency_keys.sweep(time.time(), 0.0) == 0
    age(tmp_path, names[0])
    assert sum(idempotency_keys.sweep(time.time(), 0.0) for _ in names) == 1, "it begins again at the end"
    assert set(files_in(tmp_path)) == set(names[1:-2])


def test_a_sweep_goes_past_what_cannot_be_removed(
    idempotency_keys: IdempotencyKeys, things: Things, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(8):
        things.once(idempotency_keys.hold("t", "batch_", f"{number}"))
        bad = tmp_path / "store" / "idempotency" / f"bad{number}"
        bad.mkdir()
    for name in files_in(tmp_path):
        age(tmp_path, name)
    assert idempotency_keys.sweep(time.time()) == 8
    assert sorted(files_in(tmp_path)) == [f"bad{number}" for number in range(8)]
    assert caplog.text.count("failed to remove the idempotency key") == 8


def age(tmp_path: Path, name: str) -> None:
    """Let a key's time be over."""
    made = time.time() - 2 * DAY
    os.utime(tmp_path / "store" / "idempotency" / name, (made, made))


def test_a_line_that_was_cut_off_does_not_count(
    idempotency_keys: IdempotencyKeys, things: Things, tmp_path: Path
) -> None:
    first, _ = things.once(idempotency_keys.hold("t", "batch_", "k"))
    [path] = (tmp_path / "store" / "idempotency").iterdir()
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        before = set(things.names)
        answer, replayed = things.once(idempotency_keys.hold("t", "batch_", "k"))
        begun = b"\n" in whole[:length]
        assert replayed == begun, length
        assert (answer == first) == begun
        assert len(set(things.names) - before) == int(not begun)
        assert path.read_bytes().count(b"\n") == 2


def test_kills_between_any_two_steps_make_one_thing(
    redis_url: str, idempotency_keys: IdempotencyKeys, things: Things, tmp_path: Path
) -> None:
    def call() -> None:
        queue = Queue(connect(redis_url))
        keys = IdempotencyKeys(queue, FileStore(queue, str(tmp_path / "store"), forget_output))
        things.once(keys.hold("t", "batch_", f"key {len(things.names)}"))

    number = 0
    for number in killed_before_each_step(call):
        made = set(things.names)
        assert len(made) in (number - 1, number)
        answer, replayed = things.once(idempotency_keys.hold("t", "batch_", f"key {number - 1}"))
        assert replayed == (len(made) == number), "a call that is repeated makes nothing more"
        assert answer["id"] in things.names
        assert len(things.names) == number
    assert number > 5


@pytest.mark.parametrize("is_made", [False, True])
def test_of_two_calls_that_have_a_key_in_a_bucket_one_makes_something(
    queue: Queue, redis_client: redis.Redis, is_made: bool
) -> None:
    """Redis is emptied while the first is at work, and so its lease is gone."""
    with bucket() as remote:
        keys = IdempotencyKeys(queue, FileStore(queue, remote.uri, forget_output))
        answers = []

        def make(thing: str) -> dict[str, Any]:
            if write_new(f"{remote.uri}/{thing}", b"made") is None:
                raise StoreError("given up")
            return {"id": thing}

        def find(thing: str) -> dict[str, Any] | None:
            write_new(f"{remote.uri}/{thing}", b"")
            return {"id": thing} if read_bytes(f"{remote.uri}/{thing}") else None

        def make_beside_another(thing: str) -> dict[str, Any]:
            made = make(thing) if is_made else None
            redis_client.flushall()
            with keys.hold("t", "batch_", "k") as second:
                answers.append(second.make_once("digest", "two", find, make))
            return made or make(thing)

        with contextlib.suppress(StoreError), keys.hold("t", "batch_", "k") as first:
            answers.append(first.make_once("digest", "one", find, make_beside_another))
        one = {"id": "one" if is_made else "two"}
        assert answers == ([(one, True), (one, False)] if is_made else [(one, False)])
        with keys.hold("t", "batch_", "k") as third:
            assert third.make_once("digest", "three", find, make) == (one, True)


def test_keys_in_a_bucket_are_kept_for_a_day(queue: Queue, things: Things) -> None:
    with bucket() as remote:
        keys = IdempotencyKeys(queue, FileStore(queue, remote.uri, forget_output))
        things.once(keys.hold("t", "batch_", "k"))
        assert keys.sweep(time.time() + DAY) == 0
        with keys.hold("t", "batch_", "k"):
            assert keys.sweep(time.time() + 2 * DAY) == 0
        assert keys.sweep(time.time() + 2 * DAY) == 1
        assert things.once(keys.hold("t", "batch_", "k"))[1] is False


def test_keys_in_a_bucket_that_lists_milliseconds_are_removed_all_but_one_that_cannot_be(
    queue: Queue, things: Things, caplog: pytest.LogCaptureFixture
) -> None:
    with bucket() as remote:
        remote.server.milliseconds = True
        keys = IdempotencyKeys(queue, FileStore(queue, remote.uri, forget_output))
        for number in range(3):
            things.once(keys.hold("t", "batch_", f"{number}"))
        folder = f"{remote.uri}/idempotency"
        names = list_names(folder)
        remote.server.refused = f"HEAD /store/idempotency/{names[0]}"
        assert keys.sweep(time.time() + 2 * DAY) == 2
        assert list_names(folder) == names[:1]
        assert caplog.text.count("failed to remove the idempotency key") == 1
        remote.server.refused = ""
        assert keys.sweep(time.time() + 2 * DAY) == 1
