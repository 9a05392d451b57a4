"""Files of results as benchmarks write them on one processor or another."""

import json
from pathlib import Path
from typing import Any

from benchmarks.processor import Processor

MODEL, DATE = "AMD EPYC", "2026-01-02"


def store_result(results: Path, name: str, figures: dict[str, Any], instructions: str, date: str = DATE) -> None:
    """Write a file of results of a processor of `MODEL` with such instructions."""
    folder = results / Processor(MODEL, instructions).folder
    folder.mkdir(exist_ok=True)
    machine = {"processor": MODEL, "instructions": instructions}
    (folder / f"{name}.json").write_text(json.dumps({"date": date, "machine": machine, "figures": figures}))
