"""Render the examples of the Helm chart in `docker/helm` with the `helm` on PATH: `make helm`.

Each rendered file begins with the hash of what it was rendered from and of what came of it. So a
test finds a change that was not rendered, and one by hand, also where there is no helm.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

CHART = Path(__file__).parent.parent / "docker" / "helm"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
_SOURCES = ("Chart.yaml", "values.yaml", "templates/*")


def main() -> None:
    """Write `docker/helm/rendered/`."""
    if shutil.which("helm") is None:
        sys.exit("there is no helm on PATH: install Helm 3.17 or later, then repeat `make helm`")
    for example in EXAMPLES:
        done = render(example)
        if done.returncode:
            sys.exit(f"{example} cannot be rendered: {done.stderr}")
        text = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
        rendered_file(example).write_text(f"{first_line(example, text)}{text}")


def render(*values: Path) -> "subprocess.CompletedProcess[str]":
    """Run `helm template` on the chart with these values files."""
    files = (part for path in values for part in ("--values", str(path)))
    return subprocess.run(["helm", "template", "inference", str(CHART), *files], capture_output=True, text=True)


def rendered_file(example: Path) -> Path:
    """Return where the outcome of an example is kept."""
    return CHART / "rendered" / example.name


def first_line(example: Path, text: str) -> str:
    """Return the line with the hash of the chart, of the example and of what follows the line."""
    found = hashlib.sha256()
    for path in (*(path for pattern in _SOURCES for path in sorted(CHART.glob(pattern))), example):
        found.update(path.relative_to(CHART).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    found.update(text.encode())
    return f"# Rendered by `make helm` from the chart and examples/{example.name}, SHA-256 {found.hexdigest()}\n"


if __name__ == "__main__":
    main()
