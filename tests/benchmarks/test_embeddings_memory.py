"""That memory does not grow with the number of texts of a file, in no process and not in Redis."""

from pathlib import Path

import pytest

from benchmarks.embeddings_memory import measure

TEXTS = 60_000
MOST_MB = 300  # of every process but the engine's
# From the third to the last fifth; who writes Parquet loads pyarrow at the end
GROWTH_MB = {"jsonl": 32, "parquet": 96}


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file_format", GROWTH_MB)
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
    allowed = GROWTH_MB[file_format]
    assert {name: level for name, level in followed.items() if level["last"] > level["third"] + allowed} == {}
