"""The scripts of the queue."""

from pathlib import Path

from jobs.queue import keys

FOLDER = Path(keys.__file__).parent / "lua"
NAMES = sorted(path.stem for path in FOLDER.glob("*.lua") if path.stem != "common")
