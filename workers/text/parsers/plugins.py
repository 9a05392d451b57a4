"""Load a parser from outside this package."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from workers.text.errors import ParserError
from workers.text.parsers.base import ToolParser


def load_plugin(path: str) -> type[ToolParser]:
    """Return the class at `module:Class` or `file.py:Class`.

    Raises ParserError, also for any error during the import of its module.
    """
    source, _, class_name = path.rpartition(":")
    if not source or not class_name:
        raise ParserError(f"Tool call parser {path!r} is not of the form module:Class or file.py:Class.")
    module = _import(source, path)
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, ToolParser)):
        what = "has no class" if found is None else "has another kind of object named"
        raise ParserError(
            f"Tool call parser {path!r}: {source} {what} {class_name}; "
            "it must be a subclass of workers.text.parsers.base.ToolParser."
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ParserError(f"Tool call parser {path!r}: {class_name} does not define {' and '.join(missing)}.")
    return found


def _import(source: str, path: str) -> ModuleType:
    try:
        return _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except (Exception, SystemExit) as error:
        raise ParserError(f"Tool call parser {path!r} cannot be imported: {type(error).__name__}: {error}") from error


def _import_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tool_parser_plugin_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
