"""A note takes the place of a complete run's folder, wherever the process is killed between."""

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs.batch.manifest import Manifest, load_manifest, save_manifest
from jobs.protocol.requests import Claim
from jobs.protocol.results import ApiError, Result
from jobs.store.storage import write_bytes
from pipeline.completed import find_completed, finish_removal, is_noted, leave_note, replace_folder
from pipeline.errors import Refused
from pipeline.held_folder import RUN_LOCK, held
from tests.support.batch_steps import begin, run_to_end
from tests.support.control_plane import Answer, chat_line, echo


def run(client: redis.Redis, folder: Path, answer: Answer = echo) -> Manifest:
    """Run a file of two requests to its end."""
    (folder / "in.jsonl").write_bytes(chat_line("a") + chat_line("b"))
    run_to_end(client, begin(client, folder / "in.jsonl").id, answer)
    manifest = load_manifest(str(folder / "out.parts"))
    assert manifest is not None
    return manifest


def find(manifest: Manifest, folder: Path) -> Manifest | None:
    return find_completed(folder / "out.parts", folder / "out.jsonl", manifest.spec)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_folder_goes_once_the_note_is_there(redis_client: redis.Redis, tmp_path: Path) -> None:
    manifest = run(redis_client, tmp_path)
    assert find(manifest, tmp_path) is None
    replace_folder(tmp_path / "out.parts")
    assert names_in(tmp_path) == {"in.jsonl", "out.jsonl", ".out.jsonl.completed"}
    assert is_noted(tmp_path / "out.jsonl")
    found = find(manifest, tmp_path)
    assert found is not None
    assert (found.batch_id, found.completed, found.parts) == (manifest.batch_id, 2, [])


@pytest.mark.parametrize("removed", [(), ("manifest.json",), ("manifest.json", "plan.bin")])
def test_a_removal_that_was_cut_short_is_finished(
    redis_client: redis.Redis, tmp_path: Path, removed: tuple[str, ...]
) -> None:
    manifest, root = run(redis_client, tmp_path), tmp_path / "out.parts"
    assert leave_note(root)
    for name in removed:
        (root / name).unlink()
    (root / RUN_LOCK).touch()
    assert find(manifest, tmp_path) is not None
    assert finish_removal(root, manifest, is_held=False, keep_parts=bool(removed)) is False
    assert not root.exists()


def test_a_whole_folder_is_kept_where_that_is_asked_for(redis_client: redis.Redis, tmp_path: Path) -> None:
    manifest, root = run(redis_client, tmp_path), tmp_path / "out.parts"
    assert leave_note(root)
    before = names_in(root)
    assert finish_removal(root, manifest, is_held=False, keep_parts=True) is True
    assert (names_in(root), load_manifest(str(root))) == (before, manifest)


@pytest.mark.parametrize("function", ["unlink", "rmdir"])
def test_a_folder_that_cannot_be_removed_is_named_in_one_warning(
    redis_client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    function: str,
) -> None:
    manifest, root = run(redis_client, tmp_path), tmp_path / "out.parts"
    remove = getattr(os, function)

    def refuse(path: Any, **options: Any) -> None:
        if str(path).startswith(str(root)):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        remove(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, function, refuse)
        for begin_removal in (lambda: replace_folder(root), lambda: finish_removal(root, manifest, False, False)):
            caplog.clear()
            begin_removal()
            [warning] = caplog.messages
            assert f"{root} stays, though the run is complete: " in warning
            assert find(manifest, tmp_path) is not None
    finish_removal(root, manifest, is_held=False, keep_parts=False)
    assert not root.exists()


def test_an_output_is_known_by_its_bytes(redis_client: redis.Redis, tmp_path: Path) -> None:
    """Not by its time, as of one that was copied, restored or touched."""
    manifest, output = run(redis_client, tmp_path), tmp_path / "out.jsonl"
    replace_folder(tmp_path / "out.parts")
    content, ns = output.read_bytes(), output.stat().st_mtime_ns
    os.utime(output, ns=(ns, ns + 1))
    assert find(manifest, tmp_path) is not None
    output.write_bytes(content[:-2] + b" \n")
    os.utime(output, ns=(ns, ns + 1))
    with pytest.raises(Refused, match="has changed since the run completed it"):
        find(manifest, tmp_path)


def test_a_run_with_failed_requests_keeps_its_folder(redis_client: redis.Redis, tmp_path: Path) -> None:
    def fail_one(claim: Claim) -> Result:
        return ApiError(400, "no").result("r") if claim.request.custom_id == "a" else echo(claim)

    manifest = run(redis_client, tmp_path, fail_one)
    replace_folder(tmp_path / "out.parts")
    assert load_manifest(str(tmp_path / "out.parts")) == manifest
    assert not is_noted(tmp_path / "out.jsonl")


def test_a_note_of_a_removed_output_or_an_older_run_is_dropped(redis_client: redis.Redis, tmp_path: Path) -> None:
    manifest, root = run(redis_client, tmp_path), tmp_path / "out.parts"
    content = (tmp_path / "out.jsonl").read_bytes()
    replace_folder(root)
    (tmp_path / "out.jsonl").unlink()
    assert find(manifest, tmp_path) is None
    assert names_in(tmp_path) == {"in.jsonl"}
    later = run(redis_client, tmp_path)
    assert leave_note(root)
    later.batch_id = "batch_later"
    save_manifest(later)
    write_bytes(str(tmp_path / "out.jsonl"), content)
    assert find(manifest, tmp_path) is None
    assert root.exists()
    assert not is_noted(tmp_path / "out.jsonl")


def test_a_folder_that_its_holder_removed_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the opening of the lock file and the lock."""
    flock, root = fcntl.flock, tmp_path / "out.parts"

    def lock_too_late(handle: int, kind: int) -> None:
        monkeypatch.undo()
        shutil.rmtree(root)
        flock(handle, kind)

    monkeypatch.setattr(fcntl, "flock", lock_too_late)
    with held(str(root), "in use", lock=RUN_LOCK):
        assert names_in(root) == {RUN_LOCK}
