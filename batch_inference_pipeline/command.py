"""How programs of the product are started by one another."""

import sys

PARENT_VARIABLE = "PIPELINE_PARENT"
"""In the environment of a command that is to end with the process of this id."""


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a program that finds no module in the current folder."""
    return [sys.executable, "-P", "-m", module, *arguments]
