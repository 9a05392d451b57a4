"""The client and the command line in the folder of a project with modules called as ours are."""

import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from tests.support.commands import EXAMPLES

READ = """
from pathlib import Path
from batch_inference_pipeline import Rows, rows
import api, jobs, pipeline
assert {getattr(module, "of_the_project", False) for module in (api, jobs, pipeline)} == {True}
line = next(rows.lines_of_table(Path("table.parquet"), Rows(prompt_column="text"), "it"))
assert b"Count from 2 to 4." in line, line
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with modules of its own, called as ours and as one that ours import."""
    (tmp_path / "pipeline.py").write_text("of_the_project = True\n")
    (tmp_path / "torch.py").write_text("raise SystemExit('the torch of the project')\n")
    for name in ("api", "jobs", "workers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("of_the_project = True\n")
    return tmp_path


def test_the_client_and_its_processes_leave_a_projects_modules_alone(project: Path) -> None:
    parquet.write_table(pyarrow.table({"text": ["Count from 2 to 4."]}), project / "table.parquet")
    done = subprocess.run([sys.executable, "-c", READ], cwd=project, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", [("-m", "batch_inference_pipeline"), ("-P", "-m", "pipeline")], ids=" ".join)
def test_the_command_line_runs_in_a_projects_folder(project: Path, module: tuple[str, ...]) -> None:
    """Also where this process alone was started without the folder."""
    (project / "requests.jsonl").write_text("".join(EXAMPLES.read_text().splitlines(keepends=True)[:2]))
    command = [sys.executable, *module, "run-batch", "requests.jsonl"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len((project / "requests.results.jsonl").read_text().splitlines()) == 2


def test_the_former_name_warns() -> None:
    program = "from pipeline.client import Rows; from batch_inference_pipeline import Rows as now; assert Rows is now"
    done = subprocess.run([sys.executable, "-W", "always", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "DeprecationWarning: pipeline.client is now called batch_inference_pipeline" in done.stderr
