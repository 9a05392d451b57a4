"""The benchmark of the way from the engine to the client, at a small size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY

pytestmark = pytest.mark.proof


def test_a_paced_core_serves_every_stream_to_its_end(tmp_path: Path) -> None:
    size = ("--model", "tiny", "--streams", "8", "--tokens", "20", "--pace-ms", "20")
    subprocess.run(
        [sys.executable, "-m", "benchmarks.queue_latency", "--only", "paced", *size, "--out", str(tmp_path)],
        cwd=REPOSITORY,
        check=True,
        timeout=200,
    )
    [report] = tmp_path.glob("*/*.json")
    figures = json.loads(report.read_text())["figures"]
    assert (figures["streams"], figures["lost_streams"]) == (8, 0)
    assert 0 < figures["added_ms"]["p50"] <= figures["added_ms"]["p99"]
