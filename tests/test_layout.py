"""The walls of the house: who may import what, seen from a fresh interpreter rather than from the
source.
"""

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from tests.support.commands import REPOSITORY
from tools.errors import PACKAGES, TREES, exception_classes

TORCH_FREE = [
    "jobs.queue.request_queue",
    "jobs.control.rq_worker",
    "jobs.control.ticker",
    "api.app",
    "pipeline.main",
    "pipeline.supervisor",
    "workers.worker",
    "workers.replica.gpus",
    "workers.engine.client.async_engine",
    "workers.engine.core_process",
    "workers.engine.profiling",
    "workers.engine.device.rank_process",
    "workers.engine.scheduling.scheduler",
    "workers.engine.scheduling.kv_cache",
    "workers.text.tokenizer",
    "workers.grammars.compiler_process",
]
CONVERTED_TYPES = """
import gc
from jobs.batch.row_requests import RowExtras
from jobs.queue.batch_fields import BatchFields, BatchStatus
from workers.replica.statistics import MetricDescriptor, MetricSample
for kind in (BatchFields, BatchStatus, MetricDescriptor, MetricSample, RowExtras):
    assert "StructInfo" in {type(part).__name__ for part in gc.get_referents(kind)}, kind
"""
EXPORTING = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http", "google.protobuf")
ON_THE_CPU = """
import sys
import torch
before = set(sys.modules)  # a torch for GPUs may bring Triton itself
from workers.engine.messages.config import EngineConfig
from workers.engine.core import EngineCore
from workers.engine.device.executor import Executor
from workers.settings import DEMO_MODEL
config = EngineConfig(model=DEMO_MODEL, device="cpu", threads=1, dtype="float32", kv_cache_memory_bytes=1 << 24)
EngineCore(Executor(config))
"""


def test_what_the_worker_process_imports_loads_neither_torch_nor_transformers() -> None:
    """All in one interpreter first, since each alone takes most of a second; one that fails is then
    found by name.
    """
    if loaded_by(import_of(*TORCH_FREE)):
        pytest.fail(
            "\n".join(f"{module}: {loaded}" for module in TORCH_FREE if (loaded := loaded_by(import_of(module))))
        )


def test_the_api_alone_loads_prometheus_client() -> None:
    assert not loaded_by(import_of("workers.worker", "pipeline.main", "jobs.control.rq_worker"), "prometheus_client")


def test_what_exports_traces_is_not_loaded_without_an_endpoint() -> None:
    """The client of Redis loads OpenTelemetry's metrics by itself, where they are installed."""
    processes = import_of(
        "workers.worker", "api.main", "pipeline.main", "jobs.control.rq_worker", "jobs.control.ticker"
    )
    started = (
        "from api.settings import ApiSettings\nfrom jobs.tracing import start_tracing\n"
        "api.main.create_app(ApiSettings(redis_url='redis://localhost'))\n"
        "assert start_tracing(ApiSettings().otlp_traces_endpoint, 'pipeline-api') is None\n"
    )
    assert not loaded_by(processes + started, *EXPORTING)
    exporting = "start_tracing('http://localhost', 'pipeline-api')\n"
    assert loaded_by(processes + started + exporting, *EXPORTING) == " ".join(EXPORTING)


def test_help_and_the_worker_process_import_nothing_slow() -> None:
    """Neither does any process of the queue: each of these takes a quarter of a second or more."""
    processes = import_of(
        "pipeline.main", "pipeline.batch_run", "workers.worker", "jobs.control.rq_worker", "jobs.control.ticker"
    )
    assert not loaded_by(processes, "pydantic", "transformers", "fastapi", "openai", "pyarrow")


def test_the_api_does_not_load_the_official_client() -> None:
    """Which takes a third of a second or more: the API declares its answers itself."""
    document = "api.main.create_app(api.main.ApiSettings(redis_url='redis://localhost')).openapi()\n"
    assert not loaded_by(import_of("api.main") + document, "openai")


@pytest.mark.parametrize(
    ("parameter", "files"),
    [
        ("include_stop_str_in_output", {"jobs/protocol/parameters.py", "workers/replica/sequence.py"}),
        (
            "allowed_token_ids",
            {
                "jobs/protocol/parameters.py",
                "workers/engine/guides/guide.py",  # an error that names it
                "workers/engine/messages/core.py",
                "workers/engine/sampling/logit_masks.py",
                "workers/replica/sampling_params.py",  # a rule about it and `bad_words`
            },
        ),
    ],
)
def test_a_parameter_is_in_the_files_that_the_architecture_names(parameter: str, files: set[str]) -> None:
    sources = (path for package in PACKAGES[:-1] for path in (REPOSITORY / package).rglob("*"))
    found = {path for path in sources if path.suffix in (".py", ".lua", ".c", ".h") and parameter in path.read_text()}
    assert {str(path.relative_to(REPOSITORY)) for path in found} == files


def test_a_class_name_exists_once() -> None:
    names = Counter(
        name
        for path in REPOSITORY.rglob("*.py")
        if not any(part.startswith(".") or part == "node_modules" for part in path.relative_to(REPOSITORY).parts)
        for name in re.findall(r"^ *class (\w+)\b[^'\"`]*:$", path.read_text(), re.MULTILINE)
    )
    assert [name for name, times in names.items() if times > 1] == []


def test_a_worker_loads_what_answers_with_structure_need_once_they_are_asked_for() -> None:
    assert not loaded_by(import_of("workers.worker"), "llguidance", "jsonschema", "workers.text.parsers.hermes")


@pytest.fixture(scope="module")
def exceptions() -> list[type[Any]]:
    return exception_classes()


def test_every_exception_is_in_one_tree(exceptions: list[type[Any]]) -> None:
    """So that it or a base has a row in the table of `docs/architecture.md`; one that is no
    `Exception` never leaves its module.
    """
    assert len(exceptions) > 35
    leaving = [kind for kind in exceptions if issubclass(kind, Exception)]
    assert [kind.__name__ for kind in leaving if sum(issubclass(kind, root) for root in TREES) != 1] == []
    assert {kind.__name__ for kind in exceptions} - {kind.__name__ for kind in leaving} == {"_TimeIsUp"}


@pytest.mark.parametrize("root", TREES, ids=lambda root: root.__name__)
def test_the_picture_of_a_tree_is_the_tree(root: type, exceptions: list[type[Any]]) -> None:
    picture = inspect.getdoc(inspect.getmodule(root)) or ""
    kinds = [kind for kind in exceptions if issubclass(kind, root) and not kind.__name__.startswith("_")]
    for kind in kinds if len(kinds) > 1 else ():
        [line] = re.findall(rf"^( *)(?:\w+, )?{kind.__name__}\b", picture, re.MULTILINE)
        parents = [base.__name__ for base in kind.__bases__ if base in kinds]
        for parent in parents:
            above = re.findall(rf"^( *){parent}\b", picture, re.MULTILINE)
            assert len(line) == len(above[0]) + 2, kind


def test_an_engine_on_the_cpu_loads_neither_transformers_nor_kernels() -> None:
    """The one takes seconds; the others are read as they are for the interpreter or for a GPU, and
    need Triton.
    """
    program = f"{ON_THE_CPU}\nloaded = set(sys.modules) - before\n"
    assert not loaded_by(program, "transformers", "triton", "llguidance", "workers.engine.kernels")


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


def test_every_type_that_is_decoded_is_ready_once_its_module_is_imported() -> None:
    """At its first use msgspec makes what it decodes a type by, and shows it to other threads half
    made: one that decodes the type meanwhile crashes the process. So a decoder is made as its
    module is imported, and so is what `msgspec.convert` uses.
    """
    paths = [path for folder in PACKAGES for path in (REPOSITORY / folder).rglob("*.py")]
    calls = [
        (str(path.relative_to(REPOSITORY)), call)
        for path in paths
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
    ]
    assert [f"{path}:{call.lineno}" for path, call in calls if makes_a_decoder(call)] == []
    converting = {path for path, call in calls if ast.unparse(call.func) == "msgspec.convert"}
    assert converting == {"jobs/batch/row_requests.py", "jobs/queue/batch_fields.py", "workers/replica/statistics.py"}
    subprocess.run([sys.executable, "-c", CONVERTED_TYPES], cwd=REPOSITORY, check=True)


def makes_a_decoder(call: ast.Call) -> bool:
    """Return whether the call makes a decoder of one of our types, by itself or for this once."""
    name = ast.unparse(call.func)
    kinds = [ast.unparse(word.value) for word in call.keywords if word.arg == "type"]
    if re.fullmatch(r"msgspec\.\w+\.decode", name):
        return not set(kinds) <= {"dict[str, Any]", "dict[str, msgspec.Raw]"}
    return re.fullmatch(r"msgspec\.\w+\.Decoder", name) is not None


def test_no_large_file_is_in_the_repository() -> None:
    """But for the demo model; a file that was committed once is in every clone for good."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no checkout of git")
    paths = [REPOSITORY / name for name in listed.stdout.split("\0") if name]
    sizes = {str(path.relative_to(REPOSITORY)): path.stat().st_size for path in paths if path.is_file()}
    assert {name for name, size in sizes.items() if size > 1 << 20} == {"workers/demo_model/model.safetensors"}
