"""Which version of the package this is."""

from functools import cache

PACKAGE = "batch-inference-pipeline"


@cache
def version() -> str:
    """Return the version of the installed package."""
    from importlib.metadata import version as version_of  # takes longer than the rest of a start

    return version_of(PACKAGE)
