"""The version of the package."""

from functools import cache

PACKAGE = "batch-inference-pipeline"


@cache
def version() -> str:
    """Return the version of the installed package."""
    from importlib.metadata import version as version_of  # slower than the rest of a start

    return version_of(PACKAGE)
