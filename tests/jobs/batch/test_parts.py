"""Parts hold what was written or say that they do not; merging gives each line once, in order."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from jobs.batch import parts
from jobs.batch.parts import (
    Part,
    PartDamaged,
    PartIndex,
    drop_all,
    drop_unlisted,
    merge_parts,
    read_part,
    salvage,
    to_compact,
    verify,
    write_part,
)
from jobs.protocol.results import Result, Usage
from jobs.store import object_storage
from jobs.store.block_cache import BlockCache
from jobs.store.storage import StoreError, join
from tests.support.object_stores import bucket
from tests.support.unreadable import breaking, denied, few_descriptors, in_circles


def result(line: int, size: int = 20) -> Result:
    return Result(200, b'{"n":%d,"pad":"%b"}' % (line, b"x" * size), Usage(line, 2, 1), f"req_{line}")


def write(root: Path, name: str, lines: list[int]) -> Part:
    return write_part(str(root), name, ((line, result(line)) for line in lines))


def test_a_part_gives_back_what_went_in(tmp_path: Path) -> None:
    part = write(tmp_path, "p1", [1, 5, 9])
    assert part.lines == 3
    assert part.bytes == (tmp_path / "parts" / "p1").stat().st_size
    assert verify(str(tmp_path), part)
    assert [(record.line, record.result) for record in read_part(str(tmp_path), "p1")] == [
        (line, result(line)) for line in (1, 5, 9)
    ]


def test_every_torn_end_is_found(tmp_path: Path) -> None:
    part = write(tmp_path, "p1", list(range(4)))
    path = tmp_path / "parts" / "p1"
    whole = path.read_bytes()
    assert len(whole) % 4 == 0
    size = len(whole) // 4
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert not verify(str(tmp_path), part)
        assert [record.line for record in salvage(str(tmp_path), "p1")] == list(range(length // size))
        if length % size:
            with pytest.raises(PartDamaged):
                list(read_part(str(tmp_path), "p1"))


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    part = write(tmp_path, "p1", [0, 1, 2])
    path = tmp_path / "parts" / "p1"
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x41]) + whole[position + 1 :])
        assert not verify(str(tmp_path), part)
        found = list(salvage(str(tmp_path), "p1"))
        assert [record.line for record in found] == list(range(position // (len(whole) // 3)))
        assert all(record.result == result(record.line) for record in found)


def test_records_are_found_by_their_lines(tmp_path: Path) -> None:
    write(tmp_path, "p1", [line for line in range(1, 1000) if line % 3])
    index = PartIndex(str(tmp_path), "p1")
    assert [record.line for record in index.records([0, 1, 3, 500, 501, 502, 998, 999, 5000])] == [1, 500, 502, 998]
    assert [record.result for record in index.records([2, 997])] == [result(2), result(997)]
    assert index.damage is None


def test_a_part_that_ends_before_the_lines_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, "p1", [*range(1, 100)])
    index = PartIndex(str(tmp_path), "p1")
    (tmp_path / parts.FOLDER / "p1").unlink()
    assert list(index.records([100, 5000])) == []
    assert index.damage is None


def test_records_before_a_damage_are_found(tmp_path: Path) -> None:
    write(tmp_path, "p1", [*range(1, 301)])
    path = tmp_path / parts.FOLDER / "p1"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    index = PartIndex(str(tmp_path), "p1")
    assert [record.line for record in index.records([1, 100, 299])] == [1, 100]
    assert "p1" in str(index.damage)
    path.unlink()
    assert list(index.records([1])) == []


def test_a_missing_part_is_damaged(tmp_path: Path) -> None:
    assert not verify(str(tmp_path), Part("gone", 1, 1, ""))
    with pytest.raises(PartDamaged):
        list(read_part(str(tmp_path), "gone"))
    assert list(salvage(str(tmp_path), "gone")) == []


@pytest.mark.parametrize("most_open", [128, 3])
def test_merging_gives_each_line_once_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_open: int, seed: int
) -> None:
    monkeypatch.setattr(parts, "MAX_OPEN", most_open)
    rng = random.Random(seed)
    lines = list(range(500))
    rng.shuffle(lines)
    listed = [write(tmp_path, f"p{n}", sorted(lines[n * 40 : n * 40 + 50])) for n in range(13)]
    merged = list(merge_parts(str(tmp_path), listed))
    assert [record.line for record in merged] == list(range(500)), seed
    assert all(record.result == result(record.line) for record in merged)
    assert len(list((tmp_path / "parts").iterdir())) == 13


def test_the_earlier_part_wins(tmp_path: Path) -> None:
    first = write_part(str(tmp_path), "a", [(1, result(1, 5))])
    second = write_part(str(tmp_path), "b", [(1, result(1, 90)), (2, result(2))])
    assert [record.result for record in merge_parts(str(tmp_path), [first, second])] == [result(1, 5), result(2)]


def test_merging_goes_on_past_a_damaged_part(tmp_path: Path) -> None:
    listed = [write(tmp_path, "a", [1, 3, 5]), write(tmp_path, "b", [2, 4, 6])]
    path = tmp_path / "parts" / "a"
    path.write_bytes(path.read_bytes()[:-1])
    assert [record.line for record in merge_parts(str(tmp_path), listed)] == [1, 2, 3, 4, 6]


def test_compaction_keeps_the_number_of_parts_small() -> None:
    listed: list[Part] = []
    for number in range(20_000):
        listed.append(Part(f"p{number}", 100, 1_000_000, ""))
        while tier := to_compact(listed):
            listed = [part for part in listed if part not in tier]
            listed.append(Part(f"c{number}", sum(part.lines for part in tier), sum(part.bytes for part in tier), ""))
    assert sum(part.lines for part in listed) == 2_000_000
    assert len(listed) < 200


def test_unlisted_files_go_but_later_ones(tmp_path: Path) -> None:
    kept = write(tmp_path, "000002-0", [1])
    for name in ("000001-0", "000003-0", "000004-1", "half-written"):
        write(tmp_path, name, [2])
    assert drop_unlisted(str(tmp_path), [kept], 3) == 4
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["000002-0", "000004-1"]
    drop_all(str(tmp_path))
    assert not list((tmp_path / "parts").iterdir())
    assert drop_unlisted(str(tmp_path), [], 3) == 0


@pytest.mark.parametrize("left", [0, 3])
def test_a_process_without_descriptors_damages_no_part(tmp_path: Path, left: int) -> None:
    listed = [write(tmp_path, f"p{number}", [number, number + 10]) for number in range(5)]
    with few_descriptors(left), pytest.raises(StoreError, match=r"cannot read .*/parts/p\d: Too many open files"):
        list(merge_parts(str(tmp_path), listed))
    assert [record.line for record in merge_parts(str(tmp_path), listed)] == [*range(5), *range(10, 15)]


@pytest.mark.parametrize("unreadable", [denied, in_circles, breaking])
def test_a_part_that_cannot_be_read_for_now_is_not_damaged(
    tmp_path: Path, unreadable: Callable[[Path], AbstractContextManager[None]]
) -> None:
    listed, root = [write(tmp_path, "p1", [1, 3]), write(tmp_path, "p2", [2])], str(tmp_path)
    with unreadable(tmp_path / parts.FOLDER / "p1"):
        for read in (lambda: list(salvage(root, "p1")), lambda: list(merge_parts(root, listed))):
            with pytest.raises(StoreError, match=r"cannot read .*/parts/p1: "):
                read()
        with pytest.raises(StoreError):
            PartIndex(root, "p1")
    assert [record.line for record in merge_parts(root, listed)] == [1, 2, 3]


def test_a_bucket_that_does_not_answer_damages_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a part holds is there again once the bucket answers."""
    with bucket() as remote:
        root = join(remote.uri, "batches", "one")
        written = [
            write_part(root, name, ((line, result(line)) for line in lines))
            for name, lines in (("p1", [1, 2, 3]), ("p2", [4, 5, 6]))
        ]
        monkeypatch.setattr(object_storage, "_cache", BlockCache())  # of another process
        remote.server.write_only = True
        with pytest.raises(StoreError):
            list(merge_parts(root, written))
        with pytest.raises(StoreError):
            list(salvage(root, "p1"))
        remote.server.write_only = False
        assert [record.line for record in merge_parts(root, written)] == [1, 2, 3, 4, 5, 6]
        assert list(salvage(root, "p3")) == []
