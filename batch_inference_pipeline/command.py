"""Command lines with which one program of the product starts another."""

import sys

PARENT_VARIABLE = "PIPELINE_PARENT"
"""Environment variable with a process id; the started command ends with that process."""


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a program that imports no module from the current folder."""
    return [sys.executable, "-P", "-m", module, *arguments]
