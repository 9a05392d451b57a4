"""Copies of a batch's results."""

import os
import resource
from pathlib import Path

import pytest

from jobs.store.storage import StoreError
from pipeline.batch_wait import copy_results


def test_a_copy_that_fails_leaves_the_file_of_before(tmp_path: Path) -> None:
    """The file system takes no file of that size."""
    source, target = tmp_path / "results.jsonl", tmp_path / "copies" / "copy.jsonl"
    source.write_bytes(b"x" * 100_000)
    target.parent.mkdir()
    target.write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(StoreError, match="cannot write"):
            copy_results(str(source), target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert target.read_text() == "before"
    assert list(target.parent.iterdir()) == [target]
    copy_results(str(source), target)
    assert target.read_bytes() == source.read_bytes()


def test_a_pipe_and_the_file_behind_a_link_are_written_as_they_are(tmp_path: Path) -> None:
    source, pipe, link, file = (tmp_path / name for name in ("results.jsonl", "pipe", "link", "file"))
    source.write_text("x")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        copy_results(str(source), pipe)
        assert os.read(reader, 9) == b"x"
    finally:
        os.close(reader)
    file.write_text("before")
    link.symlink_to(file)
    copy_results(str(source), link)
    assert link.is_symlink()
    assert file.read_text() == "x"


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    source, target = tmp_path / "results.jsonl", tmp_path / "copy.jsonl"
    source.write_text("x")
    target.touch()
    target.chmod(0o600)
    copy_results(str(source), target)
    assert target.stat().st_mode & 0o777 == 0o600
