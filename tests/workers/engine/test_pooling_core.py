"""The core's loop with a model that pools: steps that make way for live texts, and steps that do
not fit into memory.
"""

from queue import SimpleQueue

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.engine.models.tiny_pooling_models import hidden_states, pooled, pooling_folder
from tests.workers.engine.places import CPU
from tests.workers.engine.pooling import EMBED, assert_close, pooling_requests, run_pooling, start
from tests.workers.engine.scheduling.integrity import check_idle
from tests.workers.engine.test_core import TightExecutor, WatchedModel
from workers.engine.messages.core import AddRequests, EngineRequest, SamplingParams, Shutdown, StepOutput, ToCore


def means(name: str = "bert") -> list[Tensor]:
    return [pooled(hidden, "mean") for hidden in hidden_states(name)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", ["bert", "albert", "deberta"])
def test_a_step_of_batch_texts_is_abandoned_for_a_live_one(name: str, depth: int) -> None:
    """The last two run by transformers' class."""
    core, inbox = start(pooling_folder(name), CPU, depth=depth, live_step_ms=1.0), SimpleQueue[ToCore]()
    for _ in range(4):  # a step counts as one of a second
        core.scheduler.step_cost.record(np.zeros(1, np.int32), np.full(1, 20, np.int32), 1.0)
    requests = pooling_requests(EMBED)
    for request in requests:
        request.live = request.request_id == 0
    undone: list[int] = []
    undo = core.scheduler.undo
    core.scheduler.undo = lambda plan: undone.append(plan.step) or undo(plan)  # type: ignore[method-assign,func-returns-value]
    found: dict[int, Tensor] = {}

    def arrives() -> None:
        inbox.put(AddRequests(requests[:1]))
        core.interrupt_for(AddRequests(requests[:1]))

    def emit(output: StepOutput) -> None:
        found.update({one: torch.from_numpy(np.frombuffer(data, "<f4").copy()) for one, data in output.pooled.items()})
        if len(found) == len(requests):
            inbox.put(Shutdown())

    WatchedModel(core, 64, arrives)
    inbox.put(AddRequests(requests[1:]))
    core.run(inbox, emit)
    assert len(undone) == 1
    assert next(iter(found)) == 0
    assert_close([found[number] for number in range(len(requests))], means(name))
    check_idle(core.scheduler)


@pytest.mark.parametrize("depth", [0, 1])
def test_texts_whose_step_does_not_fit_come_in_smaller_steps(depth: int) -> None:
    core = start(pooling_folder("bert"), CPU, depth=depth, max_num_batched_tokens=512, max_num_seqs=8)
    executor = TightExecutor(core, 150)
    assert_close(run_pooling(core, pooling_requests(EMBED)), means())
    assert executor.refused > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_text_that_never_fits_ends_with_an_error_and_the_others_go_on(depth: int) -> None:
    core = start(pooling_folder("bert"), CPU, depth=depth, max_num_batched_tokens=512, max_num_seqs=8)
    TightExecutor(core, 150)
    core.add([EngineRequest(50, [5] * 151, [], SamplingParams(0), pooling=EMBED), *pooling_requests(EMBED)])
    errors: dict[int, str] = {}
    ended: set[int] = set()
    while core.busy:
        output = core.step()
        if output is not None:
            errors |= output.errors
            ended |= output.pooled.keys()
    assert errors == {50: "this request does not fit into memory: nothing is left"}
    assert ended == set(range(8))
    check_idle(core.scheduler)
