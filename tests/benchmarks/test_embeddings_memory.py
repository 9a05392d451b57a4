"""That memory does not grow with the number of texts of a file, in no process and not in Redis."""

from pathlib import Path

import pytest

from benchmarks.embeddings_memory import measure

TEXTS = 30_000
MOST_MB = 300  # of every process but the engine's
# From the third to the last fifth; who writes Parquet loads pyarrow at the end
GROWTH_MB = {"jsonl": 16, "parquet": 80}


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file_format", GROWTH_MB)
def test_many_short_texts_take_no_more_memory_than_few(
    file_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCHMARK_CACHE", str(tmp_path))
    figures = measure(tmp_path, "tiny-32", TEXTS, file_format, seed=1)
    print(figures)
    levels = figures["mb"]
    assert {name for name in levels if name.endswith("used_memory")} == {"Redis, used_memory"}
    above = {name: level for name, level in levels.items() if level["peak"] > MOST_MB and "engine core" not in name}
    assert above == {}
    followed = {name: level for name, level in levels.items() if "third" in level and "last" in level}
    assert {name.split(",")[0] for name in followed} >= {"Redis", "worker", "rq worker", "the command", "ticker"}
    grown = {name for name, level in followed.items() if level["last"] > level["third"] + GROWTH_MB[file_format]}
    assert grown == set()
