"""Quotes of CSV are checked while its rows are read, in whatever pieces it comes."""

import random
from pathlib import Path

import pytest

from jobs.batch.csv_quotes import QuoteCheck
from jobs.batch.input_files import CSV, InputError
from jobs.batch.tables import open_table


def complaint(pieces: list[bytes]) -> str | None:
    """What the check says about CSV that comes in pieces."""
    check = QuoteCheck("in.csv")
    for piece in pieces:
        check.add(piece)
    try:
        check.end()
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b'\xef\xbb\xbf"a"\r\n"b""\r\n""c"\r\n', None),
        (b'\xef\xbb\xbf"a"\r\n"b""\r\nc\r\n', 2),
        (b'a,"b\r\rc"x,"\nd"', 1),
        (b'a\n"b"x,"c" ,5" d\n"e\n" ,"f\n\n\n"g,"h"', 4),
        (b'a\r"b', 2),
        (b'a\r"b"', None),
    ],
)
def test_pieces_of_any_size_are_as_the_whole(data: bytes, line: int | None) -> None:
    for size in range(1, len(data) + 1):
        said = complaint([data[at : at + size] for at in range(0, len(data), size)])
        assert said is None if line is None else f"in.csv has a cell in line {line} that" in (said or "")


def test_pieces_at_random_are_as_the_whole(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(2000):
        data = bytes(draw.choice(b'",\r\n ab') for _ in range(draw.randrange(30)))
        cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(5)))
        pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert complaint(pieces) == complaint([data]), data


def test_the_rows_of_csv_are_read_once(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_bytes(b"id,text\n" + b'1,"one, ""two"""\n' * 1_000_000)
    before = _bytes_read()
    rows = sum(batch.num_rows for batch in open_table(str(source), CSV).read(["text"]))
    assert rows == 1_000_000
    assert _bytes_read() - before < 1.5 * source.stat().st_size


def _bytes_read() -> int:
    """Of all files, by this process."""
    figures = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(figures["rchar"])
