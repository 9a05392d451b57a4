"""The runner driven by hand-made plans: what a launch may rely on, and what a slot keeps."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.workers.engine.driving import resolved
from tests.workers.engine.loading import load_model
from tests.workers.engine.models.tiny_models import folder, reference
from tests.workers.engine.places import CPU
from workers.engine.backends.registry import find_backend
from workers.engine.device.model_runner import ModelRunner
from workers.engine.messages.core import SamplingParams
from workers.engine.messages.step import AddedRequest, NewBlocks, StepPlan

BLOCK = 16
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    limits = {"max_model_len": 224, "max_num_seqs": 4, "block_size": BLOCK, "threads": 1}
    config = resolved("llama", **limits, **CPU.settings())
    model = load_model(str(folder("llama")), "float32", torch.device("cpu"))
    return ModelRunner(config, find_backend(config.attention_backend), model, num_pages=64)


def plan(
    rows: Sequence[tuple[int, int, int, int]], added: Sequence[AddedRequest] = (), blocks: Sequence[NewBlocks] = ()
) -> StepPlan:
    """Rows as (slot, start, count, samples)."""
    slots, starts, counts, samples = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    return StepPlan(0, list(added), list(blocks), slots, starts, counts, samples)


def test_steps_may_be_launched_before_any_is_retired(runner: ModelRunner) -> None:
    """A launch reads what an earlier one sampled, though no token has come back to the host."""
    expected = reference("llama")
    prompt, tokens = expected.prompts[3], expected.tokens[3]
    last = len(prompt)
    blocks = list(range(1, -(-(last + 10) // BLOCK) + 1))
    launched = [
        runner.launch(plan([(2, 0, last, 1)], [AddedRequest(2, prompt, last, GREEDY)], [NewBlocks(2, 0, blocks)]))
    ]
    launched += [runner.launch(plan([(2, last + i, 1, 1)])) for i in range(9)]
    assert [int(runner.retire(step).tokens[0]) for step in launched] == tokens[:10]


def test_retire_gives_sampling_rows_in_order(runner: ModelRunner) -> None:
    """A chunk of one prompt, the end of another and a decode row in one step."""
    expected = reference("llama")
    long, short = expected.prompts[1], expected.prompts[4]
    first = plan(
        [(0, 0, 100, 0), (1, 0, len(short), 1)],
        [AddedRequest(0, long, len(long), GREEDY), AddedRequest(1, short, len(short), GREEDY)],
        [NewBlocks(0, 0, list(range(20, 31))), NewBlocks(1, 0, [9, 3])],
    )
    assert runner.retire(runner.launch(first)).tokens.tolist() == [expected.tokens[4][0]]
    second = plan([(1, len(short), 1, 1), (0, 100, len(long) - 100, 1)])
    tokens = runner.retire(runner.launch(second)).tokens
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [expected.tokens[4][1], expected.tokens[1][0]]


def test_a_row_may_sample_after_several_of_its_tokens(runner: ModelRunner) -> None:
    """A prompt with what follows it as drafts, beside a row with one sample."""
    expected = reference("llama")
    known, short = expected.prompts[0] + expected.tokens[0][:2], expected.prompts[4]
    step = plan(
        [(0, 0, len(known), 3), (1, 0, len(short), 1)],
        [AddedRequest(0, known, len(expected.prompts[0]), GREEDY), AddedRequest(1, short, len(short), GREEDY)],
        [NewBlocks(0, 0, [5, 6]), NewBlocks(1, 0, [9, 3])],
    )
    tokens = runner.retire(runner.launch(step)).tokens.tolist()
    assert tokens == [*expected.tokens[0][:3], expected.tokens[4][0]]


def test_step_without_samples(runner: ModelRunner) -> None:
    prompt = reference("llama").prompts[1]
    step = plan([(0, 0, 16, 0)], [AddedRequest(0, prompt, len(prompt), GREEDY)], [NewBlocks(0, 0, [1])])
    assert runner.retire(runner.launch(step)).tokens.tolist() == []


def test_added_request_overwrites_its_slot(runner: ModelRunner) -> None:
    """The next owner of a slot sees nothing of the last: neither tokens, nor blocks, nor
    sampling.
    """
    expected = reference("llama")
    wild = SamplingParams(max_tokens=64, temperature=5.0, top_p=0.9, top_k=7, seed=3)
    for prompt, sampling in ((expected.prompts[1], wild), (expected.prompts[5], GREEDY)):
        blocks = NewBlocks(3, 0, list(range(40, 40 + -(-len(prompt) // BLOCK) + 1)))
        step = plan([(3, 0, len(prompt), 1)], [AddedRequest(3, prompt, len(prompt), sampling)], [blocks])
        tokens = runner.retire(runner.launch(step)).tokens.tolist()
    assert tokens == [expected.tokens[5][0]]


def test_resumed_request_goes_on_where_it_was(runner: ModelRunner) -> None:
    """Prompt and output so far, computed again as one prompt, give the next token."""
    expected = reference("llama")
    known = expected.prompts[0] + expected.tokens[0][:30]
    step = plan(
        [(1, 0, len(known), 1)],
        [AddedRequest(1, known, len(expected.prompts[0]), GREEDY)],
        [NewBlocks(1, 0, [5, 6])],
    )
    assert runner.retire(runner.launch(step)).tokens.tolist() == [expected.tokens[0][30]]
