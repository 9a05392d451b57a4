"""The whole product on the portable ways, with the functions of Linux alone taken away."""

import os
import re
from pathlib import Path

import pytest

from tests.pipeline.results import check_answers, examples
from tests.support import http_calls
from tests.support.commands import REPOSITORY, run_pipeline, running_pipeline
from tests.support.processes import command_line, descendants, is_running
from tests.support.waiting import wait_until

WITHOUT_LINUX = {
    "PIPELINE_PORTABLE": "1",
    "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "tests" / "support" / "without_linux"), str(REPOSITORY)]),
}
pytestmark = pytest.mark.proof


def test_a_batch_file_is_answered_without_functions_of_linux(tmp_path: Path) -> None:
    source = examples(tmp_path / "requests.jsonl", 3)
    done = run_pipeline("run-batch", source, **WITHOUT_LINUX)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    check_answers(source, tmp_path / "requests.results.jsonl")


def test_a_server_answers_and_its_processes_end_with_it_without_functions_of_linux() -> None:
    with running_pipeline("serve", "--port", 0, "--api-server-count", 2, **WITHOUT_LINUX) as command:
        url = re.search(r"listening on (http://\S+)", command.wait_for("listening on"))
        assert url is not None
        command.wait_for("worker INFO ready")
        wait_until(lambda: http_calls.get(f"{url[1]}/ready").status_code == 200, 60, "the model to be served")
        body = {"model": "demo", "prompt": "a", "max_tokens": 3}
        answer = http_calls.post(f"{url[1]}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        below = descendants(command.process.pid)
        assert any("server" in command_line(pid) for pid in below)
        command.process.kill()
        command.process.wait()
        wait_until(lambda: not any(map(is_running, below)), 60, "all processes to end")
        assert "Traceback" not in command.output
