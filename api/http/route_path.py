"""The path of a request as routes know it, whether a proxy took the root path off or not."""

from starlette.types import Scope

PROBED = ("/health", "/ready", "/metrics")
"""Paths that probes and scrapers call, which are answered to everybody."""


def route_path(scope: Scope) -> str:
    """Return the path below the root path."""
    root, path = scope.get("root_path", ""), str(scope["path"])
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path
