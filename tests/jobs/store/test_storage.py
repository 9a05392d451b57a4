"""A file is there whole or not at all, on this machine and on a remote store."""

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import obstore
import pytest
import redis

from jobs.batch.client import BatchRefused, BatchSpec, create_batch
from jobs.batch.plan import Sorter
from jobs.store import storage
from jobs.store.local_storage import LocalStorage
from jobs.store.storage import (
    AtomicWriter,
    Busy,
    StoreError,
    absolute,
    delete,
    exclusive,
    join,
    list_names,
    make_folder,
    open_at,
    open_input,
    read_bytes,
    shared,
    size_of,
    sweep,
)
from tests.support.batch_steps import begin, run_to_end
from tests.support.control_plane import ROOT, check_echoes, write_input
from tests.support.object_stores import CLOUDS, bucket, cloud, environment_of
from tests.support.processes import open_files
from tests.support.relay import Relay
from tests.support.waiting import wait_until


@pytest.fixture(params=["local", "s3", *CLOUDS])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder as a path, and one of a bucket of each kind as a URI."""
    if request.param == "local":
        yield str(tmp_path)
        return
    with cloud(request.param) as uri:
        yield f"{uri}/folder"


def test_files_come_and_go(root: str) -> None:
    name = join(root, "a.txt")
    assert (size_of(name), list_names(root), list_names(join(root, "none"))) == (None, [], [])
    with AtomicWriter(name) as writer:
        writer.write(b"one\n")
        writer.write(b"two\n")
        writer.commit()
    assert (size_of(name), read_bytes(name), list_names(root)) == (8, b"one\ntwo\n", ["a.txt"])
    assert storage.sha256_of(name) == writer.sha256
    with open_input(name) as file:
        assert file.readline() == b"one\n"
        file.seek(5)
        assert file.read() == b"wo\n"
    delete(name)
    delete(name)
    assert list_names(root) == []
    with pytest.raises(StoreError, match=r"cannot read .*a\.txt"):
        open_input(name)


def test_a_copy_is_whole_when_its_source_goes(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Azure a copy is answered before it has its bytes."""
    source, name = join(root, "source"), join(root, "copy")
    storage.write_bytes(source, b"x" * 1000)
    if root.startswith("az://"):
        monkeypatch.setattr(obstore, "copy", lambda client, _, path: obstore.put(client, path, b""))
    storage.link(source, name)
    delete(source)
    assert read_bytes(name) == b"x" * 1000
    with pytest.raises(StoreError, match=f"cannot (link {source} to|write) {name}") as caught:
        storage.link(source, name)
    assert storage.is_missing(caught.value)


def test_a_file_that_is_none_is_named_by_each_read(tmp_path: Path) -> None:
    reader = open_at(str(tmp_path))
    with contextlib.closing(reader), pytest.raises(StoreError, match=f"cannot read {tmp_path}: Is a directory"):
        reader.read_at(0, 1)


def test_a_reader_that_is_dropped_is_closed(tmp_path: Path) -> None:
    storage.write_bytes(str(tmp_path / "a"), b"x")
    reader = open_at(str(tmp_path / "a"))
    assert reader.read_at(0, 1) == b"x"
    assert open_files(tmp_path) == 1
    del reader
    assert open_files(tmp_path) == 0


def test_an_object_of_google_is_written_again_after_a_second() -> None:
    with bucket("gs") as remote:
        remote.server.pace = 0.9
        name = f"{remote.uri}/a"
        version = storage.write_new(name, b"1") or ""
        assert storage.replace_version(name, b"2", version) is not None
        assert read_bytes(name) == b"2"


def test_what_is_not_committed_leaves_nothing(root: str) -> None:
    with AtomicWriter(join(root, "a")) as writer:
        writer.write(b"x" * 1_000_000)
    assert list_names(root) == []


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("refused", ["", "PUT /store/folder/a?partNumber=2", "POST /store/folder/a?uploadId"])
def test_what_is_not_committed_leaves_no_parts_in_a_bucket(refused: str, scheme: str) -> None:
    with bucket(scheme) as remote:
        remote.server.refused = refused
        with contextlib.suppress(StoreError), AtomicWriter(f"{remote.uri}/folder/a") as writer:
            for _ in range(5):
                writer.write(b"x" * (8 << 20))
            if refused:
                writer.commit()
        assert any("partNumber=1&" in call for call in remote.server.calls)
        assert b"<Upload>" not in remote.server.call("GET", "store?uploads")[1]
        assert remote.keys() == []


def test_the_log_says_what_a_bucket_has_not_removed(caplog: pytest.LogCaptureFixture) -> None:
    with bucket() as remote:
        folder = f"{remote.uri}/folder"
        storage.write_bytes(join(folder, "a"), b"x")
        remote.server.read_only = True
        storage.remove_tree(folder)
        assert [record.message.partition(": ")[0] for record in caplog.records] == [f"failed to remove {folder}"]
        assert remote.keys() == ["folder/a"]
        remote.server.read_only = False
        storage.remove_tree(folder)
        assert (remote.keys(), len(caplog.records)) == ([], 1)


def test_the_old_file_stays_until_the_new_one_is_whole(root: str) -> None:
    name = join(root, "a")
    storage.write_bytes(name, b"old")
    with AtomicWriter(name) as writer:
        writer.write(b"dropped" * 1_000_000)
    assert read_bytes(name) == b"old"
    writer = AtomicWriter(name)
    writer.write(b"new" * 1_000_000)
    assert read_bytes(name) == b"old"
    writer.commit()
    assert size_of(name) == 3_000_000
    assert list_names(root) == ["a"]


@pytest.mark.parametrize("unchanging", [False, True])
def test_an_object_that_cannot_be_read_to_its_end_is_named(unchanging: bool) -> None:
    with bucket() as remote, Relay(remote.server.environment["AWS_ENDPOINT_URL"]) as relay:
        name = join(remote.uri, "a")
        with environment_of(urlsplit(relay.url).port or 0):
            storage.write_bytes(name, b"x" * (20 << 20))
            with open_input(name, unchanging=unchanging) as file, open_at(name) as reader:
                assert len(file.read(1 << 20)) == 1 << 20
                relay.is_away = True
                relay.cut()
                for read in (file.read, lambda: reader.read_at(15 << 20, 5)):
                    with pytest.raises(StoreError, match=f"cannot read {name}: it cannot be reached"):
                        read()
                relay.is_away = False
                assert file.read(5) == b"xxxxx"
                assert reader.read_at(15 << 20, 5) == b"xxxxx"


def test_each_new_folder_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(LocalStorage, "sync_folder", lambda _, path: synced.append(Path(path)))
    for _ in range(2):
        make_folder(str(tmp_path / "a" / "b"))
        assert synced == [tmp_path, tmp_path / "a"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do anything")
def test_what_may_not_be_looked_at_is_named(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(0)
    for look in (size_of, delete):
        with pytest.raises(StoreError, match="Permission denied"):
            look(str(closed / "a"))
    with pytest.raises(StoreError, match=r"cannot list .*: Permission denied"):
        list_names(str(closed))


def test_a_sort_that_finds_no_space_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(dir: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(StoreError, match=r"cannot sort in .*: No space left on device"):
        Sorter(1, tmp_path, 1).add(b"x")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("needs /dev/full")
    writer = AtomicWriter(str(tmp_path / "a"))
    writer._file.close()
    writer._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with pytest.raises(StoreError, match=r"cannot write .*/a: No space left on device"), writer:
        writer.write(b"x")
    assert list_names(str(tmp_path)) == []


def test_a_kill_leaves_a_file_that_sweep_removes(tmp_path: Path) -> None:
    script = (
        f"from jobs.store.storage import *; w = AtomicWriter({str(tmp_path / 'a')!r}); w.write(b'x' * 10**6);"
        " import os; os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert list_names(str(tmp_path)) != []
    sweep(str(tmp_path))
    assert list_names(str(tmp_path)) == []


def test_a_folder_is_shared_by_many_or_held_by_one(tmp_path: Path) -> None:
    root = str(tmp_path)
    with shared(root, 0), shared(root, 0), pytest.raises(Busy), exclusive(root, 0):
        raise AssertionError
    for hold in (shared, exclusive):
        with exclusive(root, 0), pytest.raises(Busy), hold(root, 0):
            raise AssertionError
    with pytest.raises(StoreError, match="is remote"), shared("memory://x", 0):
        raise AssertionError


def test_a_lock_file_that_its_holder_removed_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the opening of the file and its lock."""
    flock = fcntl.flock

    def lock_too_late(handle: int, kind: int) -> None:
        monkeypatch.undo()
        (tmp_path / ".lock").unlink()
        flock(handle, kind)

    monkeypatch.setattr(fcntl, "flock", lock_too_late)
    with exclusive(str(tmp_path), 0), pytest.raises(Busy), exclusive(str(tmp_path), 0):
        raise AssertionError


def test_the_kernel_lets_go_of_a_dead_holder_s_folder(tmp_path: Path) -> None:
    script = (
        f"import time\nfrom jobs.store.storage import exclusive\nwith exclusive({str(tmp_path)!r}, 0): print('held',"
        " flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(Busy), exclusive(str(tmp_path), 0.05):
        raise AssertionError
    holder.kill()
    holder.wait()

    def free() -> bool:
        try:
            with exclusive(str(tmp_path), 0):
                return True
        except Busy:
            return False

    wait_until(free, 60, "the folder is free")


def test_locations() -> None:
    assert absolute("a/b") == f"{os.getcwd()}/a/b"
    assert absolute("s3://bucket/a") == "s3://bucket/a"
    assert storage.local_path("file:///a%20b") == Path("/a b")
    assert storage.local_path("s3://bucket/a") is None


def test_a_batch_whose_files_are_remote(redis_client: redis.Redis, tmp_path: Path) -> None:
    with bucket() as remote:
        check_a_remote_batch(redis_client, tmp_path, remote.uri)


def check_a_remote_batch(redis_client: redis.Redis, tmp_path: Path, store: str) -> None:
    storage.write_bytes(f"{store}/in.jsonl", write_input(tmp_path / "in.jsonl", 50).read_bytes())
    begin(redis_client, write_input(tmp_path / "other" / "in.jsonl", 1))
    with pytest.raises(BatchRefused, match="is remote: it must be on a file system that has locks"):
        create_batch(redis_client, BatchSpec(input=f"{store}/in.jsonl", root=f"{store}/b", models=("m",)))
    spec = BatchSpec(
        input=f"{store}/in.jsonl",
        root=str(tmp_path / "b"),
        output=f"{store}/out.jsonl",
        error_file="inline",
        models=("m",),
    )
    assert run_to_end(redis_client, create_batch(redis_client, spec).id).completed == 50
    written = tmp_path / "out.jsonl"
    written.write_bytes(read_bytes(f"{store}/out.jsonl"))
    check_echoes(written, 50)


def test_relative_locations_are_the_caller_s(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(tmp_path / "in.jsonl", 1)
    monkeypatch.chdir(tmp_path)
    record = create_batch(redis_client, BatchSpec(input="in.jsonl", root="b", models=("m",)))
    assert (record.spec.input, record.spec.root) == (f"{tmp_path}/in.jsonl", f"{tmp_path}/b")
