"""The trace of some steps that `--profile` writes."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from benchmarks.gpu.idle import kernel_intervals
from tests.workers.engine.driving import make_core
from tests.workers.engine.places import CPU, Place, on_gpu
from workers.engine import profiling
from workers.engine.messages.core import AddRequests, EngineRequest, SamplingParams, Shutdown, StepOutput, ToCore
from workers.engine.messages.errors import ModelLoadError
from workers.engine.profiling import FIRST_STEP, STEPS, span


@pytest.fixture(autouse=True)
def _spans_off_again() -> Iterator[None]:
    yield
    profiling._marker = None


def trace_of(folder: Path, tokens: int, place: Place = CPU) -> list[dict[str, Any]] | None:
    """The events in the trace of a core that generates `tokens` tokens, one a step, and is then
    shut down.
    """
    core = make_core("llama", profile=str(folder), max_model_len=200, place=place)
    inbox: SimpleQueue[ToCore] = SimpleQueue()

    def emit(output: StepOutput) -> None:
        if any(output.finish):
            inbox.put(Shutdown())

    inbox.put(AddRequests([EngineRequest(1, [5], [], SamplingParams(tokens, temperature=0.0))]))
    core.run(inbox, emit)
    files = list(folder.iterdir())
    if not files:
        return None
    with gzip.open(files[0]) as trace:
        events: list[dict[str, Any]] = json.load(trace)["traceEvents"]
    return events


@pytest.mark.parametrize(("tokens", "steps"), [(FIRST_STEP + STEPS + 10, STEPS), (FIRST_STEP + 7, 7)])
def test_a_trace_holds_the_steps_it_says(tmp_path: Path, tokens: int, steps: int) -> None:
    events = trace_of(tmp_path / "new" / "folder", tokens)
    assert events is not None
    spans = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    assert spans == dict.fromkeys(("schedule", "inputs", "forward", "sample", "retire"), steps)


@pytest.mark.parametrize("place", [on_gpu])
def test_a_trace_from_a_gpu_holds_its_kernels(tmp_path: Path, place: Place) -> None:
    events = trace_of(tmp_path, FIRST_STEP + STEPS + 10, place)
    assert events is not None
    assert len(kernel_intervals(events)) >= STEPS


def test_too_few_steps_leave_no_trace_and_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert trace_of(tmp_path, FIRST_STEP) is None
    assert f"nothing was profiled: there were {FIRST_STEP} steps" in caplog.text


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ModelLoadError, match=r"the profile folder .*file/below cannot be made or written to: Not a directory"
    ):
        make_core("llama", profile=str(tmp_path / "file" / "below"))


def test_spans_cost_nothing_while_they_are_off() -> None:
    assert span("schedule") is span("retire")
