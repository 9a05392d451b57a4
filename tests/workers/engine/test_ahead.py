"""One step ahead, with a real model: whatever comes, goes and is aborted meanwhile, a request's
tokens are those that it has alone.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.workers.engine.driving import make_core, recorded
from tests.workers.engine.models.tiny_models import VOCAB
from tests.workers.engine.places import GPU, INTERPRETER, needs_interpreter
from tests.workers.engine.scheduling.integrity import check_idle
from workers.engine.core import EngineCore
from workers.engine.device.model_runner import LaunchedStep, ModelRunner
from workers.engine.layers.stack import LayerStack
from workers.engine.messages.core import EngineRequest, Finish, SamplingParams
from workers.engine.messages.step import StepPlan
from workers.engine.models.decoder import RotaryDecoder


@dataclass(frozen=True)
class RandomCase:
    request: EngineRequest
    arrives: int  # turn of the loop
    aborted: int | None


def random_cases(draw: random.Random, number: int, tokens: int, longest: int) -> list[RandomCase]:
    """Greedy and drawn, live and batch ones, some with stop tokens that come up soon, some that
    another worker began.
    """
    cases = []
    for request_id in range(number):
        shared = draw.choice([[], list(range(17)), list(range(40))])[:longest]
        sampling = SamplingParams(
            max_tokens=draw.choice([1, tokens // 2, tokens]),
            temperature=draw.choice([0.0, 0.8]),
            top_k=draw.choice([0, 20]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
            seed=request_id,
            stop_token_ids=tuple(draw.sample(range(VOCAB), draw.choice([0, 0, 40]))),
            logprobs=draw.choice([-1, -1, 2]),
        )
        prompt = shared + [draw.randrange(VOCAB) for _ in range(draw.randint(1, longest - len(shared) + 1))]
        output = [draw.randrange(VOCAB) for _ in range(draw.choice([0, 0, 0, sampling.max_tokens // 2]))]
        request = EngineRequest(
            request_id, prompt, output, sampling, live=draw.random() < 0.3, priority=draw.choice([0, 0, 1])
        )
        arrives = draw.randint(0, tokens)
        cases.append(
            RandomCase(request, arrives, draw.choice([None, None, None, arrives + draw.randint(0, 2 * tokens)]))
        )
    return cases


def drive(core: EngineCore, cases: list[RandomCase]) -> tuple[dict[int, tuple[list[int], Finish]], int]:
    """Tokens and end of each request, and how often one was preempted."""
    tokens: dict[int, list[int]] = {case.request.request_id: [] for case in cases}
    finish: dict[int, Finish] = {}
    turn = preemptions = 0
    while turn <= max(case.arrives for case in cases) or core.busy:
        core.add(case.request for case in cases if case.arrives == turn)
        core.abort(case.request.request_id for case in cases if case.aborted == turn)
        turn += 1
        output = core.step()
        if output is None:
            continue
        preemptions = output.stats.preemptions
        flat = iter(output.token_ids)
        for row, number in enumerate(output.request_ids):
            assert number not in finish
            tokens[number] += [next(flat) for _ in range(output.counts[row])]
            if output.finish[row]:
                finish[number] = Finish(output.finish[row])
    check_idle(core.scheduler)
    return {number: (tokens[number], finish[number]) for number in finish}, preemptions


def assert_own_answers(got: dict[int, tuple[list[int], Finish]], cases: list[RandomCase], alone: EngineCore) -> None:
    for case in cases:
        tokens, finish = got[case.request.request_id]
        expected, how = drive(alone, [RandomCase(case.request, 0, None)])[0][case.request.request_id]
        if finish is Finish.ABORT:
            assert expected[: len(tokens)] == tokens
        else:
            assert (tokens, finish) == (expected, how)


def in_a_batch(seed: int, depth: int) -> int:
    """Return how often a request was preempted."""
    print(f"seed {seed}, depth {depth}")
    cases = random_cases(random.Random(seed), 16, 30, 60)
    alone = make_core("llama", depth=0, max_model_len=120, enable_prefix_caching=False)
    core = make_core("llama", num_blocks=10, depth=depth, max_model_len=120, max_num_seqs=6, max_num_batched_tokens=40)
    got, preemptions = drive(core, cases)
    assert_own_answers(got, cases, alone)
    return preemptions


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("depth", [0, 1])
def test_random_batches_change_no_token(depth: int) -> None:
    assert in_a_batch(0, depth) > 0


@pytest.mark.usefixtures("crowded")
@pytest.mark.proof
@pytest.mark.parametrize("depth", [0, 1])
def test_much_random_batches_change_no_token(depth: int) -> None:
    for seed in range(100, 108):
        in_a_batch(seed, depth)


class Failing:
    """Has launches end, now and then, with a want of memory at one of several places."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        self.failed = 0
        self._chance = random.Random(seed)
        places: list[tuple[object, str]] = [
            (runner.model, "forward"),
            (runner.model, "logits"),
            (runner, "_towards_host"),
        ]
        for owner, name in [*places, (runner.inputs, "store")]:
            setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, function: Callable[..., object]) -> Callable[..., object]:
        def failing(*arguments: object) -> object:
            if self._chance.random() < 0.05:
                self.failed += 1
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return function(*arguments)

        return failing


def one_layer(core: EngineCore) -> EngineCore:
    model = core._executor.runner.model
    assert isinstance(model, RotaryDecoder)
    stack = model.stack
    assert isinstance(stack, LayerStack)
    model.stack = LayerStack(stack.layers[:1], stack.norm)
    return core


@pytest.mark.usefixtures("crowded")
@needs_interpreter
@pytest.mark.proof
@pytest.mark.parametrize("depth", [0, 1])
def test_a_gpus_path_in_random_batches_and_short_of_memory(depth: int) -> None:
    """Kernels under the interpreter, padded decode steps, differences that are staged again
    after a step was taken back.
    """
    seed = 15
    print(f"seed {seed}")
    cases = random_cases(random.Random(seed), 5, 8, 20)
    settings = {"max_model_len": 40, "max_num_seqs": 3, "max_num_batched_tokens": 24}
    core = one_layer(make_core("llama", num_blocks=4, depth=depth, place=INTERPRETER, **settings))
    runner = core._executor.runner
    failing = Failing(runner, seed)
    runner.use_graphs(recorded)
    got, preemptions = drive(core, cases)
    assert failing.failed > 0
    assert preemptions > 0
    assert_own_answers(
        got, cases, one_layer(make_core("llama", depth=0, max_model_len=40, enable_prefix_caching=False))
    )


@pytest.mark.gpu
def test_no_launch_waits_for_the_gpu() -> None:
    """Mixed steps, decode steps and those that are sampled by stages, once each was seen."""
    core = make_core("llama", place=GPU, depth=1, max_model_len=200, max_num_seqs=16, max_num_batched_tokens=64)
    launch, sampling = (
        core._executor.launch,
        [
            SamplingParams(40, temperature=0.0),
            SamplingParams(40, temperature=0.9, top_p=0.8, top_k=30, seed=1),
            SamplingParams(
                30,
                temperature=0.9,
                repetition_penalty=1.2,
                min_tokens=5,
                logit_bias=((3, 1.0),),
                logprobs=3,
                prompt_logprobs=1,
            ),
        ],
    )

    def watched(plan: StepPlan) -> LaunchedStep:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for round_number in range(3):
        if round_number == 2:
            core._executor.launch = watched  # type: ignore[method-assign]
        prompts = [[(7 * row + at) % VOCAB for at in range(9 + 5 * row)] for row in range(12)]
        requests = [
            EngineRequest(100 * round_number + row, prompt, [], sampling[row % 3]) for row, prompt in enumerate(prompts)
        ]
        got, _ = drive(core, [RandomCase(request, row, None) for row, request in enumerate(requests)])
        assert {how for _, how in got.values()} == {Finish.LENGTH}
