"""All processes, as a Redis user with just the permissions that the documentation names."""

import re
from pathlib import Path

import pytest
import redis

from jobs.queue.connection import PERMISSIONS
from tests.pipeline.results import check_answers, examples
from tests.support.commands import REPOSITORY, run_pipeline, running_pipeline
from tests.support.ports import reserved_port

pytestmark = pytest.mark.proof


def test_a_batch_ends_and_no_command_is_denied(redis_client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    redis_client.execute_command("ACL", "SETUSER", "pipeline", "reset", "on", ">word", *PERMISSIONS.split())
    redis_client.acl_log_reset()
    url = redis_url.replace("://", "://pipeline:word@")
    source, output = examples(tmp_path / "in.jsonl", 40), tmp_path / "out.jsonl"
    try:
        with (
            reserved_port() as port,
            running_pipeline("serve", "--port", port, "--file-store", tmp_path / "store", redis_url=url) as server,
        ):
            server.wait_for("worker INFO ready")
            done = run_pipeline("run-batch", source, "-o", output, redis_url=url)
            assert done.returncode == 0, done.stderr + server.output
            assert run_pipeline("status", redis_url=url).returncode == 0
            assert "Traceback" not in server.output
        check_answers(source, output)
        assert redis_client.acl_log() == []
    finally:
        redis_client.acl_deluser("pipeline")


def test_the_documentation_names_them() -> None:
    text = (REPOSITORY / "docs" / "deployment.md").read_text()
    assert re.findall(r"ACL SETUSER pipeline on >PASSWORD (.*)", text) == [PERMISSIONS]
