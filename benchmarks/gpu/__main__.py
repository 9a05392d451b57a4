"""The engine on one GPU, in under 8 minutes: prints the table of the GPU path's aims and results,
and writes it as JSON.

    # Everything, into benchmarks/results/gpu-<GPU>.{json,md}
    python -m benchmarks.gpu
    python -m benchmarks.gpu --rows card decode-attention --out somewhere
    # Shows on any machine that it runs; nothing is written to results/
    python -m benchmarks.gpu --device cpu

Each row runs in a process of its own, on a GPU with a time limit of its own. If a row fails, its
error is printed and the others run. Without a GPU that torch can use, the program prints that and
ends with status 2.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from benchmarks.gpu.roofline import Gpu
from benchmarks.gpu.rows import ROWS
from benchmarks.gpu.setting import NeedsGpu, Setting, no_gpu
from benchmarks.gpu.table import Outcome, notes, table
from benchmarks.report import RESULTS, machine, versions
from workers.engine.client.async_engine import EngineStartError
from workers.engine.device.memory import available_memory
from workers.engine.messages.errors import ModelLoadError

TOTAL_SECONDS = 460.0
"""Time limit of a whole run on a GPU; each row may take the rest of it."""

_PLENTY = 64 << 30  # bytes of memory


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if every row could be measured, 1 if one could not, 2 without a usable GPU."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="which rows; bounds need `card`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--out", type=Path, help="folder for the JSON and the table [default: benchmarks/results; none on a CPU]"
    )
    parser.add_argument("--one", nargs=2, metavar=("SETTING", "FILE"), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.one:
        return _measure_here(asked.rows[0], *asked.one)
    why = no_gpu() if asked.device == "cuda" else None
    if why is not None:
        print(f"bench-gpu: {why}", file=sys.stderr)
        return 2
    out = asked.out or (RESULTS if asked.device == "cuda" else None)
    began = time.monotonic()
    outcomes = _measure_all([name for name in ROWS if name in asked.rows], asked.device, began)
    _report(outcomes, asked.device, out, time.monotonic() - began)
    return int(any("failed" in outcome for outcome in outcomes.values()))


def _measure_all(names: list[str], device: str, began: float) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-bench-", dir=_roomy_folder()) as scratch:
        gpu = None
        for name in names:
            setting = Setting(device, scratch, gpu)
            row_began = time.monotonic()
            seconds = None if setting.tiny else min(ROWS[name].seconds, TOTAL_SECONDS - (row_began - began))
            print(f"{name}: {'no limit of time' if seconds is None else f'at most {seconds:.0f} s'}", flush=True)
            outcomes[name] = (
                _in_a_process(name, setting, seconds)
                if seconds is None or seconds > 0
                else {"failed": "no time was left"}
            )
            outcomes[name]["row_seconds"] = round(time.monotonic() - row_began, 1)
            print(f"{name}: {json.dumps(outcomes[name])}", flush=True)
            if name == "card" and "failed" not in outcomes[name]:
                gpu = Gpu(outcomes[name]["copy_bytes_per_second"], outcomes[name]["matrix_operations_per_second"])
    return outcomes


def _roomy_folder() -> str | None:
    """Return the folder for checkpoints of 36 GB: in memory if there is enough, else None.

    None means the folder of temporary files.
    """
    folder, available = Path("/dev/shm"), available_memory() or 0
    if "BENCHMARK_CACHE" in os.environ:
        return os.environ["BENCHMARK_CACHE"]
    plenty = folder.is_dir() and available > _PLENTY and shutil.disk_usage(folder).free > _PLENTY * 3 / 4
    return str(folder) if plenty else None


def _in_a_process(name: str, setting: Setting, seconds: float | None) -> Outcome:
    """Return the row's figures or its error. The engine core ends with the row's process."""
    file = Path(setting.scratch) / f"{name}.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--rows",
        name,
        "--one",
        json.dumps(dataclasses.asdict(setting)),
        str(file),
    ]
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if setting.tiny else {})}
    process = subprocess.Popen(command, env=environment, stdout=2)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"it took longer than {seconds:.0f} s"}
    finally:
        process.kill()
        process.wait()
    if not file.exists():
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return {"failed": f"its process {how}"}
    outcome: Outcome = json.loads(file.read_text())
    return outcome


def _measure_here(name: str, setting: str, file: str) -> int:
    values = json.loads(setting)
    gpu = Gpu(**values.pop("gpu")) if values["gpu"] else values.pop("gpu")
    try:
        outcome = ROWS[name].measure(Setting(**values, gpu=gpu))
    except NeedsGpu as error:
        outcome = {"failed": f"it needs a GPU: {error}"}
    except Exception as error:
        # These errors have clear messages
        if not isinstance(error, OSError | ModelLoadError | EngineStartError):
            import traceback

            traceback.print_exc()
        outcome = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    Path(file).write_text(json.dumps(outcome))
    return 0


def _report(outcomes: dict[str, Outcome], device: str, out: Path | None, seconds: float) -> None:
    name = str(outcomes.get("card", {}).get("name") or _gpu_name(device))
    title = f"{name}, {time.strftime('%Y-%m-%d', time.gmtime())}, {seconds:.0f} s in all"
    if device == "cpu":
        title += "; tiny models on a CPU: these figures say only that the benchmark runs"
    text = f"{title}\n\n{table(outcomes)}\n{notes(outcomes)}"
    print(f"\n{text}")
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    stem = "gpu-" + (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or device)
    report: dict[str, Any] = {
        "benchmark": "gpu",
        "card": name,
        "comparable": device == "cuda",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(seconds, 1),
        "machine": machine(),
        "versions": versions("torch", "triton", "transformers"),
        "rows": outcomes,
    }
    (out / f"{stem}.json").write_text(json.dumps(report, indent=2) + "\n")
    (out / f"{stem}.md").write_text(text)


def _gpu_name(device: str) -> str:
    if device == "cpu":
        return "CPU"
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def _end(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, _end
    )  # what was written to the scratch folder, gigabytes of memory, goes with an orderly end only
    sys.exit(main())
