"""What a benchmark writes: one JSON file per run with the machine, the versions and the figures."""

import json
import os
import platform
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def write_report(name: str, figures: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    report = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "versions": versions("torch", "transformers", "redis", "rq"),
        "figures": figures,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    return path


def machine() -> dict[str, Any]:
    return {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()}


def versions(*packages: str) -> dict[str, str]:
    """Of those that are installed."""
    installed = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
