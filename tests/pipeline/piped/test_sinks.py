"""The file to which answers are appended, run after run."""

from pathlib import Path

import pytest

from jobs.protocol.results import Result, Usage, batch_request_id, output_line
from pipeline.errors import Refused
from pipeline.piped.sinks import FileSink, check_sink

BATCH = "batch_0a"


def answer(line: int, batch: str = BATCH, text: str = "x") -> bytes:
    result = Result(200, b'{"text":"%b"}' % text.encode(), Usage(), "req_1")
    return output_line(f"id-{line}", result, batch_request_id(batch, line)) + b"\n"


def test_a_later_run_knows_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = FileSink(path, BATCH)
    first.write([answer(1), answer(12), answer(3, batch="batch_other"), b'{"id":"batch_req_0a_stdin_4"}\n'])
    first.close()
    again = FileSink(path, BATCH)
    assert [line for line in range(20) if line in again.written] == [1, 12]
    again.write([answer(2)])
    again.close()
    assert path.read_bytes().splitlines(True)[-1] == answer(2)


@pytest.mark.parametrize("size", [10, 200_000])
def test_a_torn_line_is_cut_off(tmp_path: Path, size: int) -> None:
    path, whole = tmp_path / "out.jsonl", answer(1) + answer(2)
    for before in (whole, b""):
        path.write_bytes(before + answer(3, text="y" * size)[: size + 5])
        sink = FileSink(path, BATCH)
        sink.close()
        assert path.read_bytes() == before
        assert 3 not in sink.written


def test_outputs_that_cannot_be_appended_to_are_refused(tmp_path: Path) -> None:
    path, root = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts"
    check_sink(path, root)
    path.touch()
    check_sink(path, root)
    path.write_text("something\n")
    with pytest.raises(Refused, match="of no run that could go on"):
        check_sink(path, root)
    root.mkdir()
    check_sink(path, root)
    for name in ("a.parquet", "a.csv", "a.jsonl.gz", "a.csv.zst"):
        with pytest.raises(Refused, match="names another format"):
            check_sink(tmp_path / name, root)
    with pytest.raises(Refused, match="is no file"):
        check_sink(tmp_path, root)
