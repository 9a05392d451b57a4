"""Draw a run in a terminal: `python -m tools.terminal_picture` runs a command on a terminal of its
own and writes `docs/run_batch.svg` from all that it printed. Paths in its folder are shown without
that.
"""

import contextlib
import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "run_batch.svg"
INPUT = Path("examples/requests.jsonl")
COMMAND = ("pipeline", "run-batch", str(INPUT), "--log-level", "warning")
COLUMNS, ROWS = 116, 40
_CONTROLS = re.compile(r"(\r|\n|\x1b\[\d*A|\x1b\[2K|\x1b\[\?\d+[hl])")
_FONTS = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)  # fetched from elsewhere


def main() -> None:
    """Run the command in a folder with a copy of its input, and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / INPUT.parent).mkdir()
        shutil.copy(ROOT / INPUT, Path(folder) / INPUT)
        output = output_of([sys.executable, "-m", *COMMAND], folder).replace(f"{folder}/", "")
    PICTURE.write_text(picture(" ".join(COMMAND), output))


def output_of(arguments: list[str], folder: str) -> str:
    """Return all that a command prints on a terminal.

    Raises CalledProcessError where it fails.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(arguments, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = b""
    with contextlib.suppress(OSError):  # EIO: no process has the terminal any more
        while chunk := os.read(ours, 1 << 16):
            output += chunk
    os.close(ours)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, arguments, output)
    return output.decode()


def picture(command: str, output: str) -> str:
    """Return an SVG of a terminal in which the command has printed that output."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    console.print(Text.from_ansi("\n".join(screen(output))))
    return _FONTS.sub("", console.export_svg(title=command, unique_id="run")) + "\n"


def screen(output: str) -> list[str]:
    """Return the lines that a terminal shows after that output, with their colors.

    Lines that are drawn again have to be erased first, as rich does it.
    """
    lines, row = [""], 0
    for part in _CONTROLS.split(output):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.endswith("A") and part.startswith("\x1b["):
            row = max(0, row - int(part[2:-1] or 1))
        elif not _CONTROLS.fullmatch(part):
            lines[row] += part
    return lines[:-1] if lines[-1] == "" else lines


if __name__ == "__main__":
    main()
