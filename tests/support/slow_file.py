"""An input that takes as long to be read as a test needs, so that its reader is found in the
middle, however fast the machine is.
"""

import os
from pathlib import Path

_FOLDER = Path(__file__).parent / "slowed"


def slow_reading(file: Path, seconds: float) -> dict[str, str]:
    """What a process' environment needs for each line that it reads of `file` to take so long.

    Nothing in the product knows of this.
    """
    path = os.pathsep.join([str(_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "SLOW_FILE": str(file), "SLOW_FILE_SECONDS": str(seconds)}
