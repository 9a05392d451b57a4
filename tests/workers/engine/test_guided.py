"""Outputs that follow a grammar, from a real model: whatever else a step holds or a request asks
for, each token is drawn from those that the grammar allows.
"""

import json
import random
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import msgspec
import pytest
import torch

from tests.workers.engine.driving import Answer, make_core, recorded, run
from tests.workers.engine.guides.texts import END, TOKENS, Prefixes, bytes_of, choice, regex, schema, token
from tests.workers.engine.models.tiny_models import VOCAB
from tests.workers.engine.places import CPU, INTERPRETER, Place, at, needs_interpreter
from tests.workers.engine.test_ahead import assert_own_answers, drive, one_layer, random_cases
from workers.engine.core import EngineCore
from workers.engine.messages.core import EngineRequest, Finish, OutputGuide, SamplingParams

GREEDY = SamplingParams(40, temperature=0.0, stop_token_ids=(END,))
ONE_TOKEN = msgspec.structs.replace(GREEDY, bad_words=tuple((token(start),) for start in ("r", "re", "b", "bl")))
PERSON = schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer"},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "age", "ok"],
        "additionalProperties": False,
    }
)
GRAMMARS = [choice("red", "green", "blue", "redder"), regex("[a-c]{3,9}(é|ed)*[0-9]+"), PERSON]
DEPTHS = pytest.mark.parametrize("depth", [0, 1])
AHEAD = pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.proof), 1])


def guided_core(depth: int = 0, place: Place = CPU, **settings: int | bool) -> EngineCore:
    core = make_core("llama", depth=depth, place=place, **{"max_model_len": 120, "max_num_seqs": 8, **settings})
    core.set_vocabulary(TOKENS)
    return core


def request(number: int, grammar: str, sampling: SamplingParams = GREEDY, **guide: str | bool | int) -> EngineRequest:
    prompt = [(7 * number + at) % VOCAB for at in range(5 + number % 3)]
    return EngineRequest(number, prompt, [], sampling, guide=OutputGuide(grammar, **guide))  # type: ignore[arg-type]


def plain(number: int, sampling: SamplingParams = GREEDY) -> EngineRequest:
    return msgspec.structs.replace(request(number, "", sampling), guide=None)


def answer(core: EngineCore, one: EngineRequest) -> Answer:
    return run(core, [one]).answers[one.request_id]


def written(got: Answer) -> bytes:
    return bytes_of(got.tokens)


def by_hand(core: EngineCore, one: EngineRequest) -> list[int]:
    """The greedy tokens of a request with a grammar, one request per token: the most likely of
    those that begin or end a text of the grammar.
    """
    assert one.guide is not None
    prefixes, tokens = Prefixes(one.guide.grammar), list[int]()
    while len(tokens) < one.sampling.max_tokens and END not in tokens:
        text = bytes_of(tokens)
        allowed = [number for number, more in enumerate(TOKENS) if more and prefixes.begins(text + more)]
        whole = prefixes.is_whole(text)
        if whole and not allowed:
            break
        sampling = msgspec.structs.replace(
            one.sampling, max_tokens=1, allowed_token_ids=(*allowed, END) if whole else tuple(allowed)
        )
        prompt = one.prompt_token_ids + tokens
        tokens += answer(core, EngineRequest(1000 + len(tokens), prompt, [], sampling)).tokens
    return tokens


@at
@DEPTHS
def test_greedy_takes_the_most_likely_token_that_the_grammar_allows(depth: int, place: Place) -> None:
    core = guided_core(depth, place)
    requests = [request(number, GRAMMARS[number % 3]) for number in range(9)]
    got = run(core, requests).answers
    for one in requests:
        assert got[one.request_id].tokens == by_hand(core, one)
        assert got[one.request_id].finish is (Finish.LENGTH if len(got[one.request_id].tokens) == 40 else Finish.STOP)


@DEPTHS
def test_a_grammar_that_allows_nothing_more_ends_the_request_without_a_further_token(depth: int) -> None:
    for sampling in (GREEDY, SamplingParams(40, temperature=0.0, ignore_eos=True, min_tokens=30)):
        got = answer(guided_core(depth), request(1, choice("green", "blue"), sampling))
        assert written(got) in (b"green", b"blue")
        assert END not in got.tokens
        assert got.finish is Finish.STOP


@pytest.mark.usefixtures("crowded")
@AHEAD
def test_neighbors_and_preemption_change_no_token(depth: int) -> None:
    def requests() -> list[EngineRequest]:
        sampling = [
            SamplingParams(40, temperature=0.9, seed=number, stop_token_ids=(END,), top_k=30 * (number % 2))
            for number in range(12)
        ]
        return [
            plain(number, sampling[number])
            if number % 4 == 3
            else request(number, GRAMMARS[number % 3], sampling[number])
            for number in range(12)
        ]

    alone = guided_core(0, max_num_seqs=1)
    expected = {one.request_id: answer(alone, one) for one in requests()}
    squeezed = run(guided_core(depth, num_blocks=9, max_num_batched_tokens=24), requests())
    assert squeezed.preemptions > 0
    assert squeezed.answers == expected
    assert {written(expected[number]) for number in (0, 6)} <= {b"red", b"green", b"blue", b"redder"}


@DEPTHS
def test_a_row_without_a_guide_is_the_same_to_the_bit_beside_one_that_has_one(depth: int) -> None:
    core = guided_core(depth, enable_prefix_caching=False)
    long = SamplingParams(20, temperature=0.0)
    drawn = msgspec.structs.replace(long, temperature=0.8, seed=4, logprobs=3)
    others = [request(number, regex("[a-z]{50}"), long) for number in (2, 3)]
    run(core, others)  # from now on their guides are there at once, so that all begin together
    without = run(core, [plain(1, drawn), plain(2, long), plain(3, long)]).answers
    beside = run(core, [plain(1, drawn), *others]).answers
    assert beside[1] == without[1]
    assert beside[2].tokens != without[2].tokens


@DEPTHS
def test_a_request_goes_on_from_any_checkpoint(depth: int) -> None:
    core, bounded = guided_core(depth), regex("[a-z]{12}(red|blue){2}é[0-9]{3}")
    whole = answer(core, request(4, bounded))
    assert whole.finish is Finish.STOP
    for done in range(len(whole.tokens)):
        one = request(4, bounded)
        one.output_token_ids = whole.tokens[:done]
        rest = answer(core, one)
        assert (rest.tokens, rest.finish) == (whole.tokens[done:], Finish.STOP)
    one = request(4, bounded)
    one.output_token_ids = whole.tokens
    assert answer(core, one) == Answer(finish=Finish.STOP)
    one.output_token_ids = [token("X")]
    assert "does not follow its grammar" in answer(core, one).error


def test_choices_of_one_request_differ_and_all_follow_the_grammar() -> None:
    requests = [request(number, regex("[a-z]{6}"), SamplingParams(40, seed=5, choice=number)) for number in range(6)]
    for one in requests:
        one.prompt_token_ids = [1, 2, 3]
    texts = [written(got) for got in run(guided_core(1), requests).answers.values()]
    assert all(len(text) == 6 and text.isalpha() and text.islower() for text in texts)
    assert len(set(texts)) > 3


def test_log_probabilities_are_the_models_own() -> None:
    sampling = msgspec.structs.replace(GREEDY, logprobs=5, max_tokens=1)
    free = answer(guided_core(), plain(5, sampling)).logprobs[0]
    guided = answer(guided_core(), request(5, choice("red", "blue"), sampling)).logprobs[0]
    assert guided.token_ids[1:] == free.token_ids[1:]
    assert guided.logprobs[1:] == free.logprobs[1:]
    assert guided.token_ids[0] != free.token_ids[0]
    assert guided.rank > 1


@DEPTHS
def test_stop_tokens_wait_for_the_grammar_and_for_min_tokens(depth: int) -> None:
    core = guided_core(depth)
    biased = msgspec.structs.replace(GREEDY, logit_bias=((END, 100.0),))
    got = answer(core, request(1, regex("[a-z]{3,}"), biased))
    assert len(written(got)) >= 3
    assert got.tokens[-1] == END
    assert not Prefixes(regex("[a-z]{3,}")).is_whole(bytes_of(got.tokens[:-2]))
    later = answer(core, request(1, regex("[a-z]{3,}"), msgspec.structs.replace(biased, min_tokens=9)))
    assert later.tokens.index(END) == 9


@DEPTHS
def test_bias_and_allowed_tokens_choose_among_what_the_grammar_allows(depth: int) -> None:
    core = guided_core(depth)
    letters = tuple(token(letter) for letter in "gren")
    for text in ("red", "green"):
        biased = msgspec.structs.replace(GREEDY, logit_bias=((letters[text == "red"], 60.0), (token("e"), 90.0)))
        got = answer(core, request(1, choice("red", "green"), biased))
        assert written(got) == text.encode()
        assert token("e") in got.tokens
    only = msgspec.structs.replace(GREEDY, allowed_token_ids=(token("gr"), token("ee"), token("n")))
    assert answer(core, request(1, choice("red", "green"), only)).tokens == [token("gr"), token("ee"), token("n")]


@DEPTHS
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_limits_that_leave_no_token_end_the_request_with_a_sentence(depth: int, temperature: float) -> None:
    contradictions = [
        SamplingParams(40, temperature=temperature, allowed_token_ids=(token("x"), token("y"))),
        SamplingParams(40, temperature=temperature, bad_words=tuple((one,) for one in map(token, ("r", "re", "red")))),
        SamplingParams(40, temperature=temperature, allowed_token_ids=(token(" "),), top_p=0.5, top_k=5),
    ]
    requests = [request(number, choice("red"), sampling) for number, sampling in enumerate(contradictions)]
    got = run(guided_core(depth), [*requests, plain(9)]).answers
    for number in range(3):
        assert got[number].tokens == []
        assert got[number].finish is Finish.INVALID
        assert "no token is left to go on with" in got[number].error
    assert got[9].tokens == answer(guided_core(), plain(9)).tokens


@DEPTHS
def test_a_grammar_that_no_token_can_follow_ends_the_request_with_a_sentence(depth: int) -> None:
    """And not as if the answer were whole."""
    requests = [request(1, choice("red\x01")), request(2, choice("\x01")), request(3, choice("blue")), plain(9)]
    got = run(guided_core(depth), requests).answers
    assert [written(got[number]) for number in (1, 2, 3)] == [b"red", b"", b"blue"]
    assert [got[number].finish for number in (1, 2, 3)] == [Finish.INVALID, Finish.INVALID, Finish.STOP]
    dead_end = "the output's grammar cannot be followed: no token can come {}, and the text may not end there"
    assert [got[number].error for number in (1, 2)] == [dead_end.format("after 'red'"), dead_end.format("first")]
    assert got[9] == answer(guided_core(), plain(9))


@DEPTHS
def test_the_grammar_begins_behind_the_reasoning(depth: int) -> None:
    core = guided_core(depth)
    end = token("</think>")
    late = msgspec.structs.replace(GREEDY, temperature=1.0, seed=3, logit_bias=((end, 3.0),), max_tokens=100)
    one = request(2, choice("red", "blue"), late, reasoning_end="</think>", in_reasoning=True)
    got = answer(core, one)
    reasoning, _, rest = written(got).partition(b"</think>")
    assert len(reasoning) > 3
    assert rest in (b"red", b"blue")
    assert got.finish is Finish.STOP
    assert reasoning == written(answer(core, plain(2, late))).partition(b"</think>")[0]


@DEPTHS
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_used_up_budget_ends_the_reasoning(depth: int, budget: int) -> None:
    core = guided_core(depth)
    one = request(2, choice("red", "blue"), reasoning_end="</end>", in_reasoning=True, reasoning_budget=budget)
    got = answer(core, one)
    marker = [token("</"), *map(token, "end>")]
    assert got.tokens[budget : budget + len(marker)] == marker
    assert got.tokens[:budget] == answer(core, plain(2)).tokens[:budget]
    assert bytes_of(got.tokens[budget + len(marker) :]) in (b"red", b"blue")
    for done in range(len(got.tokens)):
        resumed = msgspec.structs.replace(one, output_token_ids=got.tokens[:done])
        assert answer(core, resumed).tokens == got.tokens[done:]


@DEPTHS
def test_a_budget_without_a_grammar_leaves_what_follows_free(depth: int) -> None:
    core = guided_core(depth)
    one = request(2, "", reasoning_end="</think>", in_reasoning=True, reasoning_budget=2)
    got = answer(core, one)
    assert got.tokens[2] == token("</think>")
    free = msgspec.structs.replace(plain(2), output_token_ids=got.tokens[:3])
    assert got.tokens[3:] == answer(core, free).tokens


def test_a_guide_without_a_vocabulary_is_refused() -> None:
    got = answer(make_core("llama", depth=0), request(1, PERSON))
    assert got.finish is Finish.ERROR
    assert "needs the vocabulary" in got.error


def test_a_grammar_that_does_not_compile_is_refused() -> None:
    got = answer(guided_core(), request(1, json.dumps({"grammars": [{"lark_grammar": "start: nothing"}]})))
    assert got.finish is Finish.INVALID
    assert got.error.startswith("the output's grammar cannot be compiled: ")
    assert answer(guided_core(), request(2, "{")).error.startswith("the output's grammar cannot be compiled: ")


class FailingDraw:
    """Has the sampler run out of memory in those steps of several rows for which `fails` says so,
    when the masks are made.
    """

    def __init__(self, core: EngineCore, fails: Iterator[bool]) -> None:
        self.failed = 0
        self._fails = fails
        sampler = core._executor.runner.sampler
        self._sample, sampler.sample = sampler.sample, self._failing  # type: ignore[method-assign]

    def _failing(self, logits: torch.Tensor, *others: Any) -> Any:
        if len(logits) > 1 and next(self._fails):
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self._sample(logits, *others)


@pytest.mark.usefixtures("crowded")
@DEPTHS
def test_a_step_that_is_taken_back_changes_no_token(depth: int) -> None:
    """Also one during whose launch, one step ahead, requests of the step before have ended."""
    taken_back(depth, 3)


@pytest.mark.usefixtures("crowded")
@pytest.mark.proof
@DEPTHS
def test_many_steps_that_are_taken_back_change_no_token(depth: int) -> None:
    for seed in range(100, 110):
        taken_back(depth, seed)


def test_requests_that_end_while_a_step_is_taken_back_leave_nothing_behind() -> None:
    core = guided_core(1)
    requests = [request(number, choice("red", "blue"), ONE_TOKEN) for number in (1, 2)]
    run(core, requests)  # from now on their guides are there at once, so that both begin together
    failing = FailingDraw(core, chain([False, True], repeat(False)))
    got = run(core, requests).answers
    assert failing.failed == 1
    assert {written(one) for one in got.values()} <= {b"red", b"blue"}
    assert {one.finish for one in got.values()} == {Finish.STOP}


def taken_back(depth: int, seed: int) -> None:
    print(f"seed {seed}, depth {depth}")
    requests = [request(number, GRAMMARS[number % 3]) for number in range(12)] + [plain(20), plain(21)]
    expected = run(guided_core(), requests).answers
    core = guided_core(depth, num_blocks=12, max_num_batched_tokens=24)
    chance = random.Random(seed)
    failing = FailingDraw(core, iter(lambda: chance.random() < 0.3, None))
    assert run(core, requests).answers == expected
    assert failing.failed > 0


def in_a_batch(seed: int, depth: int) -> int:
    """Return how often a request was preempted."""
    print(f"seed {seed}, depth {depth}")
    draw = random.Random(seed)
    cases = random_cases(draw, 16, 30, 60)
    for case in cases:
        grammar = draw.choice([*GRAMMARS, regex("[ -~]*"), ""])
        end, budget, begin = draw.choice(
            [("", -1, ""), ("</think>", 4, ""), ("e", -1, ""), ("e", 4, "<"), ("e", -1, "re")]
        )
        case.request.guide = OutputGuide(grammar, end, bool(end), budget, begin)
        case.request.output_token_ids = case.request.output_token_ids if grammar == regex("[ -~]*") else []
    alone = guided_core(enable_prefix_caching=False)
    core = guided_core(depth, num_blocks=9, max_num_seqs=6, max_num_batched_tokens=40)
    got, preemptions = drive(core, cases)
    assert {finish for _, finish in got.values()} >= {Finish.STOP, Finish.LENGTH}
    assert_own_answers(got, cases, alone)
    return preemptions


@pytest.mark.usefixtures("crowded")
@AHEAD
def test_random_batches_change_no_token(depth: int) -> None:
    # How many wait beside each other depends on how soon their guides are made
    assert sum(in_a_batch(seed, depth) for seed in (7, 9, 11)) > 0


@pytest.mark.usefixtures("crowded")
@pytest.mark.proof
@DEPTHS
def test_much_random_batches_change_no_token(depth: int) -> None:
    for seed in range(100, 110):
        in_a_batch(seed, depth)


@needs_interpreter
@pytest.mark.proof
def test_a_gpus_path_draws_under_the_same_masks() -> None:
    """Padded decode steps up to the hidden states, kernels that mask and draw, rows without a
    token to draw.
    """
    settings = {"max_model_len": 40, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    short = msgspec.structs.replace(GREEDY, max_tokens=6)
    drawn = msgspec.structs.replace(short, temperature=0.9, top_k=20, top_p=0.9, seed=2)
    requests = [
        request(0, GRAMMARS[0], short),
        request(1, GRAMMARS[1], drawn),
        request(2, PERSON, short),
        plain(3, drawn),
    ]
    for number, temperature in ((4, 0.0), (5, 0.8)):
        nothing = msgspec.structs.replace(short, temperature=temperature, allowed_token_ids=(token("x"),))
        requests.append(request(number, choice("red"), nothing))
    core = one_layer(guided_core(1, INTERPRETER, **settings))
    core._executor.runner.use_graphs(recorded)
    got = run(core, requests).answers
    expected = run(one_layer(guided_core(0, **settings)), requests).answers
    assert got == expected
    assert {got[number].finish for number in (4, 5)} == {Finish.INVALID}
