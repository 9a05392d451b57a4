"""The latency of `run-batch -` between stdin and stdout, with a worker that answers at once
(`null_worker`): milliseconds from the write of a line to the read of its answer.

    python -m benchmarks.run_stdin --rate 1000 --seconds 30
"""

import json
import subprocess
import sys
import threading
import time
from typing import IO, Any

from benchmarks.null_worker import MODEL
from benchmarks.processes import ProcessorTime
from benchmarks.queue_latency import percentiles
from benchmarks.report import arguments, write_report

_WARM_UP_SECONDS = 3.0
_ROLES = {
    "null_worker": "null worker",
    "jobs.": "control plane",
    "server": "Redis",
    "aof-rewrite": "Redis",
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rate", type=int, default=1000, help="lines per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    figures = measure(args.rate, args.seconds)
    write_report(f"run-stdin-{args.rate}", figures, args.out, args.seed)


def measure(rate: int, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.null_run_batch", "-", "--served-model-name", MODEL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        usage = ProcessorTime(process.pid, _ROLES)
        _ask(process.stdin, process.stdout, 0)
        arrived: dict[int, float] = {}
        reader = threading.Thread(target=_read, args=(process.stdout, arrived), daemon=True)
        reader.start()
        usage.begin()
        sent = _write(process.stdin, rate, int(rate * (_WARM_UP_SECONDS + seconds)))
        processor_seconds = usage.end()
        process.stdin.close()
        reader.join()
    took = [arrived[number] - at for number, at in sent.items() if number > rate * _WARM_UP_SECONDS]
    return {
        "lines_per_second": rate,
        "lines": len(took),
        "added_ms": percentiles(took),
        "processor_seconds": processor_seconds,
    }


def _ask(stdin: IO[bytes], stdout: IO[bytes], number: int) -> None:
    stdin.write(_line(number))
    stdin.flush()
    stdout.readline()


def _write(stdin: IO[bytes], rate: int, count: int) -> dict[int, float]:
    """Write lines at a steady rate; return when each was written."""
    sent, began = dict[int, float](), time.perf_counter()
    for number in range(1, count + 1):
        time.sleep(max(0.0, began + number / rate - time.perf_counter()))
        sent[number] = time.perf_counter()
        stdin.write(_line(number))
        stdin.flush()
    return sent


def _read(stdout: IO[bytes], arrived: dict[int, float]) -> None:
    for line in stdout:
        arrived[int(json.loads(line)["custom_id"])] = time.perf_counter()


def _line(number: int) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 60}], "max_tokens": 16}
    line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


if __name__ == "__main__":
    main()
