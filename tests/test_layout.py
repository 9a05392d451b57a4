"""The walls of the house: who may import what, seen from a fresh interpreter rather than from the source."""

import subprocess
import sys

import pytest

TORCH_FREE = [
    "jobs.queue",
    "jobs.rq_worker",
    "jobs.ticker",
    "api.app",
    "pipeline.main",
    "workers.worker",
    "workers.engine.async_engine",
    "workers.engine.scheduler",
    "workers.engine.kv_cache",
    "workers.text.tokenizer",
]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_importing_a_torch_free_module_loads_no_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch is loaded' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
