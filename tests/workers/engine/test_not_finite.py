"""A model whose numbers are NaN or infinite for some requests: these fail, and no other notices."""

import copy
from pathlib import Path

import msgspec
import pytest
import torch
import transformers

from tests.workers.engine.driving import Answer, make_core, recorded, run
from tests.workers.engine.models.tiny_models import MODELS, make
from tests.workers.engine.models.tiny_pooling_models import CLASSIFIERS, make_pooling_model, texts
from tests.workers.engine.places import CPU, INTERPRETER, Place, at_all, needs_interpreter
from tests.workers.engine.pooling import start
from workers.engine.core import EngineCore
from workers.engine.device.executor import Executor
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, Finish, PoolingParams, SamplingParams

MODEL = "llama"
LENGTH = 24
PROMPTS = [[(7 * number + 3 * place) % 40 for place in range(20 + number)] for number in range(6)]
DRAWN = SamplingParams(LENGTH, temperature=0.8, top_k=30, top_p=0.95, seed=4)
DAMAGED = 77
NEVER_DRAWN = msgspec.structs.replace(DRAWN, bad_words=((DAMAGED,),))
PARAMS = {
    "greedy": SamplingParams(LENGTH, temperature=0.0),
    "drawn": DRAWN,
    "staged": msgspec.structs.replace(DRAWN, repetition_penalty=1.1, logit_bias=((1, 2.0),), logprobs=2),
}
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def requests(params: SamplingParams) -> list[EngineRequest]:
    """Rows of different kinds in one step: each third one is greedy."""
    greedy = msgspec.structs.replace(params, temperature=0.0)
    return [
        EngineRequest(number, prompt, [], greedy if number % 3 == 2 else params)
        for number, prompt in enumerate(PROMPTS)
    ]


def fatal_token(answers: dict[int, Answer]) -> tuple[int, int, int]:
    """A token that a single answer has, and not as its last: the token, the answer and the index
    there.
    """
    for number, answer in answers.items():
        others = {token for other in answers if other != number for token in answers[other].tokens}
        for index, token in enumerate(answer.tokens[3:-3], 3):
            if token >= 40 and token not in others and token not in answer.tokens[:index]:
                return token, number, index
    raise AssertionError("each token is in several answers")


def damage(path: Path, token: int, value: float) -> Path:
    """A folder of the model in which the embedding of one token is `value`."""
    return saved(make(MODELS[MODEL]), path, token, value)


def saved(model: transformers.PreTrainedModel, path: Path, token: int, value: float) -> Path:
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = value  # type: ignore[operator,index]
    model.save_pretrained(path)
    return path


def core_of(path: Path, place: Place, **settings: object) -> EngineCore:
    small = {"threads": 1, "kv_cache_memory_bytes": 2 << 20, "max_num_seqs": 4} | place.settings()
    return EngineCore(Executor(EngineConfig(model=str(path), **(small | settings))))  # type: ignore[arg-type]


@at_all
@DEPTHS
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("kind", PARAMS)
def test_a_request_fails_at_the_first_such_token_and_the_others_go_on(
    kind: str, value: float, depth: int, place: Place, tmp_path: Path
) -> None:
    params = PARAMS[kind]
    expected = run(make_core(MODEL, place=place), requests(params)).answers
    token, number, index = fatal_token(expected)
    core = core_of(damage(tmp_path, token, value), place, depth=depth)
    for _ in range(2):  # the second time in blocks that hold NaN
        answers = run(core, requests(params)).answers
        failed = answers.pop(number)
        assert failed.tokens == expected[number].tokens[: index + 1]
        assert (failed.finish, failed.error) == (
            Finish.NOT_FINITE, f"the logits for token {index + 2} of the output"
        )  # fmt: skip
        assert len(failed.logprobs) == (index + 1 if params.logprobs >= 0 else 0)
        for other, answer in answers.items():
            assert answer.tokens == expected[other].tokens


@DEPTHS
def test_products_in_int8_hide_no_such_number(depth: int, tmp_path: Path) -> None:
    core = core_of(damage(tmp_path, DAMAGED, torch.nan), CPU, depth=depth, quantization="int8")
    found = run(core, [*requests(NEVER_DRAWN), EngineRequest(9, [1, DAMAGED, 2], [], DRAWN)]).answers
    assert [number for number, answer in found.items() if answer.finish is Finish.NOT_FINITE] == [9]
    assert found[9].tokens == []


@needs_interpreter
@pytest.mark.proof
@pytest.mark.parametrize("recording", [False, True])
def test_the_gpus_kernels_find_them_too(recording: bool, tmp_path: Path) -> None:
    """Tokens go from a draw to the next step on the device alone."""
    settings = {"max_model_len": 40, "max_num_batched_tokens": 24, "depth": 1}
    short = [
        EngineRequest(number, PROMPTS[number][:5], [], msgspec.structs.replace(PARAMS[kind], max_tokens=8))
        for number, kind in enumerate(PARAMS)
    ]
    expected = run(make_core(MODEL), short).answers
    token, number, index = fatal_token(expected)
    core = core_of(damage(tmp_path, token, torch.nan), INTERPRETER, **settings)
    if recording:
        core._executor.runner.use_graphs(recorded)
    found = run(core, short).answers
    assert found.pop(number).error == f"the logits for token {index + 2} of the output"
    assert {one: answer.tokens for one, answer in found.items()} == {
        one: answer.tokens for one, answer in expected.items() if one != number
    }


@at_all
@DEPTHS
def test_prompt_scores_that_are_not_finite_end_their_request(depth: int, place: Place, tmp_path: Path) -> None:
    scored = msgspec.structs.replace(NEVER_DRAWN, prompt_logprobs=1)
    core = core_of(damage(tmp_path, DAMAGED, torch.nan), place, depth=depth)
    found = run(
        core, [EngineRequest(0, PROMPTS[5], [], scored), EngineRequest(1, [1, 2, 3, DAMAGED, 4, 5], [], scored)]
    )
    assert found.answers[0].finish is Finish.LENGTH
    assert found.answers[1] == Answer(finish=Finish.NOT_FINITE, error="the logits for the prompt")


def test_nothing_of_a_failed_request_is_in_the_prefix_cache(tmp_path: Path) -> None:
    core = core_of(damage(tmp_path, DAMAGED, torch.nan), CPU)
    prompt = [*range(60), DAMAGED]
    for number in range(2):
        found = run(core, [EngineRequest(number, prompt, [], DRAWN)])
        assert found.answers[number].finish is Finish.NOT_FINITE
    assert found.prefix_hit_tokens == 0


@DEPTHS
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_request_that_leaves_itself_no_token_is_told_so(temperature: float, depth: int) -> None:
    nothing = SamplingParams(9, temperature=temperature, stop_token_ids=(5,), allowed_token_ids=(5,), min_tokens=3)
    one = msgspec.structs.replace(nothing, allowed_token_ids=(5, 6))
    found = run(make_core(MODEL, depth=depth), [EngineRequest(0, [1], [], nothing), EngineRequest(1, [1], [], one)])
    assert (found.answers[0].tokens, found.answers[0].finish) == ([], Finish.INVALID)
    assert "allowed_token_ids, bad_words and min_tokens" in found.answers[0].error
    assert found.answers[1].tokens[:3] == [6, 6, 6]


@at_all
@pytest.mark.parametrize("name", ["bert", "qwen3", "bert-classes", "bert-pair"])
def test_a_text_that_cannot_be_pooled_fails_alone(name: str, place: Place, tmp_path: Path) -> None:
    params = PoolingParams("classify" if name in CLASSIFIERS else "embed")
    path = saved(copy.deepcopy(make_pooling_model(name)), tmp_path, DAMAGED, torch.nan)
    core = start(path, place, task=params.task)
    core.add(EngineRequest(number, text, [], SamplingParams(0), pooling=params) for number, text in enumerate(texts()))
    damaged = {number for number, text in enumerate(texts()) if DAMAGED in text}
    ends: dict[int, tuple[Finish, str]] = {}
    while core.busy:
        if (output := core.step()) is not None:
            assert damaged.isdisjoint(output.pooled)
            ends |= {
                number: (Finish(finish), output.errors.get(number, ""))
                for number, finish in zip(output.request_ids, output.finish, strict=True)
            }
    assert {number for number, end in ends.items() if end == (Finish.NOT_FINITE, "the numbers for the text")} == damaged
    assert {end for number, end in ends.items() if number not in damaged} == {(Finish.STOP, "")}
