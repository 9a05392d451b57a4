"""Lines of a pipe, whatever the pieces in which they come."""

import os
import threading
from collections.abc import Iterator

import pytest

from jobs.batch import input_files
from jobs.batch.input_files import InputLine
from jobs.host import WakeUp
from pipeline.piped import stdin_lines
from pipeline.piped.stdin_lines import StdinLines


@pytest.fixture
def stop() -> Iterator[WakeUp]:
    wake_up = WakeUp()
    yield wake_up
    wake_up.close()


def read_all(data: bytes, stop: WakeUp) -> list[tuple[int, bytes | None]]:
    """What is read of a pipe into which all is written."""
    reader, writer = os.pipe()

    def write() -> None:
        with os.fdopen(writer, "wb") as file:
            file.write(data)

    thread = threading.Thread(target=write)
    thread.start()
    lines = [(line.number, line.raw) for group in StdinLines(reader, stop) for line in group]
    thread.join()
    os.close(reader)
    return lines


def test_blank_lines_count_and_the_last_needs_no_line_feed(stop: WakeUp) -> None:
    assert read_all(b"\xef\xbb\xbfa\n\n  \r\nb\r\nc", stop) == [(1, b"a"), (4, b"b\r"), (5, b"c")]
    assert read_all(b"", stop) == []


def test_lines_may_be_larger_than_one_read(stop: WakeUp) -> None:
    large = b"x" * (3 * stdin_lines._READ_BYTES + 7)
    assert read_all(large + b"\n" + large + b"\nend\n", stop) == [(1, large), (2, large), (3, b"end")]


def test_too_long_a_line_is_passed_over(stop: WakeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    assert input_files.MAX_LINE_BYTES > 10
    monkeypatch.setattr(input_files, "MAX_LINE_BYTES", 10)
    assert read_all(b"0123456789\n01234567890\nb\n" + b"y" * 11, stop) == [
        (1, b"0123456789"),
        (2, None),
        (3, b"b"),
        (4, None),
    ]


def test_each_group_comes_as_soon_as_its_lines_are_whole(stop: WakeUp) -> None:
    reader, writer = os.pipe()
    groups = iter(StdinLines(reader, stop))
    os.write(writer, b"a\nb\nc")
    assert next(groups) == [InputLine(1, 0, b"a"), InputLine(2, 0, b"b")]
    os.write(writer, b"d\n")
    assert next(groups) == [InputLine(3, 0, b"cd")]
    os.write(writer, b"e\nf")
    stop.ring()
    assert next(groups, None) is None
    os.close(reader)
    os.close(writer)
