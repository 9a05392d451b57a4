"""The path of a request below the root path, which a proxy may have removed."""

from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """Return the path below the root path."""
    root, path = scope.get("root_path", ""), str(scope["path"])
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path
