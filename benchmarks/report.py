"""The file of results of a benchmark: JSON with machine, versions, seed and figures, one file for
each row and processor.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.processor import this_processor

RESULTS = Path(__file__).parent / "results"


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Return a command line parser with the options of every benchmark.

    These are the folder of the results and the seed of the workload.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        help="folder of the processor's folder with files of results [default: benchmarks/results]",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the workload [default: 1]")
    return parser


def write_report(
    name: str, figures: dict[str, Any], out: Path = RESULTS, seed: int | None = None, **more_versions: str
) -> Path:
    """Print the figures and write them to `name.json` in this processor's folder in `out`.

    `more_versions` are versions of programs outside of this environment.
    """
    report = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "versions": versions("torch", "transformers", "redis", "rq") | more_versions,
        "seed": seed,
        "figures": figures,
    }
    print(f"{name}: {json.dumps(figures)}", flush=True)
    path = out / this_processor().folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    return path


def by_turns(seconds: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """Return the speed of each turn relative to its neighbor, and the median."""
    ratios = [other / one for one, other in zip(seconds, others, strict=True)]
    return {"ratios": [round(ratio, 3) for ratio in ratios], "ratio": round(statistics.median(ratios), 3)}


def machine() -> dict[str, Any]:
    """Return facts about the machine.

    `busy` is the load of the last minute; it shows whether the machine had other work.
    """
    busy, processor = round(os.getloadavg()[0], 2), this_processor()
    return {
        "processor": processor.model,
        "instructions": processor.instructions,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "busy": busy,
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of the installed ones of `packages`."""
    installed = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed
