"""That memory does not grow with the number of texts of a file, in no process and not in Redis."""

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.embeddings_memory import measure

TEXTS = 60_000
MOST_MB = 300  # of every process but the engine's
GROWTH_MB = 32  # from the third to the last fifth
LOADING = """
def resident(): return int(open("/proc/self/statm").read().split()[1])
before = resident()
import pyarrow.compute, pyarrow.dataset, pyarrow.parquet
print(resident() - before)
"""


def loading_mb(file_format: str) -> float:
    """What a process takes more that loads pyarrow at the end, as one does that writes Parquet."""
    if file_format == "jsonl":
        return 0.0
    pages = subprocess.run([sys.executable, "-c", LOADING], check=True, capture_output=True, text=True).stdout
    return int(pages) * mmap.PAGESIZE / 1e6


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file_format", ["jsonl", "parquet"])
def test_many_short_texts_take_no_more_memory_than_few(
    file_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCHMARK_CACHE", str(tmp_path))
    figures = measure(tmp_path, "tiny-32", TEXTS, file_format, seed=1)
    print(figures)
    # What is a process's own share depends on what else runs
    levels = {name: level for name, level in figures["mb"].items() if not name.endswith(", own")}
    above = {name: level for name, level in levels.items() if level["peak"] > MOST_MB and "engine core" not in name}
    assert above == {}
    followed = {name: level for name, level in levels.items() if level.keys() >= {"third", "last"}}
    assert {name.split(",")[0] for name in followed} >= {"Redis", "worker", "rq worker", "the command", "ticker"}
    assert "Redis, used_memory" in followed
    allowed = GROWTH_MB + loading_mb(file_format)
    assert {name: level for name, level in followed.items() if level["last"] > level["third"] + allowed} == {}
