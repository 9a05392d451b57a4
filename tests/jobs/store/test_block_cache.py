"""Blocks of objects are kept while there is room for them, and read without it."""

import errno
import os

import pytest

from jobs.store.block_cache import BLOCK_BYTES, BlockCache

CONTENT = bytes(range(256)) * (3 * BLOCK_BYTES // 256) + b"end"


class OneObject:
    """One object, and how often it was asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def fetch(self, start: int, end: int) -> tuple[bytes, int]:
        self.calls += 1
        return CONTENT[start:end], len(CONTENT)


def test_what_was_read_costs_no_call() -> None:
    cache, bucket = BlockCache(), OneObject()
    assert cache.reader("a", bucket.fetch).read() == CONTENT
    calls = bucket.calls
    assert cache.reader("a", bucket.fetch).read() == CONTENT
    assert bucket.calls == calls


def test_a_full_disk_keeps_nothing_and_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache, bucket = BlockCache(), OneObject()
    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(2):
        assert cache.reader("a", bucket.fetch).read() == CONTENT
    monkeypatch.undo()
    assert cache.reader("a", bucket.fetch).read() == CONTENT
    calls = bucket.calls
    assert cache.reader("a", bucket.fetch).read() == CONTENT
    assert bucket.calls == calls


def test_so_many_files_are_open_and_no_more() -> None:
    cache, bucket = BlockCache(most_objects=3), OneObject()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(10):
        assert cache.reader(str(number), bucket.fetch).read() == CONTENT
    assert len(os.listdir("/proc/self/fd")) <= before + 3
