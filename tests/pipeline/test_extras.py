"""A command without the extra that it needs is refused at once, and says what to install."""

import sys

import pytest

from pipeline.errors import explained
from tests.pipeline.conftest import RunHere


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        (("run-batch", "requests.jsonl"), "tokenizers", "worker"),
        (("run-batch", "requests.jsonl", "--redis-url", "redis://localhost", "--local-worker"), "torch", "worker"),
        (("serve",), "llguidance", "worker"),
        (("worker", "--redis-url", "redis://localhost"), "torch", "worker"),
        (("fleet", "--ray-address", "auto", "--redis-url", "redis://localhost"), "ray", "ray"),
    ],
)
def test_a_command_without_its_extra_names_it(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    done = run_here(*arguments)
    needs = f"`pipeline {arguments[0]}` needs the extra {extra}. No module named '{module}'"
    assert (done.code, done.err) == (2, f"Error: {needs}: pip install 'batch-inference-pipeline[{extra}]'\n")
    assert run_here(arguments[0], "--help").code == 0


def test_a_module_of_an_extra_that_is_missing_in_the_middle_is_a_sentence() -> None:
    end = explained(ModuleNotFoundError("No module named 'opentelemetry.sdk'", name="opentelemetry.sdk"))
    assert end is not None
    assert (str(end), end.exit_code) == (
        "No module named 'opentelemetry.sdk': pip install 'batch-inference-pipeline[tracing]'",
        2,
    )
    assert explained(ModuleNotFoundError("No module named 'misspelled'", name="misspelled")) is None
