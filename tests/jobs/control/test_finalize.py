"""Result files: every line once, in input order, in OpenAI's shape or as typed columns; the same
bytes however often they are written.
"""

import base64
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import redis
from pyarrow import parquet

from jobs.batch.client import cancel_batch, get_batch
from jobs.batch.manifest import Manifest
from jobs.batch.source import note_source
from jobs.control import finalize, parquet_results, slices
from jobs.protocol.pooling_parameters import EMBEDDINGS, SCORE
from jobs.protocol.requests import Claim
from jobs.protocol.results import ApiError, Result, Usage, encode_json
from jobs.queue.request_queue import Queue
from jobs.store.storage import AtomicWriter, sha256_of
from tests.support.batch_steps import answer_all, begin, run_to_end, step
from tests.support.control_plane import chat_line, check_echoes, echo, failing, read_jsonl, write_input
from tests.support.integrity import faults
from tests.support.kills import Killed
from tests.support.unreadable import in_circles


def ready_to_finalize(client: redis.Redis, source: Path, **options: Any) -> str:
    batch = begin(client, source, **options).id
    while step(client, batch).state != "finalizing":
        answer_all(client)
    return batch


def test_inline_failures_are_in_their_place(redis_client: redis.Redis, tmp_path: Path) -> None:
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 10)).id
    record = run_to_end(redis_client, batch, failing(3, 8))
    assert (record.state, record.total, record.completed, record.failed) == ("completed", 10, 8, 2)
    assert (record.output, record.error_output) == (str(tmp_path / "out.jsonl"), None)
    lines = read_jsonl(tmp_path / "out.jsonl")
    assert [line["custom_id"] for line in lines] == [f"c{n}" for n in range(1, 11)]
    good, bad = lines[0], lines[2]
    assert good == {
        "id": f"batch_req_{batch.removeprefix('batch_')}_1",
        "custom_id": "c1",
        "response": {"status_code": 200, "request_id": "req_1", "body": good["response"]["body"]},
        "error": None,
    }
    assert good["response"]["body"]["choices"][0]["message"]["content"] == "say 1"
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["code"] == bad["error"]["code"] == "bad_luck"
    assert record.usage.prompt_tokens == 8 * 7


def test_separate_failures(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 10)
    record = run_to_end(redis_client, begin(redis_client, source, error_file="separate", output=None).id, failing(3, 8))
    root = tmp_path / "out.parts"
    assert (record.output, record.error_output) == (f"{root}/output.jsonl", f"{root}/errors.jsonl")
    assert [line["custom_id"] for line in read_jsonl(root / "errors.jsonl")] == ["c3", "c8"]
    assert [line["custom_id"] for line in read_jsonl(root / "output.jsonl")] == [
        f"c{n}" for n in (1, 2, 4, 5, 6, 7, 9, 10)
    ]


@pytest.mark.parametrize("failures", [(), (1, 2)])
def test_a_file_with_nothing_in_it_is_not_made(
    redis_client: redis.Redis, tmp_path: Path, failures: tuple[int, ...]
) -> None:
    source = write_input(tmp_path / "in.jsonl", 2)
    record = run_to_end(redis_client, begin(redis_client, source, error_file="separate").id, failing(*failures))
    assert (record.output is None, record.error_output is None) == (bool(failures), not failures)
    assert (tmp_path / "out.jsonl").exists() == (not failures)
    assert (tmp_path / "out.parts" / "errors.jsonl").exists() == bool(failures)


def test_parquet_in_gives_typed_columns_out(redis_client: redis.Redis, tmp_path: Path) -> None:
    rows = [{"custom_id": f"c{n}", "prompt": f"say {n}", "model": "m", "max_tokens": 5} for n in range(1, 6)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    batch = begin(redis_client, tmp_path / "in.parquet", output=str(tmp_path / "out.parquet")).id
    assert run_to_end(redis_client, batch, failing(4)).completed == 4
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.schema.field("prompt_tokens").type == pyarrow.int64()
    assert table["custom_id"].to_pylist() == [f"c{n}" for n in range(1, 6)]
    assert table["text"].to_pylist() == ["say 1", "say 2", "say 3", None, "say 5"]
    assert table["status_code"].to_pylist() == [200, 200, 200, 400, 200]
    assert table["finish_reason"].to_pylist() == ["length"] * 3 + [None, "length"]
    assert table["error_code"].to_pylist() == [None, None, None, "bad_luck", None]
    assert table["completion_tokens"].to_pylist() == [3, 3, 3, 0, 3]
    assert json.loads(table["response"][0].as_py())["object"] == "text_completion"


@pytest.mark.parametrize(("source", "output"), [("in.jsonl", "out.parquet"), ("in.parquet", "out.jsonl")])
def test_the_output_s_name_decides_its_form(
    redis_client: redis.Redis, tmp_path: Path, source: str, output: str
) -> None:
    if source == "in.jsonl":
        write_input(tmp_path / source, 3)
    else:
        messages = [[{"role": "user", "content": f"say {n}"}] for n in range(1, 4)]
        rows = [{"custom_id": f"c{n}", "messages": asked, "model": "m"} for n, asked in enumerate(messages, 1)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / source)
    run_to_end(redis_client, begin(redis_client, tmp_path / source, output=str(tmp_path / output)).id)
    if output == "out.jsonl":
        check_echoes(tmp_path / output, 3)
    else:
        assert parquet.read_table(tmp_path / output)["text"].to_pylist() == ["say 1", "say 2", "say 3"]


def test_an_empty_parquet_output_has_its_columns(redis_client: redis.Redis, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"")
    run_to_end(redis_client, begin(redis_client, tmp_path / "in.jsonl", output=str(tmp_path / "out.parquet")).id)
    table = parquet.read_table(tmp_path / "out.parquet")
    assert (table.num_rows, table.column_names[:3]) == (0, ["custom_id", "id", "status_code"])


@pytest.mark.parametrize("call", ["write_outputs", "commit", "save_manifest", "transition", "clean_up"])
def test_killed_anywhere_it_writes_the_same_bytes(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    source = write_input(tmp_path / "in.jsonl", 20)
    batch = ready_to_finalize(redis_client, source)
    owner: Any = {"write_outputs": finalize, "commit": finalize.LineWriter, "transition": Queue}.get(call, slices)
    real = getattr(owner, call)

    def run_then_die(*arguments: Any, **options: Any) -> Any:
        done = real(*arguments, **options)
        if call != "transition" or "completed" in arguments:
            raise Killed
        return done

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, run_then_die)
        with pytest.raises(Killed):
            step(redis_client, batch)
    if call == "commit":
        first = (tmp_path / "out.jsonl").read_bytes()
    record = run_to_end(redis_client, batch) if Queue(redis_client).batch_fields(batch).state == "finalizing" else None
    assert record is None or (record.state, record.completed, record.usage.completion_tokens) == ("completed", 20, 60)
    assert call != "commit" or (tmp_path / "out.jsonl").read_bytes() == first
    check_echoes(tmp_path / "out.jsonl", 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.parts"]


@pytest.mark.parametrize("output", ["out.jsonl", "elsewhere/out.parquet"])
def test_a_kill_leaves_nothing_beside_the_output(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    batch = ready_to_finalize(redis_client, write_input(tmp_path / "in.jsonl", 5), output=str(tmp_path / output))

    def die(writer: AtomicWriter) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(AtomicWriter, "commit", die)
        patch.setattr(AtomicWriter, "close", lambda writer: None)  # a killed process tidies nothing
        with pytest.raises(Killed):
            step(redis_client, batch)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["in.jsonl"]
    with patched_pid(monkeypatch):
        assert run_to_end(redis_client, batch).completed == 5
    assert not list(tmp_path.rglob(".*.tmp"))
    assert (tmp_path / output).exists()


@contextmanager
def patched_pid(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The next process has another id."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1 << 30)
        yield


def test_a_cancelled_batch_answers_every_line(redis_client: redis.Redis, tmp_path: Path) -> None:
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 20), error_file="separate").id
    step(redis_client, batch)
    step(redis_client, batch)
    answer_all(redis_client, most=5)
    queue = Queue(redis_client)
    claims = queue.claim("w2", 1, 3, models=["m"])
    assert cancel_batch(redis_client, batch).state == "cancelling"
    assert queue.renew("w2", [(claim.key, claim.fence) for claim in claims]) == [claim.key for claim in claims]
    record = run_to_end(redis_client, batch)
    assert (record.state, record.total, record.completed, record.failed) == ("cancelled", 20, 5, 15)
    done = [line["custom_id"] for line in read_jsonl(tmp_path / "out.jsonl")]
    lost = read_jsonl(tmp_path / "out.parts" / "errors.jsonl")
    assert sorted(done + [line["custom_id"] for line in lost]) == sorted(f"c{n}" for n in range(1, 21))
    assert all(line["response"] is None and line["error"]["code"] == "batch_cancelled" for line in lost)


def test_finished_lines_of_a_cancelled_batch_wait_for_a_part_that_cannot_be_read(
    redis_client: redis.Redis, tmp_path: Path
) -> None:
    batch = begin(redis_client, write_input(tmp_path / "in.jsonl", 20)).id
    step(redis_client, batch)
    step(redis_client, batch)
    answer_all(redis_client, most=5)
    step(redis_client, batch)
    cancel_batch(redis_client, batch)
    [part] = (tmp_path / "out.parts" / "parts").iterdir()
    with in_circles(part):
        record = step(redis_client, batch)
        assert record.state == "cancelling"
        assert f"cannot read {part}: Too many levels of symbolic links" in (record.problem or "")
    record = step(redis_client, batch)
    assert (record.state, record.completed, record.failed) == ("cancelled", 5, 15)
    assert sum(line["error"] is None for line in read_jsonl(tmp_path / "out.jsonl")) == 5


def test_lines_of_a_part_that_breaks_on_disk_run_again(redis_client: redis.Redis, tmp_path: Path) -> None:
    batch = ready_to_finalize(redis_client, write_input(tmp_path / "in.jsonl", 20))
    [part] = (tmp_path / "out.parts" / "parts").iterdir()
    content = part.read_bytes()
    part.write_bytes(content[: len(content) // 2])
    record = step(redis_client, batch)
    assert (record.state, record.problem) == ("in_progress", None)
    assert 5 < record.completed < 15
    seen: list[int] = []

    def answer(claim: Claim) -> Result:
        seen.append(claim.key.line)
        return echo(claim)

    again = run_to_end(redis_client, batch, answer)
    assert (again.state, again.completed, again.failed, again.usage.prompt_tokens) == ("completed", 20, 0, 140)
    assert len(seen) == 20 - record.completed
    check_echoes(tmp_path / "out.jsonl", 20)
    assert faults(redis_client) == []


def test_a_part_that_is_gone_runs_again(redis_client: redis.Redis, tmp_path: Path) -> None:
    batch = ready_to_finalize(redis_client, write_input(tmp_path / "in.jsonl", 20))
    [part] = (tmp_path / "out.parts" / "parts").iterdir()
    part.unlink()
    assert (step(redis_client, batch).state, get_batch(redis_client, batch).completed) == ("in_progress", 0)
    assert run_to_end(redis_client, batch).completed == 20
    check_echoes(tmp_path / "out.jsonl", 20)


def test_an_input_that_changed_is_not_written_against(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 5)
    batch = ready_to_finalize(redis_client, source)
    content = source.read_bytes()
    source.write_bytes(content.replace(b"c3", b"c4"))
    assert "changed while its batch runs" in str(step(redis_client, batch).problem)
    source.write_bytes(content)
    assert run_to_end(redis_client, batch).completed == 5
    check_echoes(tmp_path / "out.jsonl", 5)


def test_no_space_for_the_output_is_a_problem_until_there_is_some(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "results"
    batch = ready_to_finalize(redis_client, write_input(tmp_path / "in.jsonl", 5), output=str(folder / "out.jsonl"))
    folder.rmdir()
    record = step(redis_client, batch)
    assert record.state == "finalizing"
    assert record.problem == f"cannot write {folder / 'out.jsonl'}: No such file or directory"
    folder.mkdir()
    assert step(redis_client, batch).problem is None
    check_echoes(folder / "out.jsonl", 5)


def test_a_line_without_a_result_in_an_unfinished_batch_is_never_left_out(
    tmp_path: Path,
    redis_client: redis.Redis,
) -> None:
    source = write_input(tmp_path / "in.jsonl", 3)
    record = begin(redis_client, source)
    manifest = Manifest(batch_id=record.id, created_at=1.0, spec=record.spec, total=3)
    note_source(manifest, str(source), sha256_of(str(source)))
    with pytest.raises(finalize.ResultsMissing, match="line 1"):
        finalize.write_outputs(manifest, lambda: None)
    assert not (tmp_path / "out.jsonl").exists()


def test_blank_lines_and_unicode_ids_keep_their_places(redis_client: redis.Redis, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n" + chat_line("Zeile \u2028 \U0001f600") + b"\r\n" + chat_line('quo"te\\') + b"  ")
    run_to_end(redis_client, begin(redis_client, source).id)
    assert [line["custom_id"] for line in read_jsonl(tmp_path / "out.jsonl")] == ["Zeile \u2028 \U0001f600", 'quo"te\\']


def embedded(number: int, size: int = 4) -> list[float]:
    """Numbers for a line, each a float32."""
    return [number + i / 8 for i in range(size)]


def answered(claim: Claim) -> Result:
    """Number, position and size as the line's text says: embeddings, a score, or an error."""
    number, texts = claim.key.line, json.loads(claim.request.body)
    dtype = {"embed_dtype": texts["embed_dtype"]} if "embed_dtype" in texts else {}
    usage = Usage(prompt_tokens=3)
    if claim.request.endpoint == SCORE:
        data: list[dict[str, Any]] = [{"object": "score", "index": 0, "score": number / 4}]
    elif texts["input"] == "error":
        return ApiError(400, "no", code="bad_luck").result(f"req_{number}")
    else:
        inputs = texts["input"] if isinstance(texts["input"], list) else [texts["input"]]
        letter = "e" if dtype else "f"
        data = [
            {"object": "embedding", "index": i, "embedding": given(number, text, letter)}
            for i, text in enumerate(inputs)
        ]
    return Result(200, encode_json({"object": "list", "data": data, "model": "m", **dtype}), usage, f"req_{number}")


def given(number: int, text: str, letter: str) -> list[float] | str:
    vector = embedded(number, 3 if text == "short" else 4)
    packed = struct.pack(f"<{len(vector)}{letter}", *vector)
    return base64.b64encode(packed).decode() if text == "base64" else vector


def text_line(number: int, text: Any, url: str = EMBEDDINGS, **more: str) -> bytes:
    texts = {"queries": text, "documents": text} if url == "/score" else {"input": text}
    body = {"model": "m", **texts, **more}
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}).encode() + b"\n"


def run_texts(client: redis.Redis, folder: Path, lines: list[bytes]) -> pyarrow.Table:
    (folder / "in.jsonl").write_bytes(b"".join(lines))
    run_to_end(client, begin(client, folder / "in.jsonl", output=str(folder / "out.parquet")).id, answered)
    return parquet.read_table(folder / "out.parquet")


def test_embeddings_become_a_column_of_fixed_size_lists(redis_client: redis.Redis, tmp_path: Path) -> None:
    texts = ["error", "x", "base64", ["a", "b"], "short", ["alone"], "x"]
    table = run_texts(redis_client, tmp_path, [text_line(n, text) for n, text in enumerate(texts, 1)])
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float32(), 4)
    expected = [None, embedded(2), embedded(3), None, None, embedded(6), embedded(7)]
    assert table["embedding"].to_pylist() == expected
    responses = table["response"].to_pylist()
    assert [response is None for response in responses] == [vector is not None for vector in expected]
    assert json.loads(responses[3])["data"][1]["embedding"] == embedded(4)
    assert json.loads(responses[4])["data"][0]["embedding"] == embedded(5, 3)
    assert table["model"].to_pylist() == [None] + ["m"] * 6
    assert table["error_code"].to_pylist() == ["bad_luck"] + [None] * 6
    assert "score" not in table.column_names


def test_embeddings_in_float16_become_a_column_of_these(redis_client: redis.Redis, tmp_path: Path) -> None:
    """A line of another type, as long in bytes or as many numbers, is whole in its response."""
    half = [text_line(n, text, embed_dtype="float16") for n, text in enumerate(["error", "base64", "x"], 1)]
    table = run_texts(redis_client, tmp_path, [*half, text_line(4, "base64"), text_line(5, "x")])
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float16(), 4)
    assert table["embedding"].to_pylist() == [None, embedded(2), embedded(3), None, None]
    responses = table["response"].to_pylist()
    assert [response is None for response in responses] == [False, True, True, False, False]
    assert json.loads(responses[4])["data"][0]["embedding"] == embedded(5)


def test_scores_become_a_column_beside_embeddings(redis_client: redis.Redis, tmp_path: Path) -> None:
    table = run_texts(redis_client, tmp_path, [text_line(1, "x"), text_line(2, "x", "/score")])
    assert table.schema.field("score").type == pyarrow.float32()
    assert table["score"].to_pylist() == [None, 0.5]
    assert table["embedding"].to_pylist() == [embedded(1), None]


def test_without_any_embedding_there_is_no_column(redis_client: redis.Redis, tmp_path: Path) -> None:
    table = run_texts(redis_client, tmp_path, [text_line(n, "error") for n in range(1, 4)])
    assert {"embedding", "score"}.isdisjoint(table.column_names)


def test_embeddings_of_several_row_groups(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of which has errors alone."""
    monkeypatch.setattr(parquet_results, "_ROWS", 3)
    texts = ["error"] * 4 + ["x"] * 6
    table = run_texts(redis_client, tmp_path, [text_line(n, text) for n, text in enumerate(texts, 1)])
    assert parquet.ParquetFile(tmp_path / "out.parquet").num_row_groups == 4
    assert table["embedding"].to_pylist() == [None] * 4 + [embedded(n) for n in range(5, 11)]
