"""docs/embeddings.md: its examples run as printed, and its example file gives what it says."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pyarrow
import pytest
from pyarrow import parquet

from tests.support import http_calls
from tests.support.commands import REPOSITORY, run_pipeline, running_pipeline
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof
PAGE = (REPOSITORY / "docs" / "embeddings.md").read_text()
EXAMPLE = REPOSITORY / "examples" / "embeddings.parquet"


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--task", "embed", "--served-model-name", "demo", "--port", 0)
    with running_pipeline("serve", *flags, "--file-store", tmp_path_factory.mktemp("store")) as command:
        found = re.search(r"listening on (http://\S+)", command.wait_for("listening on"))
        assert found is not None
        command.wait_for("worker INFO ready")
        wait_until(lambda: http_calls.get(f"{found[1]}/ready").status_code == 200, 60, "the model to be served")
        yield f"{found[1]}/v1"


def blocks(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return "".join(text for text in found if "OPENAI_BASE_URL" in text)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_the_shell_examples_of_the_page_run(base_url: str) -> None:
    lines = blocks("bash").splitlines()
    assert len(lines) == 4
    for line in lines:
        done = subprocess.run(["bash", "-c", line], env={"OPENAI_BASE_URL": base_url}, capture_output=True, timeout=60)
        answer = json.loads(done.stdout)
        assert answer.get("data") or answer["results"], answer


def test_the_python_example_of_the_page_runs(
    base_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", base_url)
    exec(compile(blocks("python"), "docs/embeddings.md", "exec"), {})
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("2 ")
    assert others == ["score 200", "rerank 200", "pooling 200"]


def test_the_example_file_gives_the_embeddings_of_live_calls(base_url: str, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    done = run_pipeline("run-batch", EXAMPLE, "-o", output, "--task", "embed")
    assert done.returncode == 0, done.stderr
    table, texts = parquet.read_table(output), parquet.read_table(EXAMPLE)
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        live = [
            item.embedding for item in client.embeddings.create(model="demo", input=texts["input"].to_pylist()).data
        ]
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float32(), len(live[0]))
    assert table["custom_id"].to_pylist() == texts["custom_id"].to_pylist()
    assert table["response"].to_pylist() == [None] * len(live)
    for given, expected in zip(table["embedding"].to_pylist(), live, strict=True):
        assert sum(a * b for a, b in zip(given, expected, strict=True)) > 0.99
