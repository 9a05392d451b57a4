"""The memory of every process while `pipeline run-batch` embeds a file of short texts, by an
encoder so small that the processes around it do most of the work; and how long it took.

    python -m benchmarks.embeddings_memory --texts 1000000
    python -m benchmarks.embeddings_memory --texts 50000 --model tiny-384
    python -m benchmarks.embeddings_memory --texts 100000 --format parquet

`memory_samples.py` describes the memory figures.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.encoders import ENCODERS, encoder_folder, model_flags
from benchmarks.memory_samples import REDIS, MemorySamples, megabytes
from benchmarks.processes import ProcessorTime
from benchmarks.report import arguments, write_report

_ROLES = {
    "core_process": "engine core",
    "pipeline worker": "worker",
    "rq_worker": "rq worker",
    "control.ticker": "ticker",
    "run-batch": "the command",
    "-server": REDIS,
}
_WORDS = ("red", "blue", "old", "new", "small", "large", "river", "stone", "bread", "night")
_TEXT_WORDS = (4, 12)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=ENCODERS, default="tiny-32")
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--scratch", type=Path, help="folder for input and output [default: the temporary one]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        figures = measure(Path(scratch), args.model, args.texts, args.format, args.seed)
    write_report(f"embeddings-memory-{args.model}-{args.texts}-{args.format}", figures, args.out, args.seed)


def measure(scratch: Path, model: str, count: int, file_format: str, seed: int) -> dict[str, Any]:
    """Run one file and return the figures. Raise RuntimeError if the run fails."""
    source, results = (scratch / f"{name}.{file_format}" for name in ("input", "results"))
    folder = encoder_folder(model)
    (_write_parquet if file_format == "parquet" else _write_lines)(source, model, count, seed)
    command = [sys.executable, "-m", "pipeline", "run-batch", str(source), "-o", str(results), "--no-deduplicate"]
    log = scratch / "log.txt"
    with log.open("w") as said:
        process = subprocess.Popen(command + model_flags(folder, model), stdout=said, stderr=said)
    try:
        usage = ProcessorTime(process.pid, _ROLES)
        usage.begin()
        began = time.monotonic()
        samples = MemorySamples(process.pid, _ROLES)
        process.wait()
        seconds = time.monotonic() - began
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError(f"run-batch ended with status {process.returncode}:\n{log.read_text()[-4000:]}")
    return {
        "seconds": round(seconds, 1),
        "texts_per_second": round(count / seconds),
        "output_mb": megabytes(results.stat().st_size),
        "mb": samples.end(),
        "processor_us_per_text": {role: round(1e6 * used / count, 1) for role, used in usage.end().items()},
    }


def _write_lines(path: Path, model: str, count: int, seed: int) -> None:
    with path.open("w") as file:
        for number, text in enumerate(_texts(count, seed)):
            body = {"model": model, "input": text}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": body}
            file.write(json.dumps(line) + "\n")


def _write_parquet(path: Path, model: str, count: int, seed: int) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {"custom_id": list(map(str, range(count))), "input": list(_texts(count, seed)), "model": [model] * count}
    table = pyarrow.table(columns | {"url": ["/v1/embeddings"] * count})
    parquet.write_table(table, path, row_group_size=10_000)


def _texts(count: int, seed: int) -> Any:
    draw = random.Random(seed)
    for number in range(count):
        yield " ".join([str(number), *draw.choices(_WORDS, k=draw.randint(*_TEXT_WORDS))])


if __name__ == "__main__":
    main()
