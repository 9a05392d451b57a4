"""The file to which answers are appended, run after run."""

from pathlib import Path

import pytest

from jobs.protocol.results import ApiError, Result, Usage, batch_request_id, output_line
from pipeline.errors import Refused
from pipeline.piped.sinks import FileSink, check_sink

BATCH = "batch_0a"


def answer(line: int, batch: str = BATCH, text: str = "x", status: int = 200) -> bytes:
    result = Result(status, b'{"text":"%b"}' % text.encode(), Usage(), "req_1")
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


def test_the_last_answer_of_a_line_says_whether_it_runs_again(tmp_path: Path) -> None:
    """Errors of the server do, and nothing in a custom_id is taken for a status."""
    path = tmp_path / "out.jsonl"
    sink = FileSink(path, BATCH)
    odd = output_line('","response":{"status_code":500', Result(200, b"{}", Usage(), "r"), batch_request_id(BATCH, 4))
    sink.write([answer(1, status=500), answer(2, status=500), answer(2), answer(3, status=400), odd + b"\n"])
    sink.close()
    again = FileSink(path, BATCH)
    assert [line for line in range(20) if line in again.written] == [2, 3, 4]
    assert [line for line in range(20) if line in again.failed] == [3]
    again.close()


def test_a_later_run_knows_which_lines_were_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    prefix = batch_request_id(BATCH, 0)[:-1]
    names = ["stdin_3_00ff", "stdin_12_0a"]
    sink = FileSink(path, BATCH)
    refusal = ApiError(400, "no").result("req_1")
    sink.write(output_line(None, refusal, f"{prefix}{name}") + b"\n" for name in names)
    sink.close()
    again = FileSink(path, BATCH)
    assert again.refused == {*names}
    assert again.written.count() == 0
    again.close()


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
    with pytest.raises(Refused, match="no run that wrote it can be resumed"):
        check_sink(path, root)
    root.mkdir()
    check_sink(path, root)
    for name in ("a.parquet", "a.csv", "a.jsonl.gz", "a.csv.zst"):
        with pytest.raises(Refused, match="names another format"):
            check_sink(tmp_path / name, root)
    with pytest.raises(Refused, match="is not a file"):
        check_sink(tmp_path, root)
