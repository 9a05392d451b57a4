"""The command line: `pipeline`, and `python -m batch_inference_pipeline`."""

import os
import sys

from batch_inference_pipeline.command import PARENT_VARIABLE


def main() -> None:
    """Run the command line.

    This process and its children import no modules from the current folder, where a user may have
    a `pipeline.py` or a folder `jobs`.
    """
    if not (sys.flags.safe_path or "PYTHONSAFEPATH" in os.environ):
        del sys.path[0]  # the current folder, or that of the script
    os.environ["PYTHONSAFEPATH"] = "1"
    from pipeline.main import main as run

    parent = os.environ.pop(PARENT_VARIABLE, None)
    run(parent=None if parent is None else int(parent))


if __name__ == "__main__":
    main()
