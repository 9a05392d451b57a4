"""`pipeline serve` against `vllm serve`: `vllm bench serve` drives both by turns, with one and the
same command.
"""

import json
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.models import model_folder
from benchmarks.peers import plain_environment, vllm_folder
from benchmarks.report import by_turns
from benchmarks.servers import Server, running_pipeline, running_vllm_server

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 96


def measure(model: str, concurrency: int, requests: int, turns: int, seed: int) -> dict[str, Any]:
    """Measure by turns; each turn has new prompts, since the servers cache earlier ones."""
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    rests: list[float] = []
    with running_pipeline(model) as server, running_vllm_server(model) as peer:
        for turn in range(turns):
            used = peer.cpu_seconds()
            ours.append(bench(server, concurrency, requests, seed + turn))
            rests.append((peer.cpu_seconds() - used) / ours[-1]["duration"])
            theirs.append(bench(peer, concurrency, requests, seed + turn))
    return {
        "concurrency": concurrency,
        "requests": requests,
        "pipeline": _summary(ours),
        "vllm": _summary(theirs),
        "peer_rests_at": [round(cores, 3) for cores in rests],
        "first_token_ratio": round(
            median(our["p99_ttft_ms"] / their["p99_ttft_ms"] for our, their in zip(ours, theirs, strict=True)), 3
        ),
        **by_turns([one["duration"] for one in ours], [one["duration"] for one in theirs]),
    }


def bench(server: Server, concurrency: int, requests: int, seed: int) -> dict[str, Any]:
    """Return the figures of `vllm bench serve` for a server.

    Raises RuntimeError with the end of its output if a request failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = _command(server, concurrency, requests, seed, folder)
        done = subprocess.run(
            command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        found = {} if done.returncode else json.loads((Path(folder) / "result.json").read_text())
    if found.get("completed") != requests or found["total_output_tokens"] != requests * OUTPUT_TOKENS:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-4000:]}")
    return found


def _environment() -> dict[str, str]:
    return plain_environment() | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def _command(server: Server, concurrency: int, requests: int, seed: int, folder: str) -> list[str]:
    options = {
        "base-url": server.url,
        "model": str(model_folder(server.model)),
        "served-model-name": server.model,
        "dataset-name": "random",
        "random-input-len": PROMPT_TOKENS,
        "random-output-len": OUTPUT_TOKENS,
        "num-prompts": requests,
        "max-concurrency": concurrency,
        "num-warmups": 2,
        "seed": seed,
        "temperature": 0,
        "percentile-metrics": "ttft,itl",
        "metric-percentiles": "50,99",
        "result-dir": folder,
        "result-filename": "result.json",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [str(vllm_folder() / "bin" / "vllm"), "bench", "serve", *words, "--ignore-eos", "--save-result"]


def _summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "seconds": [round(turn["duration"], 2) for turn in turns],
        "output_tokens_per_second": round(median(turn["output_throughput"] for turn in turns), 1),
        "first_token_p50_ms": round(median(turn["p50_ttft_ms"] for turn in turns), 1),
        "first_token_p99_ms": round(median(turn["p99_ttft_ms"] for turn in turns), 1),
        "gap_p99_ms": round(median(turn["p99_itl_ms"] for turn in turns), 1),
    }
