"""Runs a file of tests of the official JavaScript client."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "contract" / "javascript"


def run_javascript(file: str, api_url: str = "", **variables: str) -> None:
    """Fail where one of its tests does; skip where there is no node or no client."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine")
    if not all((FOLDER / "node_modules" / name).is_dir() for name in ("openai", "zod")):
        pytest.skip("the npm packages are not installed (make test installs them where there is npm)")
    done = subprocess.run(
        [node, "--test", "--test-reporter=spec", file],
        cwd=FOLDER,
        env={**os.environ, "OPENAI_BASE_URL": f"{api_url}/v1", **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
