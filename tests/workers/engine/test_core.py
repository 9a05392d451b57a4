"""The core's loop with a real model, without a process around it."""

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.waiting import wait_until
from tests.workers.engine.models.tiny_models import NEW_TOKENS, VOCAB, folder, reference
from tests.workers.engine.places import CPU, TORCH, Place, at
from tests.workers.engine.scheduling.integrity import check_idle
from workers.engine.core import EngineCore
from workers.engine.cuda.out_of_memory import is_out_of_memory
from workers.engine.device.executor import Executor
from workers.engine.device.model_runner import LaunchedStep
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import (
    AbortRequests,
    AddRequests,
    EngineRequest,
    Finish,
    SamplingParams,
    Shutdown,
    StepOutput,
    ToCore,
)
from workers.engine.messages.errors import ModelLoadError, StepOutOfMemory
from workers.engine.messages.step import MakeMasks, StepPlan, StepResult

MODEL = "llama"
GREEDY = SamplingParams(NEW_TOKENS, temperature=0.0)


def make_core(depth: int = 0, place: Place = CPU, **settings: float | bool | str) -> EngineCore:
    config = EngineConfig(
        model=str(folder(MODEL)),
        depth=depth,
        threads=1,
        **place.settings(),
        **{"kv_cache_memory_bytes": 4 << 20, **settings},
    )  # type: ignore[arg-type]
    return EngineCore(Executor(config))


def requests(sampling: SamplingParams = GREEDY) -> list[EngineRequest]:
    return [EngineRequest(number, prompt, [], sampling) for number, prompt in enumerate(reference(MODEL).prompts)]


def collect(outputs: list[StepOutput]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for output in outputs:
        flat = iter(output.token_ids)
        for number, count in zip(output.request_ids, output.counts, strict=True):
            tokens.setdefault(number, []).extend(next(flat) for _ in range(count))
    return tokens


def run_dry(core: EngineCore) -> list[StepOutput]:
    outputs = []
    while core.busy:
        output = core.step()
        if output is not None:
            outputs.append(output)
    check_idle(core.scheduler)
    return outputs


@pytest.mark.usefixtures("crowded")
@at
@pytest.mark.parametrize("depth", [0, 1])
def test_a_tight_cache_changes_no_token(depth: int, place: Place) -> None:
    core = make_core(depth, place, kv_cache_memory_bytes=2 * 3 * 16 * 2 * 16 * 4 * 22, max_num_batched_tokens=48)
    core.add(requests())
    outputs = run_dry(core)
    assert outputs[-1].stats.preemptions > 0
    assert list(dict(sorted(collect(outputs).items())).values()) == reference(MODEL).tokens


def test_a_cache_of_8_bits_is_for_the_gpus_kernels() -> None:
    with pytest.raises(ModelLoadError, match=r"fp8 needs .*, and this is the (cpu|torch) backend on cpu; leave it at"):
        make_core(kv_cache_dtype="fp8")


@pytest.mark.parametrize("depth", [0, 1])
def test_each_step_says_once_how_much_it_computed(depth: int) -> None:
    core = make_core(depth, max_num_seqs=2)
    core.add(requests())
    stats = [output.stats for output in run_dry(core)]
    assert sum(tokens for each in stats for tokens, _ in each.step_tokens) == stats[-1].computed_tokens
    assert sum(rows for each in stats for rows, _ in each.step_rows) >= stats[-1].tokens
    assert [len(each.step_rows) for each in stats].count(1) == stats[-1].steps


@pytest.mark.parametrize("depth", [0, 1])
def test_the_device_seconds_of_all_requests_are_no_more_than_the_time_that_passed(depth: int) -> None:
    core = make_core(depth, max_num_seqs=2)
    core.add(requests())
    began = time.perf_counter()
    outputs = run_dry(core)
    passed = time.perf_counter() - began
    found = [output.device_seconds for output in outputs]
    assert sorted(number for each in found for number in each) == list(range(len(requests())))
    assert min(seconds for each in found for seconds in each.values()) > 0
    assert sum(seconds for each in found for seconds in each.values()) <= passed


@at
@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_goes_on_from_a_checkpoint(depth: int, place: Place) -> None:
    core = make_core(depth, place)
    expected = reference(MODEL)
    for number, (prompt, tokens) in enumerate(zip(expected.prompts, expected.tokens, strict=True)):
        core.add([EngineRequest(number, prompt, tokens[: 10 * number], GREEDY)])
    assert collect(run_dry(core)) == {number: tokens[10 * number :] for number, tokens in enumerate(expected.tokens)}


@at
@pytest.mark.parametrize("depth", [0, 1])
def test_an_aborted_request_leaves_the_others_alone(depth: int, place: Place) -> None:
    core = make_core(depth, place)
    core.add(requests())
    outputs = [output for _ in range(9) if (output := core.step()) is not None]
    core.abort([0, 3])
    outputs += run_dry(core)
    got, expected = collect(outputs), reference(MODEL).tokens
    assert [number for number in range(6) if got[number] == expected[number]] == [1, 2, 4, 5]
    assert all(0 < len(got[number]) < 10 and expected[number][: len(got[number])] == got[number] for number in (0, 3))


def test_ready_says_what_was_settled() -> None:
    ready = make_core(max_num_seqs=3, max_model_len=100).ready
    assert (ready.max_num_seqs, ready.max_model_len, ready.vocab_size, ready.block_size) == (3, 100, VOCAB, 16)
    assert (ready.dtype, ready.device, ready.depth, ready.threads, ready.eos_token_ids) == ("float32", "cpu", 0, 1, [])
    assert ready.weights_seconds > 0


def finishes(outputs: list[StepOutput]) -> dict[int, int]:
    """How requests ended, by id."""
    return {
        number: how for output in outputs for number, how in zip(output.request_ids, output.finish, strict=True) if how
    }


@pytest.mark.parametrize("depth", [0, 1])
def test_the_loop_takes_messages_between_steps_and_waits_when_idle(depth: int) -> None:
    core = make_core(depth)
    inbox: SimpleQueue[ToCore] = SimpleQueue()
    outputs: list[StepOutput] = []
    aborted = threading.Event()

    def emit(output: StepOutput) -> None:
        outputs.append(output)
        if len(outputs) > 3:
            aborted.wait(20)  # the request would end by itself if the test came late

    loop = threading.Thread(target=core.run, args=(inbox, emit), daemon=True)
    loop.start()
    endless = SamplingParams(10_000, temperature=0.0)
    inbox.put(AddRequests([EngineRequest(1, [5], [], endless), EngineRequest(2, [6] * 300, [], endless)]))
    wait_until(lambda: len(outputs) > 3, 20, "some steps")
    inbox.put(AbortRequests([1]))
    aborted.set()
    wait_until(lambda: len(finishes(outputs)) == 2, 20, "two ends")
    assert finishes(outputs) == {1: Finish.ABORT, 2: Finish.ERROR}
    wait_until(lambda: not core.busy, 20, "an idle core")
    inbox.put(AddRequests([EngineRequest(3, [7], [], SamplingParams(0))]))
    wait_until(lambda: outputs[-1].request_ids == [3], 20, "an answer without a step")
    inbox.put(Shutdown())
    loop.join(20)
    assert not loop.is_alive()


class WatchedModel:
    """The core's model; `arrives` is called in the middle of a forward pass of more than `tokens`
    tokens.
    """

    def __init__(self, core: EngineCore, tokens: int, arrives: Callable[[], None]) -> None:
        model = core._executor.runner.model
        self._forward, self._tokens, self._arrives = model.forward, tokens, arrives
        model.forward = self.forward  # type: ignore[method-assign]

    def forward(self, input_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        if len(input_ids) > self._tokens:
            arrives, self._arrives = self._arrives, lambda: None
            arrives()
        return self._forward(input_ids, *others)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("live", [True, False])
def test_a_step_of_batch_requests_alone_is_abandoned_for_a_live_one(depth: int, live: bool) -> None:
    """All tokens are as without, and the live request has its first token before the others."""
    core, inbox, outputs = make_core(depth, live_step_ms=1.0), SimpleQueue[ToCore](), list[StepOutput]()
    first, *others = requests()
    first.live = live
    for _ in range(4):  # a step counts as one of an hour
        core.scheduler.step_cost.record(np.zeros(1, np.int32), np.full(1, 20, np.int32), 3600.0)
    undone = []
    undo = core.scheduler.undo
    core.scheduler.undo = lambda plan: undone.append(plan.step) or undo(plan)  # type: ignore[method-assign,func-returns-value]

    def arrives() -> None:
        inbox.put(AddRequests([first]))
        core.interrupt_for(AddRequests([first]))

    WatchedModel(core, 16, arrives)

    def emit(output: StepOutput) -> None:
        outputs.append(output)
        if len(finishes(outputs)) == 1 + len(others):
            inbox.put(Shutdown())

    inbox.put(AddRequests(others))
    core.run(inbox, emit)
    assert len(undone) == live
    assert list(dict(sorted(collect(outputs).items())).values()) == reference(MODEL).tokens
    if live:
        assert outputs[0].request_ids[0] == first.request_id


@pytest.mark.parametrize("place", [pytest.param(CPU, id="cpu"), pytest.param(TORCH, id="torch")])
def test_blocks_of_the_cache_are_populated_while_no_message_comes(place: Place) -> None:
    """Requests in between are answered as ever."""
    core, inbox, outputs = make_core(place=place), SimpleQueue[ToCore](), list[StepOutput]()
    memory = core._executor.cache_memory
    thread = threading.Thread(target=core.run, args=(inbox, outputs.append), daemon=True)
    thread.start()
    for number in range(2):
        added = requests()
        for request in added:
            request.request_id += 100 * number
        expected = len(finishes(outputs)) + len(added)
        inbox.put(AddRequests(added))
        wait_until(partial(lambda count: len(finishes(outputs)) == count, expected), 60, "the answers")
        if memory is not None:
            wait_until(lambda: not memory.is_behind, 60, "memory for more blocks")
    inbox.put(Shutdown())
    thread.join(60)
    assert not thread.is_alive()
    assert (memory is None) is (place == TORCH)
    assert list(dict(sorted(collect(outputs).items())).values()) == reference(MODEL).tokens * 2


def test_live_requests_that_end_at_once_do_not_stop_a_batch() -> None:
    """One arrives in the middle of each long step, and fails; the batch ends nevertheless."""
    core, inbox, outputs = make_core(live_step_ms=1.0), SimpleQueue[ToCore](), list[StepOutput]()
    for _ in range(4):  # a step counts as one of a second
        core.scheduler.step_cost.record(np.zeros(1, np.int32), np.full(1, 20, np.int32), 1.0)
    core._may_lose = 0.02
    ids, forward = itertools.count(1000), core._executor.runner.model.forward

    def interrupted(input_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        if len(input_ids) > 4 and not finishes(outputs).keys() & set(range(1000)):
            message = AddRequests([EngineRequest(next(ids), [], [], GREEDY, live=True)])
            inbox.put(message)
            core.interrupt_for(message)
            assert next(ids) < 1400, "the batch starves"
            time.sleep(0.005)  # of the step's time
        return forward(input_ids, *others)

    core._executor.runner.model.forward = interrupted  # type: ignore[method-assign]

    def emit(output: StepOutput) -> None:
        outputs.append(output)
        if len(finishes(outputs).keys() & set(range(1000))) == len(requests()):
            inbox.put(Shutdown())

    inbox.put(AddRequests(requests()))
    core.run(inbox, emit)
    tokens = {number: each for number, each in collect(outputs).items() if number < 1000}
    assert list(dict(sorted(tokens.items())).values()) == reference(MODEL).tokens


class TightExecutor:
    """A real executor with room for `room` tokens in one step, and for none of a request whose
    prompt begins with `never`.
    """

    def __init__(self, core: EngineCore, room: int, never: int = -1) -> None:
        self._executor, self._room, self._never = core._executor, room, never
        self._slots: set[int] = set()
        self.refused = 0
        core._executor = self  # type: ignore[assignment]

    def launch(self, plan: StepPlan) -> LaunchedStep:
        for added in plan.added:
            (self._slots.add if added.token_ids[0] == self._never else self._slots.discard)(added.slot)
        if plan.counts.sum() > self._room or self._slots & set(plan.slots.tolist()):
            self.refused += 1
            raise StepOutOfMemory("nothing is left")
        return self._executor.launch(plan)

    def retire(self, launched: LaunchedStep) -> StepResult:
        return self._executor.retire(launched)


@at
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("room", [1, 5, 40])
def test_a_step_that_does_not_fit_is_tried_smaller(depth: int, room: int, place: Place) -> None:
    core = make_core(depth, place)
    core.add(requests())
    executor = TightExecutor(core, room)
    assert list(dict(sorted(collect(run_dry(core)).items())).values()) == reference(MODEL).tokens
    assert 0 < executor.refused < 60


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_grow_again_when_memory_is_there_again(depth: int) -> None:
    core = make_core(depth)
    full = core.scheduler.token_budget
    executor = TightExecutor(core, 3)
    core.add(requests())
    while core.scheduler.token_budget == full or executor.refused < 3:
        core.step()
    executor._room = full
    run_dry(core)
    core.add([EngineRequest(100, [5], [], SamplingParams(240, temperature=0.0))])
    run_dry(core)
    assert core.scheduler.token_budget == full


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_never_fits_ends_with_an_error_and_the_others_go_on(depth: int) -> None:
    core = make_core(depth)
    never = VOCAB - 1
    TightExecutor(core, 1000, never)
    core.add([*requests(), EngineRequest(50, [never, 5], [], GREEDY)])
    outputs = run_dry(core)
    (error,) = (sentence for output in outputs for sentence in output.errors.values())
    assert error == "not even one token of this request fits into memory: nothing is left"
    got = collect(outputs)
    assert got.pop(50) == []
    assert list(dict(sorted(got.items())).values()) == reference(MODEL).tokens


def test_a_lack_of_memory_is_distinguished_from_other_errors() -> None:
    for allocate in (
        lambda: torch.empty(1 << 55),
        lambda: torch.tensor_split(torch.zeros(1), 1 << 40),
        lambda: np.empty(1 << 56),
    ):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    for status in ("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED"):
        assert is_out_of_memory(RuntimeError(f"CUDA error: {status} when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`")
    )
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


class NarrowMemory:
    """Has each step of more than `room` tokens end with an allocation that really fails, when it
    comes to the function `at` of `owner`.
    """

    def __init__(self, core: EngineCore, owner: object, at: str, room: int) -> None:
        self.failed = self._tokens = 0
        runner = core._executor.runner
        launch, function = runner.launch, getattr(owner, at)

        def watched_launch(plan: StepPlan, masks: MakeMasks | None = None) -> LaunchedStep:
            self._tokens = int(plan.counts.sum())
            return launch(plan, masks)

        def failing(*arguments: object) -> object:
            if self._tokens > room:
                self.failed += 1
                torch.empty(1 << 55)
            return function(*arguments)

        runner.launch = watched_launch  # type: ignore[method-assign]
        setattr(owner, at, failing)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("at", ["forward", "logits", "_towards_host"])
def test_a_step_that_runs_out_of_memory_half_way_changes_no_token(depth: int, at: str) -> None:
    """Before the cache is written, after it, and after the next tokens were drawn."""
    core = make_core(depth)
    runner = core._executor.runner
    memory = NarrowMemory(core, runner if at == "_towards_host" else runner.model, at, 5)
    core.add(requests())
    assert list(dict(sorted(collect(run_dry(core)).items())).values()) == reference(MODEL).tokens
    assert memory.failed > 0
