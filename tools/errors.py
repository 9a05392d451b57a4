"""Every exception class of the packages, found in the source."""

import ast
import builtins
import importlib
from pathlib import Path
from typing import Any

import click

from batch_inference_pipeline.errors import ClientError
from jobs.errors import JobsError
from pipeline.errors import CommandEnd
from workers.engine.messages.errors import EngineError
from workers.errors import WorkerError
from workers.text.errors import TextError

ROOT = Path(__file__).parents[1]
PACKAGES = ("jobs", "workers", "api", "pipeline", "batch_inference_pipeline")
TREES: tuple[type[Any], ...] = (JobsError, EngineError, TextError, WorkerError, CommandEnd, ClientError)
"""The base of each tree."""


def exception_classes() -> list[type[Any]]:
    """Return them in the order of their files."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    found = [
        (".".join(path.relative_to(ROOT).with_suffix("").parts), node)
        for path in sorted(paths)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    names = {"Exception", "BaseException", *(kind.__name__ for kind in _foreign())}
    while more := {node.name for _, node in found if _bases(node) & names} - names:
        names |= more
    return [getattr(importlib.import_module(module), node.name) for module, node in found if node.name in names]


def _foreign() -> list[type[BaseException]]:
    known = (*vars(builtins).values(), *vars(click.exceptions).values())
    return [kind for kind in known if isinstance(kind, type) and issubclass(kind, BaseException)]


def _bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).rpartition(".")[2] for base in node.bases}
