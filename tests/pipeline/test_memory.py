"""The memory of a worker: its weights once, its KV cache, and no more than 400 MB beside them, in
both of its processes together.
"""

from pathlib import Path

import pytest
import torch

from benchmarks.models import model_folder
from benchmarks.processes import command_line, family, memory
from benchmarks.workload import write_workload
from tests.support.commands import running_pipeline
from tests.support.waiting import wait_until
from workers.engine.checkpoint.dtypes import cpu_dtype
from workers.engine.checkpoint.model_checkpoint import open_checkpoint
from workers.engine.checkpoint.weight_size import weight_bytes

CACHE_BYTES = 256 << 20
SPARE_BYTES = 400 << 20
# Of 2,048 tokens: torch multiplies there, and keeps the values of whole layers
FLOAT32_STEP_BYTES = 192 << 20
LINES = 192  # three times as many as run at once, whose tokens fill the cache several times
RUN_SECONDS = 240


@pytest.mark.proof
@pytest.mark.parametrize("model", ["gpt2-124m"])
def test_a_worker_has_its_weights_once_and_its_cache(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCHMARK_CACHE", str(tmp_path))
    folder = model_folder(model)
    source = write_workload(tmp_path / "in.jsonl", "random", LINES, model, tokens=(2, 8))
    peaks: dict[str, int] = {}
    arguments = (
        "-o",
        tmp_path / "out.jsonl",
        "--model",
        folder,
        "--served-model-name",
        model,
        "--kv-cache-memory-bytes",
        CACHE_BYTES,
    )
    with running_pipeline("run-batch", source, *arguments) as command:
        wait_until(
            lambda: _note(command.process.pid, peaks) or command.process.poll() is not None,
            RUN_SECONDS,
            "the end of the run",
        )
        assert command.process.returncode == 0, command.output
    dtype = cpu_dtype()
    weights = weight_bytes(open_checkpoint(str(folder)), dtype)
    spare = sum(peaks.values()) - weights - CACHE_BYTES
    print(
        {name: f"{size / 2**20:.0f} MB" for name, size in peaks.items()},
        f"beside weights and cache: {spare / 2**20:.0f} MB",
    )
    assert set(peaks) == {"worker", "core"}
    assert spare <= SPARE_BYTES + (FLOAT32_STEP_BYTES if dtype == torch.float32 else 0)


def _note(command: int, peaks: dict[str, int]) -> None:
    """Each of the worker's processes by the most memory it ever had."""
    for name, words in (("worker", "pipeline worker"), ("core", "core_process")):
        for pid in family(command):
            if words in command_line(pid):
                peaks[name] = max(peaks.get(name, 0), memory(pid).get("peak", 0))
