"""A short run of what `make chaos` does for ten minutes: failures of every kind, close together."""

import os
from pathlib import Path

import pytest

from tests.chaos.__main__ import run


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("setting", "seconds"), [("folder", 120), ("sentinel", 70), ("bucket", 60)])
def test_nothing_is_lost_or_doubled_whatever_breaks(setting: str, seconds: float, tmp_path: Path) -> None:
    folder = tmp_path / "f"  # short, for the socket in it
    folder.mkdir()
    verdict = run(
        folder,
        seconds=seconds,
        seed=int(os.environ.get("CHAOS_SEED", 1)),
        every=4.5,
        requests=1000,
        workers=2,
        max_num_seqs=64,
        sentinel=setting == "sentinel",
        bucket=setting == "bucket",
    )
    print(verdict.report())
    assert verdict.faults == []
