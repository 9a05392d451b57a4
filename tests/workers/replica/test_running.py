"""Requests of several choices: what is published, what the next worker makes of it, and the result;
over a real queue, without a model.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.protocol.output_format import OutputFormat
from jobs.protocol.requests import Claim, Delta, Finished, Request, RequestKey, StreamEntry, TokenChunk
from jobs.protocol.validation import parse_call
from jobs.queue.request_queue import Queue
from jobs.queue.streams import ControlMessage
from tests.support.requests import read_api
from tests.support.scripted_engine import CACHED_TOKENS, DEVICE_SECONDS, ScriptedEngine
from workers.engine.messages.core import Finish, OutputGuide, SamplingParams
from workers.replica.draining import hopeless
from workers.replica.grammars import Grammars
from workers.replica.prepared import PreparedRequest, Prompt
from workers.replica.running import Running
from workers.settings import DEMO_MODEL
from workers.text.detokenizer import Detokenizer
from workers.text.errors import FormatError
from workers.text.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer.load(DEMO_MODEL)
PROMPTS = TOKENIZER.encode(["Say something:", "And then?"], special_tokens=False)
TOKENS = TOKENIZER.encode(["Naïve 🙂 words, 東京 and 12 + 30 = 42; then STOP here and more."], special_tokens=False)[0]
STOP_TOKEN = 5


def script(prompt: list[int], sampling: SamplingParams) -> list[int]:
    """Tokens of a choice: all of the text for the first one, and of others a different part, which
    a stop token ends.
    """
    start = sampling.choice % 7 * 3
    return (TOKENS[start:] + ([STOP_TOKEN] if start else [])) * 20


class HeldCompiler:
    """Compiles when the test says so."""

    def __init__(self) -> None:
        self.asked: list[OutputFormat] = []
        self.waiting: list[asyncio.Future[str]] = []

    async def compile(self, wanted: OutputFormat) -> str:
        self.asked.append(wanted)
        self.waiting.append(asyncio.get_running_loop().create_future())
        return await self.waiting[-1]


class Bench:
    """A worker's middle: requests come from the queue and go back there; the engine is scripted,
    and time is what the test says.
    """

    def __init__(self, queue: Queue, worker: str = "w1") -> None:
        self.queue = queue
        self.worker = worker
        self.engine = ScriptedEngine(script)
        self.compiler = HeldCompiler()
        self.running = Running(self.engine, self, Grammars(self.compiler), lambda: self.now, 2.0)
        self.now = 100.0
        self.results: list[Finished] = []
        self.woken: list[bool] = []
        self.live_woken = 0
        self._seq = 0

    def accept(self, delta: Delta) -> None:
        assert self.queue.publish(self.worker, [delta]) == []

    def finish(self, finished: Finished) -> None:
        self.results.append(finished)
        self.queue.commit(self.worker, [finished])

    def tokens_wait(self, first: bool) -> None:
        self.woken.append(first)

    def live_tokens_wait(self) -> None:
        self.live_woken += 1

    def claim(self) -> None:
        self._seq += 1
        self.running.start([prepare(claim) for claim in self.queue.claim(self.worker, self._seq, 10, models=["demo"])])

    def step(self, counts: Callable[[Any], int] = lambda request: 1) -> None:
        self.running.on_step(self.engine.step(counts))

    def publish(self) -> list[Delta]:
        """What is due now."""
        deltas = self.due(live_only=False)
        assert self.queue.publish(self.worker, deltas) == []
        return deltas

    def due(self, live_only: bool) -> list[Delta]:
        return [delta for group in self.running.due(live_only) for delta in group]

    def leave(self) -> None:
        """Its requests go to the next worker that claims; what was not published is lost."""
        self.queue.requeue(self.worker, self.running.drop(self.running.keys()))


def prepare(claim: Claim) -> PreparedRequest:
    call = parse_call(claim.request.endpoint, json.loads(claim.request.body))
    assert call.max_tokens is not None
    sampling = SamplingParams(
        max_tokens=call.max_tokens,
        stop_token_ids=(STOP_TOKEN,),
        logprobs=0
        if call.logprobs is None and call.best_of > call.n
        else -1
        if call.logprobs is None
        else call.logprobs,
        prompt_logprobs=(call.logprobs if call.echo else None)
        or (-1 if call.prompt_logprobs is None else call.prompt_logprobs),
    )
    prompts = [
        Prompt(ids, sampling, TOKENIZER.decode(ids) if call.echo else "")
        for ids in call.prompts
        if isinstance(ids, list)
    ]
    return PreparedRequest(claim, call, prompts, TOKENIZER)


def submit(queue: Queue, name: str, **body: Any) -> RequestKey:
    """A live call; the API process is called like it."""
    raw = json.dumps({"model": "demo", "prompt": PROMPTS[0], "max_tokens": 40, **body}).encode()
    queue.submit(f"live_{name}", Request("/v1/completions", "demo", raw, seed=1, reply_to=name))
    return RequestKey(f"live_{name}", 0)


def run_to_the_end(bench: Bench) -> dict[str, Any]:
    while not bench.results:
        bench.step()
    return answer(bench)


def answer(bench: Bench) -> dict[str, Any]:
    """The body without what differs from answer to answer."""
    body: dict[str, Any] = json.loads(bench.results[-1].result.body)
    return {**body, "id": None, "created": None}


def stream(queue: Queue, name: str) -> list[StreamEntry]:
    """What the API process received."""
    return [entry for _, entry in read_api(queue, name)]


def pieces(entries: list[StreamEntry], choice: int) -> list[TokenChunk]:
    return [chunk for entry in entries for chunk in entry.chunks if chunk.choice == choice]


BODIES: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"n": 3, "logprobs": 2, "stream": True, "echo": True},
    {"n": 2, "logprobs": 1, "stop": ["STOP", "東"]},
    {"prompt": PROMPTS, "n": 2, "best_of": 3, "stop": ["12"]},
    {"prompt": PROMPTS, "n": 1, "max_tokens": 9, "prompt_logprobs": 1},
    {"prompt": PROMPTS, "n": 2, "max_tokens": 0, "logprobs": 1, "echo": True},
]


@pytest.mark.parametrize("body", BODIES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_every_choice_goes_on_elsewhere_as_if_nothing_had_happened(
    queue: Queue, body: dict[str, Any], seed: int
) -> None:
    print("seed", seed)
    chance = random.Random(seed)
    bench = Bench(queue, "undisturbed")
    submit(queue, "whole", **body)
    bench.claim()
    expected = run_to_the_end(bench)
    submit(queue, "moved", **body)
    published = workers = 0
    while True:
        workers += 1
        bench = Bench(queue, f"w{workers}")
        bench.claim()
        for _ in range(chance.randrange(1, 20)):
            if bench.results:
                break
            bench.step(lambda request: chance.randrange(3))
            if chance.random() < 0.4:
                published = max(published, *(delta.total for delta in bench.publish()), 0)
        if bench.results:
            break
        bench.leave()
    print(workers, "workers")
    assert answer(bench) == expected
    entries = stream(queue, "moved")
    assert entries[-1].result == bench.results[-1].result
    texts = []
    for choice in range(len(expected["choices"])):
        chunks = pieces(entries, choice)
        at = characters = 0
        for chunk in chunks:
            assert (chunk.index, chunk.text_offset) == (at, characters)
            at, characters = at + len(chunk.token_ids), characters + len(chunk.text)
            assert (
                chunk.logprobs is None or [position.chosen.token_id for position in chunk.logprobs] == chunk.token_ids
            )
        texts.append("".join(chunk.text for chunk in chunks))
        if body.get("echo") and body.get("stream"):
            prompts = [position.chosen.token_id for chunk in chunks for position in chunk.prompt_logprobs or []]
            assert prompts == PROMPTS[choice // body["n"]]
    if body.get("best_of", 1) <= body.get("n", 1):
        assert texts == [choice["text"] for choice in expected["choices"]]


def tokens_of(choice: int) -> list[int]:
    """The output of a choice that may have 40 tokens."""
    tokens = script([], SamplingParams(40, choice=choice))[:40]
    return tokens[: tokens.index(STOP_TOKEN) + 1] if STOP_TOKEN in tokens else tokens


def begun(queue: Queue, steps: int = 3, **body: Any) -> Bench:
    bench = Bench(queue)
    submit(queue, "a", **body)
    bench.claim()
    for _ in range(steps):
        bench.step()
    return bench


def test_a_prompt_is_computed_once_for_all_its_choices(queue: Queue) -> None:
    bench = begun(queue, 0, prompt=PROMPTS, n=3, prompt_logprobs=2, priority=-4)
    assert {(request.priority, request.live) for request in bench.engine.added} == {(-4, True)}
    assert [request.sampling.choice for request in bench.engine.added] == [0, 3]
    assert bench.running.num_sequences == 6
    bench.step(lambda request: request.sampling.choice == 3)
    assert [request.sampling.choice for request in bench.engine.added] == [0, 3, 4, 5]
    bench.step()
    assert [request.sampling.choice for request in bench.engine.added] == [0, 3, 4, 5, 1, 2]
    assert [request.sampling.prompt_logprobs for request in bench.engine.added] == [2, 2, -1, -1, -1, -1]
    run_to_the_end(bench)
    result = bench.results[0].result
    assert result.usage.prompt_tokens == sum(map(len, PROMPTS))
    assert result.usage.completion_tokens == sum(len(tokens_of(choice)) for choice in range(6))
    assert result.usage.cached_tokens == 2 * CACHED_TOKENS
    choices = answer(bench)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [
        len(prompt) for prompt in PROMPTS for _ in range(3)
    ]
    assert {choice["finish_reason"] for choice in choices} == {"length", "stop"}


def test_the_best_come_first_and_the_others_not_at_all(queue: Queue) -> None:
    bench = begun(queue, n=2, best_of=4)
    whole = run_to_the_end(bench)
    means = [sum(-token + choice / 100 for token in tokens_of(choice)) / len(tokens_of(choice)) for choice in range(4)]
    submit(queue, "b", n=4)
    bench.claim()
    bench.results.clear()
    every = run_to_the_end(bench)
    best = sorted(range(4), key=lambda choice: -means[choice])[:2]
    assert [choice["text"] for choice in whole["choices"]] == [every["choices"][choice]["text"] for choice in best]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert whole["choices"][0]["logprobs"] is None
    assert whole["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]


def test_one_choice_that_fails_ends_the_request_and_leaves_nothing_behind(queue: Queue) -> None:
    bench = begun(queue, n=4)
    request_id = list(bench.engine.running)[2]
    bench.engine.failing[request_id] = "It cannot be."
    bench.step()
    result = bench.results[0].result
    assert (result.status, json.loads(result.body)["error"]["message"]) == (500, "It cannot be.")
    assert bench.running.num_sequences == len(bench.engine.running) == 0
    assert bench.running.failed == 1


class BrokenTokenizer(TextTokenizer):
    """Fails on one token."""

    def __init__(self) -> None:
        self.__dict__.update(TOKENIZER.__dict__)

    def detokenizer(
        self, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True, after_text: bool = False
    ) -> Detokenizer:
        raised = super().detokenizer(prompt_token_ids, skip_special_tokens, after_text)
        feed = raised.feed
        return SimpleNamespace(
            feed=lambda token_ids: feed(token_ids) if TOKENS[5] not in token_ids else 1 / 0, finish=raised.finish
        )


@pytest.mark.parametrize("body", [{}, {"stop": ["never"]}, {"max_tokens": 6}], ids=str)
def test_an_unforeseen_error_ends_one_request_alone(queue: Queue, body: dict[str, Any]) -> None:
    """At a step, when its tokens are due, or at its end."""
    bench = Bench(queue)
    submit(queue, "bad", n=2, **body)
    submit(queue, "good")
    bad, good = (prepare(claim) for claim in queue.claim("w1", 1, 10, models=["demo"]))
    bad.tokenizer = BrokenTokenizer()
    bench.running.start([bad, good])
    while not bench.results:
        bench.step()
        if body != {"max_tokens": 6}:
            bench.publish()
    assert (bench.results[0].key.batch, bench.results[0].result.status) == ("live_bad", 500)
    bench.step()
    assert bench.running.num_sequences == len(bench.engine.running) == 1
    while len(bench.results) < 2:
        bench.step()
    assert (bench.results[1].key.batch, bench.results[1].result.status) == ("live_good", 200)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_cancelled_request_leaves_nothing_in_the_engine(queue: Queue, steps: int) -> None:
    bench = begun(queue, steps, n=4)
    claim = bench.running.drop(bench.running.keys())
    assert [key for key, _ in claim] == [RequestKey("live_a", 0)]
    bench.step()
    assert bench.running.num_sequences == len(bench.engine.running) == len(bench.results) == 0


def test_a_stop_string_takes_its_choice_out_of_the_engine(queue: Queue) -> None:
    bench = begun(queue, 0, n=2, stop=["words"])
    while bench.running.num_sequences == 2:
        bench.step()
    assert len(bench.engine.running) == 1
    assert [choice["stop_reason"] for choice in run_to_the_end(bench)["choices"]] == ["words", "words"]
    assert len(bench.engine.running) == 0


@pytest.mark.parametrize("body", [{"n": 3}, {"n": 2, "stop": ["STOP", "東"]}, {"prompt": PROMPTS, "max_tokens": 2}])
def test_the_device_seconds_of_all_choices_are_those_of_the_result(queue: Queue, body: dict[str, Any]) -> None:
    bench = Bench(queue)
    submit(queue, "a", **body)
    bench.claim()
    choices = len(run_to_the_end(bench)["choices"])
    assert bench.results[0].result.usage.device_microseconds == 1e6 * choices * DEVICE_SECONDS


def test_what_has_not_begun_is_listed_apart(queue: Queue) -> None:
    bench = begun(queue, 1, n=2)
    submit(queue, "b", n=2)
    bench.claim()
    assert [key.batch for key, _ in bench.running.drop_unstarted()] == ["live_b"]
    assert bench.running.tokens_left() == {RequestKey("live_a", 0): 40}
    bench.step()
    bench.step()
    assert bench.running.tokens_left() == {RequestKey("live_a", 0): 38}
    assert hopeless({RequestKey("live_a", 0): 39}, bench.running.tokens_left(), 1.0) == []
    assert bench.running.lose([(RequestKey("live_a", 0), 1)]) == 0
    assert len(bench.running.keys()) == 1


def test_a_lease_that_is_lost_twice_in_one_delivery_is_lost_once(queue: Queue) -> None:
    """Its first message and its tokens may go together."""
    bench = begun(queue)
    [delta] = bench.publish()
    held = delta.key, delta.fence
    assert bench.running.lose([held, held]) == 1
    assert bench.running.keys() == []


def test_tokens_of_a_live_call_are_to_be_sent_at_each_step(queue: Queue) -> None:
    bench = begun(queue, 1, n=2)
    assert (bench.live_woken, bench.woken) == (1, [])
    while bench.running.num_sequences == 2:  # the end of a choice is news too while another goes on
        woken = bench.live_woken
        bench.step()
        assert bench.live_woken == woken + 1


def test_watchers_of_a_batch_are_woken_at_the_first_token(queue: Queue) -> None:
    """While live calls run, these wait longer than those."""
    bench = begun(queue, 0)
    assert queue.create_batch("batch_a", 1, state="in_progress")
    body = json.dumps({"model": "demo", "prompt": PROMPTS[0], "max_tokens": 30}).encode()
    queue.ingest("batch_a", [(0, Request("/v1/completions", "demo", body, seed=1))], 0, 1)
    queue.watch("batch_a", 60)
    bench.claim()
    bench.step()
    assert bench.woken == [True]
    assert len(bench.publish()) == 2
    bench.step()
    assert (bench.woken, bench.live_woken) == ([True, False], 2)
    assert [delta.key.live for delta in bench.due(live_only=True)] == [True]
    assert [delta.key.live for delta in bench.due(live_only=False)] == [False]
    bench.running.watch(ControlMessage("0-1", "watch", batch="batch_a", seconds=10))
    assert bench.woken == [True, False, True]


def metric(bench: Bench, name: str) -> dict[str, Any]:
    """Its samples by label: a number; or of a histogram the sum and how much was observed."""
    (found,) = (one for one in bench.running.metrics.all() if one.name == f"vllm:{name}")
    return {
        label: value if not counts else (round(value, 6), sum(counts[0]))
        for label, value, *counts in found.samples()
        if value or (counts and sum(counts[0]))
    }


def test_times_are_from_the_arrival_and_between_tokens(queue: Queue) -> None:
    """A choice that a step leaves out gets its next token later; the others are not affected."""
    bench = begun(queue, 0, n=3, max_tokens=4)
    bench.now += 5
    bench.step()  # the first choice, which computes the prompt
    bench.now += 2
    bench.step()
    bench.now += 1
    bench.step(lambda request: request.sampling.choice != 1)
    bench.now += 0.5
    run_to_the_end(bench)
    assert metric(bench, "time_to_first_token_seconds") == {"live": (5 + 7 + 7, 3)}
    assert metric(bench, "inter_token_latency_seconds") == {"": (2 + 1 + 0.5 + 1 + 0.5 + 0 + 1.5, 9)}
    assert metric(bench, "e2e_request_latency_seconds") == {"live": (3 * 8.5, 3)}
    assert metric(bench, "generation_tokens") == {"": 12}
    assert metric(bench, "request_generation_tokens") == {"": (12, 3)}
    assert metric(bench, "prompt_tokens") == {"": 3 * len(PROMPTS[0])}
    assert metric(bench, "prompt_tokens_cached") == {"": 3 * CACHED_TOKENS}
    assert metric(bench, "request_success") == {"length": 3}


def test_the_api_says_when_a_live_call_arrived(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is ahead of the worker's takes nothing off."""
    bench = Bench(queue)
    raw = json.dumps({"model": "demo", "prompt": PROMPTS[0], "max_tokens": 1}).encode()
    monkeypatch.setattr("time.time", lambda: 1000.0)
    for name, created in (("a", 990.0), ("b", 1030.0)):
        queue.submit(f"live_{name}", Request("/v1/completions", "demo", raw, seed=1, created=created))
    bench.claim()
    assert sorted(request.arrived for request in bench.engine.added) == [90.0, 100.0]
    bench.now += 1
    bench.step()
    assert metric(bench, "time_to_first_token_seconds") == {"live": (11 + 1, 2)}


def test_what_an_earlier_worker_began_has_its_first_token(queue: Queue) -> None:
    first = begun(queue, 3)
    first.publish()
    first.leave()
    assert metric(first, "request_success") == {}
    second = Bench(queue, "w2")
    second.claim()
    assert [request.arrived for request in (*first.engine.added, *second.engine.added)] == [100.0, 0.0]
    run_to_the_end(second)
    assert metric(second, "time_to_first_token_seconds") == {}
    assert metric(second, "request_generation_tokens") == {"": (40, 1)}
    assert metric(second, "generation_tokens") == {"": 37}
    assert metric(second, "prompt_tokens") == {}
    assert metric(second, "inter_token_latency_seconds") == {"": (0, 36)}


def test_what_a_worker_publishes_first_continues_nothing_of_its_own(queue: Queue) -> None:
    first = begun(queue, 3)
    [begin] = first.publish()
    first.step()
    [more] = first.publish()
    first.leave()
    second = Bench(queue, "w2")
    second.claim()
    second.step()
    [resumed] = second.publish()
    second.step()
    [last] = second.publish()
    assert [delta.continues for delta in (begin, more, resumed, last)] == [False, True, False, True]


def test_failures_and_cancels_are_ends_too(queue: Queue) -> None:
    bench = begun(queue, n=4)
    bench.engine.failing[next(iter(bench.engine.running))] = "It cannot be."
    bench.step()
    key = submit(queue, "b", n=2)
    bench.claim()
    bench.step()
    bench.running.cancel(ControlMessage("1-0", "cancel", [key]))
    assert metric(bench, "request_success") == {"error": 4, "abort": 2}
    assert bench.running.metrics.errors.values == {"engine_error": 1}


@pytest.mark.parametrize(
    ("dtype", "advice"), [("float16", "serve it with --dtype float32."), ("float32", "its weights may be damaged.")]
)
def test_numbers_that_are_not_finite_are_an_error_of_the_model(queue: Queue, dtype: str, advice: str) -> None:
    bench = begun(queue, n=2)
    bench.engine.info.dtype, bench.engine.failure = dtype, Finish.NOT_FINITE
    bench.engine.failing[next(iter(bench.engine.running))] = "the logits for token 3 of the output"
    bench.step()
    [finished] = bench.results
    error = json.loads(finished.result.body)["error"]
    assert (finished.result.status, error["type"], error["code"]) == (500, "server_error", "not_finite")
    assert error["message"] == (
        f"The model 'demo' failed: the logits for token 3 of the output are not finite, computed in {dtype}; {advice}"
    )
    assert bench.running.metrics.errors.values == {"not_finite": 1}
    assert not bench.running.any()


WANTED = OutputFormat("regex", "[a-z]+", param="structured_outputs.regex")


def guided(claims: Sequence[Claim]) -> list[PreparedRequest]:
    prepared = [prepare(claim) for claim in claims]
    for item in prepared:
        item.output_format = WANTED
    return prepared


async def settled() -> None:
    """Return when everything has run that could."""
    for _ in range(10):
        await asyncio.sleep(0)


def entries(queue: Queue, name: str) -> list[tuple[bool, bool]]:
    """Of what the API process received: whether it says accepted, whether it is the result."""
    return [(entry.accepted, entry.result is not None) for entry in stream(queue, name)]


def test_a_request_waits_for_its_grammar_and_holds_up_no_other(queue: Queue) -> None:
    async def whole() -> None:
        bench = Bench(queue)
        submit(queue, "guided", n=3)
        bench.running.start(guided(queue.claim("w1", 1, 10, models=["demo"])))
        submit(queue, "plain")
        bench.running.start([prepare(claim) for claim in queue.claim("w1", 2, 10, models=["demo"])])
        await settled()
        assert [request.guide for request in bench.engine.added] == [None]
        assert (entries(queue, "guided"), entries(queue, "plain")) == ([], [(True, False)])
        assert bench.running.load.live == 4
        assert (len(bench.running.keys()), len(bench.running.keys_in_engine())) == (2, 1)
        bench.compiler.waiting[0].set_result("a grammar")
        await settled()
        assert entries(queue, "guided") == [(True, False)]
        while len(bench.results) < 2:
            bench.step()
        guides = [request.guide for request in bench.engine.added[1:]]
        assert guides == [OutputGuide(grammar="a grammar")] * 3
        submit(queue, "again")
        before = len(bench.engine.added)
        bench.running.start(guided(queue.claim("w1", 3, 10, models=["demo"])))
        assert len(bench.engine.added) == before + 1, "a grammar that is known costs no turn of the loop"
        assert len(bench.compiler.asked) == 1

    asyncio.run(whole())


def test_a_request_without_a_grammar_ends_before_it_is_accepted(queue: Queue) -> None:
    async def whole() -> None:
        bench, made = Bench(queue), []
        bench.running.room_made = lambda: made.append(True)
        submit(queue, "bad", n=2)
        bench.running.start(guided(queue.claim("w1", 1, 10, models=["demo"])))
        await settled()
        bench.compiler.waiting[0].set_exception(FormatError("It is wrong."))
        await settled()
        assert entries(queue, "bad") == [(False, True)]
        assert (bench.engine.added, bench.running.any(), made) == ([], False, [True])
        error = json.loads(bench.results[0].result.body)["error"]
        assert (bench.results[0].result.status, error["param"]) == (400, "structured_outputs.regex")
        submit(queue, "again")
        bench.running.start(guided(queue.claim("w1", 2, 10, models=["demo"])))
        assert entries(queue, "again") == [(False, True)]

    asyncio.run(whole())


@pytest.mark.parametrize("way", ["cancel", "lose", "drop", "drop_unstarted", "twice"])
def test_a_request_may_go_before_its_grammar_comes(queue: Queue, way: str) -> None:
    async def whole() -> None:
        bench = Bench(queue)
        key = submit(queue, "guided")
        prepared = guided(queue.claim("w1", 1, 10, models=["demo"]))
        bench.running.start(prepared)
        await settled()
        held = [(key, prepared[0].claim.fence)]
        if way == "cancel":
            assert bench.running.cancel(ControlMessage("1-0", "cancel", [key])) == held
        elif way == "lose":
            assert bench.running.lose(held) == 1
        elif way == "twice":
            bench.running.start(prepared)
        else:
            assert (bench.running.drop([key]) if way == "drop" else bench.running.drop_unstarted()) == held
        await settled()
        bench.compiler.waiting[0].set_result("a grammar")
        await settled()
        again = way == "twice"
        assert (len(bench.engine.added), bench.running.any(), bench.results) == (again, again, [])
        assert bench.running.keys_in_engine() == ([key] if again else [])

    asyncio.run(whole())


def test_what_goes_on_elsewhere_has_its_grammar_again(queue: Queue) -> None:
    async def whole() -> None:
        bench = Bench(queue)
        submit(queue, "guided", n=2)
        for worker in ("w1", "w2"):
            bench = Bench(queue, worker)
            bench.running.start(guided(queue.claim(worker, 1, 10, models=["demo"])))
            await settled()
            bench.compiler.waiting[0].set_result("a grammar")
            await settled()
            for _ in range(5):
                bench.step()
            bench.publish()
            assert [request.guide for request in bench.engine.added] == [OutputGuide(grammar="a grammar")] * 2
            if worker == "w1":
                bench.leave()
        assert all(request.output_token_ids for request in bench.engine.added)

    asyncio.run(whole())
