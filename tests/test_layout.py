"""The walls of the house: who may import what, seen from a fresh interpreter rather than from the
source.
"""

import ast
import subprocess
import sys

import pytest

from tests.support.commands import REPOSITORY

TORCH_FREE = [
    "jobs.queue",
    "jobs.rq_worker",
    "jobs.ticker",
    "api.app",
    "pipeline.main",
    "pipeline.stack",
    "workers.worker",
    "workers.cards",
    "workers.engine.async_engine",
    "workers.engine.core_process",
    "workers.engine.profiling",
    "workers.engine.rank_process",
    "workers.engine.scheduler",
    "workers.engine.kv_cache",
    "workers.text.tokenizer",
]
ON_THE_CPU = """
import sys
import torch
before = set(sys.modules)  # a torch for cards may bring Triton itself
from workers.engine.config import EngineConfig
from workers.engine.core import EngineCore
from workers.engine.executor import Executor
from workers.settings import DEMO_MODEL
config = EngineConfig(model=DEMO_MODEL, device="cpu", threads=1, dtype="float32", kv_cache_memory_bytes=1 << 24)
EngineCore(Executor(config))
"""


def test_what_the_front_imports_loads_neither_torch_nor_transformers() -> None:
    """All in one interpreter first, since each alone takes most of a second; one that fails is then
    found by name.
    """
    if loaded_by(import_of(*TORCH_FREE)):
        pytest.fail(
            "\n".join(f"{module}: {loaded}" for module in TORCH_FREE if (loaded := loaded_by(import_of(module))))
        )


def test_modules_that_say_they_import_no_torch_do_not() -> None:
    files = [
        file
        for package in ("jobs", "workers", "api", "pipeline", "benchmarks")
        for file in (REPOSITORY / package).rglob("*.py")
    ]
    modules = [
        ".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for file in files
        if "imports no torch" in " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").lower().split())
    ]
    assert len(modules) > 10
    assert not loaded_by(import_of(*modules)), modules


def test_an_engine_on_the_cpu_loads_neither_transformers_nor_kernels() -> None:
    """The one takes seconds; the others are read as they are for the interpreter or for a card, and
    need Triton.
    """
    program = f"{ON_THE_CPU}\nloaded = set(sys.modules) - before\n"
    assert not loaded_by(program, "transformers", "triton", "workers.engine.kernels")


def import_of(*modules: str) -> str:
    return "import sys\n" + "".join(f"import {module}\n" for module in modules) + "loaded = sys.modules\n"


def loaded_by(program: str, *names: str) -> str:
    """Those of `names` (torch and transformers) that are in what `program` calls `loaded`, or how
    it failed.
    """
    asked = names or ("torch", "transformers")
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nprint(*(name for name in {asked!r} if name in loaded))"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr
