"""The files of results, in one folder for each measured processor."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.processor import Processor
from benchmarks.report import RESULTS

Figures = dict[str, Any]


class BenchmarkResult(NamedTuple):
    """The figures and the date of a file of results."""

    date: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class MeasuredProcessor:
    """A processor and the folder of its files of results."""

    processor: Processor
    folder: Path

    def result(self, name: str) -> BenchmarkResult | None:
        """Return the result of a benchmark, or None if it was not measured on this processor."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        report = json.loads(path.read_text())
        return BenchmarkResult(report["date"], report["figures"])


def measured_processors(results: Path = RESULTS) -> list[MeasuredProcessor]:
    """Return the processors with files of results, by their titles."""
    one_of_each = {path.parent: path for path in sorted(results.glob("*/*.json"))}
    machines = {folder: json.loads(path.read_text())["machine"] for folder, path in one_of_each.items()}
    found = [
        MeasuredProcessor(Processor(machine["processor"], machine["instructions"]), folder)
        for folder, machine in machines.items()
    ]
    return sorted(found, key=lambda one: one.processor.title)
