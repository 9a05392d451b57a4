"""An operator's own middleware, by its import path."""

import importlib
import inspect
from typing import Any, cast

from fastapi import FastAPI

from jobs.errors import SettingsError


def add_middleware(app: FastAPI, paths: tuple[str, ...]) -> None:
    """Put each middleware around the app, the last one outermost. Raise `SettingsError`."""
    for path in paths:
        found = _imported(path)
        if inspect.iscoroutinefunction(found):
            app.middleware("http")(found)
        elif isinstance(found, type):
            app.add_middleware(cast(Any, found))
        else:
            raise SettingsError(f"--middleware {path} is neither a class nor an async function (request, call_next)")


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        raise SettingsError(f"--middleware {path}: the module {module} has no {name}") from None
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise SettingsError(f"--middleware {path} cannot be imported, is it on PYTHONPATH? {reason}") from None
