"""One step ahead, with a real model: whatever comes, goes and is aborted meanwhile, a request's tokens are those that it has alone."""

import random
from dataclasses import dataclass

import pytest

from tests.workers.engine.driving import make_core
from tests.workers.engine.tiny_models import VOCAB
from workers.engine.core import EngineCore
from workers.engine.messages import EngineRequest, Finish, SamplingParams


@dataclass(frozen=True)
class Case:
    request: EngineRequest
    arrives: int  # turn of the loop
    aborted: int | None


def random_cases(draw: random.Random, number: int, tokens: int, longest: int) -> list[Case]:
    """Greedy and drawn, live and batch ones, some with stop tokens that come up soon, some that another worker began."""
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
        request = EngineRequest(request_id, prompt, output, sampling, live=draw.random() < 0.3, priority=draw.choice([0, 0, 1]))
        arrives = draw.randint(0, tokens)
        cases.append(Case(request, arrives, draw.choice([None, None, None, arrives + draw.randint(0, 2 * tokens)])))
    return cases


def drive(core: EngineCore, cases: list[Case]) -> tuple[dict[int, tuple[list[int], Finish]], int]:
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
    core.scheduler.check_idle()
    return {number: (tokens[number], finish[number]) for number in finish}, preemptions


def assert_own_answers(got: dict[int, tuple[list[int], Finish]], cases: list[Case], alone: EngineCore) -> None:
    for case in cases:
        tokens, finish = got[case.request.request_id]
        expected, how = drive(alone, [Case(case.request, 0, None)])[0][case.request.request_id]
        if finish is Finish.ABORT:
            assert expected[: len(tokens)] == tokens
        else:
            assert (tokens, finish) == (expected, how)


@pytest.mark.parametrize("seed", [0, 2])
def test_random_company_changes_no_token(seed: int) -> None:
    print(f"seed {seed}")
    cases = random_cases(random.Random(seed), 16, 30, 60)
    settings = {"max_model_len": 120, "max_num_seqs": 6, "max_num_batched_tokens": 40}
    alone = make_core("llama", depth=0, max_model_len=120, enable_prefix_caching=False)
    for depth in (0, 1):
        core = make_core("llama", num_blocks=10, depth=depth, **settings)
        got, preemptions = drive(core, cases)
        assert preemptions > 0
        assert_own_answers(got, cases, alone)
