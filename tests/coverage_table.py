"""Print the share of lines that ran, per folder and in all, from coverage.py's data: `python -m
tests.coverage_table`.
"""

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path


def main() -> None:
    folders: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # lines that ran, lines there are
    for name, file in _measured_files().items():
        for folder in (str(Path(name).parent), "total"):
            folders[folder][0] += file["summary"]["covered_lines"]
            folders[folder][1] += file["summary"]["num_statements"]
    width = max(map(len, folders), default=0)
    print(f"{'package':<{width}}   lines     ran")
    for folder in sorted(folders, key=lambda folder: (folder == "total", folder)):
        ran, lines = folders[folder]
        print(f"{folder:<{width}}  {lines:>6}  {ran / max(lines, 1):>5.1%}")


def _measured_files() -> dict[str, dict[str, dict[str, int]]]:
    with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
        report = Path(folder) / "coverage.json"
        subprocess.run([sys.executable, "-m", "coverage", "json", "--quiet", "-o", str(report)], check=True)
        files: dict[str, dict[str, dict[str, int]]] = json.loads(report.read_text())["files"]
    return files


if __name__ == "__main__":
    main()
