"""What a pipe whose answers were removed begins with."""

from pathlib import Path

import pytest

from jobs.batch.manifest import NAME, BatchSpec, Manifest, save_manifest
from pipeline.held_folder import RUN_LOCK
from pipeline.piped.start import _start_over


@pytest.mark.parametrize(("of_a_pipe", "left"), [(True, [RUN_LOCK]), (False, [RUN_LOCK, "input", NAME])])
def test_a_folder_is_emptied_only_if_a_pipe_made_it(tmp_path: Path, of_a_pipe: bool, left: list[str]) -> None:
    """A file that still runs, or was interrupted, has no output yet, and its results are there."""
    root = tmp_path / "out.jsonl.parts"
    (root / "input").mkdir(parents=True)
    (root / RUN_LOCK).touch()
    spec = BatchSpec(input="in.jsonl", root=str(root), streams_input=of_a_pipe)
    save_manifest(Manifest(batch_id="batch_a", created_at=1.0, spec=spec))
    _start_over(root, tmp_path / "out.jsonl")
    assert sorted(path.name for path in root.iterdir()) == sorted(left)
