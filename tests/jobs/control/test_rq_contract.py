"""What we rely on in RQ, beside its documentation: compared with the installed source, so that a
release that changes it is noticed.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import rq.executions
import rq.job
import rq.queue
import rq.registry
import rq.worker.base
import rq.worker.worker_classes
from rq import SimpleWorker
from rq.job import Job

from jobs.control.rq_worker import ControlJob, ControlWorker

_OURS: list[tuple[type, type]] = [(ControlWorker, SimpleWorker), (ControlJob, Job)]
_DOCS = Path(__file__).resolve().parents[3] / "docs" / "architecture.md"
_CALLERS = "".join(
    inspect.getsource(module) for module in (rq.worker.base, rq.worker.worker_classes, rq.job, rq.queue, rq.registry)
)


def overridden(ours: type, theirs: type) -> list[str]:
    return [name for name in vars(ours) if not name.startswith("__") and has(theirs, name)]


def has(theirs: type, name: str) -> bool:
    """Whether it is in the class, or among what its instances get."""
    return hasattr(theirs, name) or bool(re.search(rf"self\.{name}\b", _sources(theirs)))


def _sources(theirs: type) -> str:
    return "".join(inspect.getsource(one) for one in theirs.__mro__ if one.__module__.startswith("rq."))


@pytest.mark.parametrize(("ours", "theirs"), _OURS)
def test_all_that_rq_knows_of_is_overridden_on_purpose_and_documented(ours: type, theirs: type) -> None:
    documented = set(re.findall(r"^\| `([a-z_]+)` \|", _DOCS.read_text(), re.MULTILINE))
    assert [name for name in overridden(ours, theirs) if name not in documented] == []
    assert overridden(ours, theirs), "nothing is overridden"


def test_rq_has_and_uses_all_that_we_override() -> None:
    """A name that RQ gave up would leave our method without a caller, unnoticed."""
    table = _DOCS.read_text().partition("| in RQ | why |")[2].partition("\n\n")[0]
    names = re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE)
    for name in names:
        assert any(name in vars(ours) and has(theirs, name) for ours, theirs in _OURS), name
        assert re.search(rf"(self|job|worker)\.{name}\b", _CALLERS), f"RQ never uses {name}"
    assert len(names) == sum(len(overridden(*pair)) for pair in _OURS)


@pytest.mark.parametrize(("ours", "theirs"), _OURS)
def test_methods_take_what_rq_passes(ours: type, theirs: type) -> None:
    for name in overridden(ours, theirs):
        if isinstance(vars(ours)[name], FunctionType):
            passed = list(inspect.signature(getattr(theirs, name)).parameters.values())
            taken = inspect.signature(vars(ours)[name])
            taken.bind(*(one.name for one in passed if one.default is one.empty))
            taken.bind(**{one.name: one.name for one in passed})
        else:
            kinds = {type(inspect.getattr_static(one, name, None)) for one in (ours, theirs)}
            assert not kinds & {FunctionType}, f"{name} is a method of RQ"


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (rq.queue.Queue.enqueue_call, {"func", "timeout", "result_ttl", "failure_ttl"}),
        (Job.fetch, {"id", "connection", "serializer"}),
        (rq.registry.StartedJobRegistry.remove_execution, {"execution"}),
        (rq.executions.Execution.__init__, {"id", "job_id", "connection"}),
        (SimpleWorker.cleanup_execution, {"job", "pipeline"}),
    ],
)
def test_functions_of_rq_that_we_call_are_there(function: Callable[..., Any], parameters: set[str]) -> None:
    assert parameters <= inspect.signature(function).parameters.keys()
