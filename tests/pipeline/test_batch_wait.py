"""Copies of a batch's results."""

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


def test_a_device_is_written_as_it_is(tmp_path: Path) -> None:
    source = tmp_path / "results.jsonl"
    source.write_text("x")
    copy_results(str(source), Path("/dev/null"))
    assert Path("/dev/null").is_char_device()
