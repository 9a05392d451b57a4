"""The official JavaScript client: one node process runs its suite against the stack."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.batch_stack import BatchStack

FOLDER = Path(__file__).parent / "javascript"


def test_the_javascript_clients_suite(stack: BatchStack) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine")
    if not (FOLDER / "node_modules" / "openai").is_dir():
        pytest.skip("the npm package openai is not installed (make test installs it where there is npm)")
    done = subprocess.run(
        [node, "--test", "--test-reporter=spec", "suite.js"],
        cwd=FOLDER,
        env={**os.environ, "OPENAI_BASE_URL": f"{stack.api_url}/v1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
