"""A request's tokens depend on nothing but itself: not on other rows, its interruptions, or the
worker that began it.
"""

import random

import msgspec
import pytest

from tests.workers.engine.driving import Answer, make_core, run
from tests.workers.engine.models.tiny_models import VOCAB
from tests.workers.engine.places import CPU, Place, at, interpreted, on_gpu
from tests.workers.engine.sampling.plain import random_row
from workers.engine.messages.core import EngineRequest, Finish

NEW_TOKENS = 24
SEED = 20


def requests() -> list[EngineRequest]:
    """64 that ask for all kinds of things."""
    draw = random.Random(SEED)
    pairs = tuple((first, second) for first in range(VOCAB) for second in draw.sample(range(VOCAB), 8))
    words = [pairs, tuple((token,) for token in range(5)), ()]
    rows = [
        random_row(draw, VOCAB, max_tokens=NEW_TOKENS, min_tokens=draw.choice([0, 5, 60]), bad_words=words[i % 3])
        for i in range(64)
    ]
    return [EngineRequest(number, row.prompt * 2, [], row.params) for number, row in enumerate(rows)]


def generate(
    some: list[EngineRequest], depth: int, num_blocks: int = 1000, place: Place = CPU
) -> tuple[dict[int, Answer], int]:
    got = run(
        make_core("llama", depth=depth, max_model_len=120, max_num_seqs=64, num_blocks=num_blocks, place=place), some
    )
    return got.answers, got.preemptions


def assert_same(got: Answer, expected: Answer, start: int = 0) -> None:
    """All of it but the last bits of the logarithms, which depend on how many rows a product of
    matrices has.
    """
    assert (got.tokens, got.finish) == (expected.tokens[start:], expected.finish)
    expected_items = expected.logprobs[start:]
    assert [item.token_ids for item in got.logprobs] == [item.token_ids for item in expected_items]
    assert [item.logprobs for item in got.logprobs] == [
        pytest.approx(item.logprobs, abs=1e-4) for item in expected_items
    ]


@pytest.mark.usefixtures("crowded")
@at
@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.proof), 1])
def test_alone_in_a_batch_and_after_preemption(depth: int, place: Place) -> None:
    print(f"seed {SEED}")
    together, _ = generate(requests(), depth, place=place)
    assert {answer.finish for answer in together.values()} == {Finish.STOP, Finish.LENGTH}
    for number in range(0, 64, 5):
        assert_same(generate([requests()[number]], depth, place=place)[0][number], together[number])
    squeezed, preemptions = generate(requests(), depth, num_blocks=40, place=place)
    assert preemptions > 0
    for number, answer in squeezed.items():
        assert_same(answer, together[number])


@at
@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.proof), 1])
def test_from_a_checkpoint(depth: int, place: Place) -> None:
    """What another worker generated counts as output in everything: noise, penalties, min_tokens,
    bad words.
    """
    print(f"seed {SEED}")
    whole, _ = generate(requests(), 0, place=place)
    resumed = requests()
    for request in resumed:
        request.output_token_ids = whole[request.request_id].tokens[: request.request_id % NEW_TOKENS]
    for number, answer in generate(resumed, depth, place=place)[0].items():
        assert_same(answer, whole[number], start=number % NEW_TOKENS)


@pytest.mark.proof
@pytest.mark.parametrize("place", [interpreted, on_gpu])
def test_a_few_are_drawn_as_torch_draws_them(place: Place) -> None:
    """By the kernels, in a batch and alone: what a worker without a GPU would have answered."""
    print(f"seed {SEED}")
    some = [EngineRequest(each.request_id, each.prompt_token_ids[:5], [], each.sampling) for each in requests()[:3]]
    for request in some:
        request.sampling = msgspec.structs.replace(request.sampling, max_tokens=3, prompt_logprobs=-1)
    expected, _ = generate(some, depth=0)
    for number, answer in generate(some, depth=1, place=place)[0].items():
        assert_same(answer, expected[number])
    assert_same(generate(some[1:2], depth=1, place=place)[0][1], expected[1])
