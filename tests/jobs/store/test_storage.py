"""A file is there whole or not at all, on this machine and on a remote store."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import redis
from pyarrow.fs import LocalFileSystem

from jobs.batch.client import BatchRefused, BatchSpec, create_batch
from jobs.batch.plan import Sorter
from jobs.store import storage
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
    open_input,
    read_bytes,
    shared,
    size_of,
    sweep,
)
from tests.support.batch_steps import begin, run_to_end
from tests.support.control_plane import ROOT, check_echoes, write_input
from tests.support.waiting import wait_until


@pytest.fixture(params=["local", "remote"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder as a path, and the same as a URI that goes through pyarrow's file systems."""
    if request.param == "local":
        return str(tmp_path)
    behind_pyarrow(monkeypatch)
    return f"store://{tmp_path}"


def behind_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(location: str) -> tuple[Any, str]:
        return LocalFileSystem(), location.removeprefix("store://")

    monkeypatch.setattr(storage, "_remote", resolve)


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


def test_what_is_not_committed_leaves_nothing(root: str) -> None:
    with AtomicWriter(join(root, "a")) as writer:
        writer.write(b"x" * 1_000_000)
    assert list_names(root) == []


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


def test_each_new_folder_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(storage, "sync_folder", synced.append)
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


def test_a_batch_whose_files_are_remote(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind_pyarrow(monkeypatch)
    source = write_input(tmp_path / "in.jsonl", 50)
    begin(redis_client, write_input(tmp_path / "other" / "in.jsonl", 1))
    store = f"store://{tmp_path}"
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
    check_echoes(source.with_name("out.jsonl"), 50)


def test_relative_locations_are_the_caller_s(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(tmp_path / "in.jsonl", 1)
    monkeypatch.chdir(tmp_path)
    record = create_batch(redis_client, BatchSpec(input="in.jsonl", root="b", models=("m",)))
    assert (record.spec.input, record.spec.root) == (f"{tmp_path}/in.jsonl", f"{tmp_path}/b")
