"""What a person gets wrong: one sentence on stderr, no traceback, the right exit code, and before
any model is loaded.
"""

import json
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.conftest import RunHere
from tests.support.commands import run_pipeline
from workers.engine.messages.config import most_processes
from workers.settings import DEMO_MODEL

Refusal = Callable[..., tuple[int, str]]


@pytest.fixture
def invoke(run_here: RunHere) -> Refusal:
    """`invoke(*arguments, REDIS_URL=...)` gives the exit code and stderr."""

    def run(*arguments: object, **environment: str) -> tuple[int, str]:
        code, _, stderr = run_here(*arguments, **environment)
        return code, stderr

    return run


def line(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body} | changes


def write(path: Path, *lines: dict[str, Any] | bytes) -> Path:
    path.write_bytes(
        b"".join((entry if isinstance(entry, bytes) else json.dumps(entry).encode()) + b"\n" for entry in lines)
    )
    return path


def test_every_bad_line_of_a_file_is_named_at_once(tmp_path: Path, invoke: Refusal) -> None:
    good = line()
    bad: list[tuple[dict[str, Any] | bytes, str]] = [
        (b"\xff\xfe", "not parseable as valid JSON"),
        (b'{"custom_id": "b"', "not parseable as valid JSON"),
        (b"[1]", "not a JSON object"),
        (line(None), "custom_id"),
        (line("a"), "The custom_id 'a' for this request is a duplicate"),
        (line("b" * 513), "maximum length 512"),
        (line("c", method="GET"), "method"),
        (line("d", url="/v1/responses"), "url"),
        (line("e", body={**good["body"], "stream": True}), "stream"),
        (line("f", body=None), "body"),
        (
            line("g", body={**good["body"], "model": "other"}),
            "'other' is not supported by the Batch API.",
        ),
    ]
    source = write(tmp_path / "requests.jsonl", good, *(entry for entry, _ in bad))
    code, stderr = invoke("run-batch", source)
    assert code == 2
    for number, (_, reason) in enumerate(bad, start=2):
        found = [text for text in stderr.splitlines() if text.startswith(f"{source}:{number}: ")]
        assert len(found) == 1, stderr
        assert reason in found[0]
    assert stderr.splitlines()[-1] == f"Error: {source} was refused: {len(bad)} bad lines; nothing was run"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.jsonl"]


def test_a_row_with_too_long_an_id_is_refused(tmp_path: Path, invoke: Refusal) -> None:
    source = tmp_path / "rows.csv"
    source.write_text(f"custom_id,text\n{'a' * 512},Hello\n{'b' * 513},Hello\n")
    code, stderr = invoke("run-batch", source, "--prompt-column", "text")
    assert code == 2
    assert [text for text in stderr.splitlines() if "maximum length 512" in text] == [
        text for text in stderr.splitlines() if text.startswith(f"{source}:2: ")
    ]


@pytest.mark.proof
def test_a_thousand_bad_lines_are_listed_and_the_rest_counted(tmp_path: Path) -> None:
    source = write(tmp_path / "requests.jsonl", *(b"{" for _ in range(1200)))
    done = run_pipeline("run-batch", source)
    assert done.returncode == 2
    assert done.stderr.count("[invalid_json_line]") == 1000
    assert "200 more lines are bad" in done.stderr


@pytest.mark.proof
def test_bad_lines_are_errors_of_their_own_where_that_is_asked(tmp_path: Path) -> None:
    good = line()
    source = write(
        tmp_path / "requests.jsonl",
        line("b", body={**good["body"], "model": "other"}),
        good,
        line("c", url="/v1/responses"),
    )
    done = run_pipeline("run-batch", source, "--skip-invalid-requests")
    assert done.returncode == 0, done.stderr
    results = [json.loads(text) for text in (tmp_path / "requests.results.jsonl").read_text().splitlines()]
    codes = [(result["custom_id"], result["error"] and result["error"]["code"]) for result in results]
    assert codes == [("b", "model_not_found"), ("a", None), ("c", "invalid_url")]
    assert "3 requests, 2 failed" in done.stdout


@pytest.mark.proof
def test_an_empty_file_gives_an_empty_output(tmp_path: Path) -> None:
    source = write(tmp_path / "requests.jsonl")
    done = run_pipeline("run-batch", source)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "requests.results.jsonl").read_bytes() == b""


@pytest.mark.proof
def test_an_output_in_a_folder_that_is_not_there_yet_is_made(tmp_path: Path) -> None:
    source = write(tmp_path / "requests.jsonl")
    done = run_pipeline("run-batch", source, "-o", tmp_path / "new" / "deep" / "results.jsonl")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "new" / "deep" / "results.jsonl").read_bytes() == b""


TOO_MANY = str(most_processes() + 1)
CASES: list[tuple[list[str], str]] = [
    (["run-batch"], "no input is named"),
    (["run-batch", "{tmp}/absent.jsonl"], "there is no file"),
    (["run-batch", "{tmp}"], "is a folder of Parquet files and others: name its files by a pattern"),
    (["run-batch", "{tmp}/empty"], "no file is in {tmp}/empty/"),
    (["run-batch", "{tmp}/good.jsonl", "-i", "{tmp}/other.jsonl"], "two inputs are named"),
    (["run-batch", "{tmp}/good.jsonl", "-o", "{tmp}"], "is a folder"),
    (["run-batch", "{tmp}/good.jsonl", "-o", "{tmp}/good.jsonl"], "is the input itself"),
    (["run-batch", "{tmp}/good.jsonl", "-o", "{tmp}/good.jsonl/results.jsonl"], "results.jsonl"),
    (["run-batch", "{tmp}/good.jsonl", "-o", "/proc/1/results.jsonl"], "/proc/1"),
    (["run-batch", "{tmp}/good.jsonl", "--model", "{tmp}/no-such-model"], "there is no model folder"),
    (["run-batch", "{tmp}/good.jsonl", "--served-model-name", "other"], "refused: 1 bad line"),
    (["run-batch", "{tmp}/good.jsonl", "--detach"], "set REDIS_URL"),
    (["run-batch", "{tmp}/good.jsonl", "--max-num-seqs", "0"], "below 1"),
    (["run-batch", "{tmp}/good.jsonl", "--no-such-flag"], "--no-such-flag"),
    (
        ["run-batch", "{tmp}/good.jsonl", "--profile", "{tmp}/good.jsonl/traces"],
        "traces cannot be made or written to: Not a directory",
    ),
    (
        ["run-batch", "{tmp}/good.jsonl", "--tensor-parallel-size", TOO_MANY],
        f"{TOO_MANY}: that is {TOO_MANY} engine processes",
    ),
    (
        ["serve", "--data-parallel-size", TOO_MANY, "--tensor-parallel-size", "3"],
        f"that is {3 * int(TOO_MANY)} engine processes",
    ),
    (["run-batch", "{tmp}/good.parquet"], "good.parquet"),
    (["serve", "{tmp}/no-such-model"], "there is no model folder"),
    (["run-batch", "{tmp}/good.jsonl", "--model", "{tmp}/model.gguf"], "is in the format GGUF, which is not read"),
    (["serve", "{tmp}/adapter"], "{tmp}/adapter is an adapter of base/model"),
    (["worker", "{tmp}/cloned", "--redis-url", "unix:///nowhere"], "run `git lfs pull` in {tmp}/cloned"),
    (["api"], "set REDIS_URL"),
    (["api", "--host", "0.0.0.0", "--redis-url", "redis://127.0.0.1:1/0"], "there is no API key"),
    (["api", "--file-store", "ftp://bucket/x"], "its URI must begin with s3://, gs:// or az://"),
    (["api", "--completion-window", "tomorrow"], "'tomorrow' is not a length of time"),
    (["serve", "--host", "0.0.0.0", "--port", "0"], "there is no API key"),
    (["worker"], "set REDIS_URL"),
    (["jobs"], "set REDIS_URL"),
    (["status"], "set REDIS_URL"),
    (["tail", "batch_x"], "set REDIS_URL"),
    (["wait", "batch_x"], "set REDIS_URL"),
]


@pytest.mark.parametrize(
    ("arguments", "reason"), CASES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_cannot_be_done_as_asked_is_refused(
    tmp_path: Path, invoke: Refusal, arguments: list[str], reason: str
) -> None:
    write(tmp_path / "good.jsonl", line())
    write(tmp_path / "good.parquet", b"not parquet")
    write(tmp_path / "model.gguf", b"GGUF")
    for name in ("empty", "adapter", "cloned"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "base/model"}')
    (tmp_path / "cloned" / "config.json").write_text("{}")
    (tmp_path / "cloned" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid x\n")
    code, stderr = invoke(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert code == 2, stderr
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith("Error: "), stderr
    assert reason.replace("{tmp}", str(tmp_path)) in stderr


@pytest.mark.proof
@pytest.mark.parametrize("content", ["folder without weights", "pickle only"])
def test_a_model_folder_that_cannot_be_used_is_refused(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    demo = Path(__file__).parent.parent.parent / "workers" / "demo_model"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo / name).read_bytes())
    if content == "pickle only":
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    source = write(
        tmp_path / "requests.jsonl", line(body={"model": "m", "messages": [{"role": "user", "content": "x"}]})
    )
    done = run_pipeline("run-batch", source, "--model", folder, "--served-model-name", "m")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "safetensors" in done.stderr.splitlines()[-1]


def test_a_config_that_no_model_fits_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """The bound is below the processor time of starting Redis and importing torch."""
    demo = json.loads((Path(DEMO_MODEL) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(demo | {"num_key_value_heads": 4}))
    before = children_seconds()
    done = run_pipeline("serve", tmp_path, "--port", "0")
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].endswith("attention heads, which 4 key-value heads do not divide")
    assert children_seconds() - before < 1.5


def children_seconds() -> float:
    """Return the processor time of child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_a_port_in_use_is_refused_before_anything_starts(invoke: Refusal) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, stderr = invoke("serve", "--port", port)
    assert code == 2
    assert stderr.splitlines()[-1].startswith(f"Error: cannot listen on 127.0.0.1:{port}: ")


@pytest.mark.parametrize(
    "command", [["run-batch", "{tmp}/good.jsonl"], ["status"], ["worker"], ["jobs"], ["api"], ["wait", "batch_x"]]
)
def test_a_redis_out_of_reach_is_one_sentence(tmp_path: Path, invoke: Refusal, command: list[str]) -> None:
    write(tmp_path / "good.jsonl", line())
    code, stderr = invoke(*(word.format(tmp=tmp_path) for word in command), REDIS_URL=f"unix://{tmp_path}/no.sock")
    assert code == 1, stderr
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith("Error: Redis cannot be used"), stderr


@pytest.mark.parametrize(
    "command",
    [
        "run-batch {tmp}/good.jsonl",
        "serve --port 0 --file-store {tmp}/store",
        "worker",
        "worker --data-parallel-size 2",
        "jobs --file-store {tmp}/store",
        "api --port 0 --file-store {tmp}/store",
        "health worker",
        "health jobs",
        "status",
        "tail batch_x",
        "wait batch_x",
    ],
)
@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        (
            "WINDOW_BYTES",
            "abc",
            "WINDOW_BYTES must be a whole number above 0, got 'abc': give one, or leave it out for 67108864",
        ),
        (
            "WORKER_DEATHS",
            "-1",
            "WORKER_DEATHS must be a whole number above 0, got '-1': give one, or leave it out for 1000",
        ),
    ],
)
def test_a_variable_of_the_queue_that_cannot_be_used_is_refused(
    tmp_path: Path, invoke: Refusal, redis_url: str, command: str, variable: str, value: str, says: str
) -> None:
    write(tmp_path / "good.jsonl", line())
    fleet = {} if command.startswith(("run-batch", "serve")) else {"REDIS_URL": redis_url}
    code, stderr = invoke(*command.format(tmp=tmp_path).split(), **fleet, **{variable: value})
    assert code == 2, stderr
    assert stderr.splitlines()[-1] == f"Error: {says}"


@pytest.mark.parametrize(("variable", "value"), [("PIPELINE_WATCH_SECONDS", "abc"), ("PIPELINE_MAX_BODY_BYTES", "0")])
def test_a_variable_of_the_api_that_cannot_be_used_is_refused(
    tmp_path: Path, invoke: Refusal, redis_url: str, variable: str, value: str
) -> None:
    code, stderr = invoke("api", "--port", 0, "--file-store", tmp_path, REDIS_URL=redis_url, **{variable: value})
    assert code == 2, stderr
    assert stderr.splitlines()[-1].startswith(f"Error: {variable} must be a whole number above 0, got '{value}'")


@pytest.mark.parametrize(
    ("value", "says"),
    [("soon", "(env var: 'LEASE_SECONDS'): 'soon' is not"), ("nan", "LEASE_SECONDS must be a number")],
)
def test_a_variable_that_is_a_flag_too_is_refused_by_its_name(
    tmp_path: Path, invoke: Refusal, value: str, says: str
) -> None:
    write(tmp_path / "good.jsonl", line())
    code, stderr = invoke("run-batch", tmp_path / "good.jsonl", LEASE_SECONDS=value)
    assert code == 2, stderr
    assert says in stderr.splitlines()[-1]


@pytest.mark.parametrize("command", ["wait", "tail"])
def test_an_unknown_batch_is_refused(redis_url: str, invoke: Refusal, command: str) -> None:
    code, stderr = invoke(command, "batch_absent", REDIS_URL=redis_url)
    assert code == 2
    assert stderr.splitlines()[-1] == "Error: there is no batch batch_absent in the queue"
