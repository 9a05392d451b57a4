"""The last released version: its code from the history of git, and how to run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY

PREVIOUS = "f3db12a91fc6216c5459fc4475cab67093cebb57"
"""The commit of the last released version."""


def code_of(tree: Path) -> dict[str, str]:
    """Return an environment in which `python -m pipeline`, and what it starts, is that tree's."""
    return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}


def unpack_previous(folder: Path) -> Path:
    """Unpack the tree of `PREVIOUS`; skip the test where the clone does not have it."""
    archive = subprocess.run(["git", "archive", PREVIOUS], cwd=REPOSITORY, capture_output=True)
    if archive.returncode != 0:
        pytest.skip(f"this clone lacks commit {PREVIOUS}; get it with `git fetch --unshallow`")
    subprocess.run(["tar", "-x"], input=archive.stdout, cwd=folder, check=True)
    where = [sys.executable, "-c", "import pipeline; print(pipeline.__file__)"]
    found = subprocess.run(where, env=os.environ | code_of(folder), capture_output=True, text=True, check=True).stdout
    assert Path(found).is_relative_to(folder), f"the version before is not what runs, but {found}"
    return folder
