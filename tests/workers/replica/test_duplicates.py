"""Identical lines of a batch: one is computed, all are answered, and whatever becomes of the one
that runs, no other is lost; over a real queue, without a model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.output_format import OutputFormat
from jobs.protocol.requests import Claim, Delta, Finished, Request, RequestKey
from jobs.protocol.results import ApiError
from jobs.queue.request_queue import Queue
from jobs.queue.streams import FIRST_ID, ControlMessage
from tests.support.scripted_engine import DEVICE_SECONDS, ScriptedEngine
from workers.engine.messages.core import EngineRequest, SamplingParams
from workers.replica import duplicates
from workers.replica.answer_parsers import AnswerParsers
from workers.replica.duplicates import Digest, digest_of, prepare_once
from workers.replica.grammars import Grammars
from workers.replica.preparation import Preparation
from workers.replica.prepared import PreparedRequest
from workers.replica.running import Running
from workers.replica.sampling_params import ModelLimits
from workers.settings import DEMO_MODEL
from workers.text.errors import FormatError
from workers.text.parsers.registry import find_tool_parser
from workers.text.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer.load(DEMO_MODEL)
END = TOKENIZER.eos_token_id or 0
PREPARATION = Preparation(
    TOKENIZER, ["demo"], ModelLimits(2048, 1024), AnswerParsers(find_tool_parser("hermes")), retries=2
)
TEXT = "Naïve 🙂 words, 東京 and 12 + 30 = 42; then STOP here and more."
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"place": "Köln"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
FORM = {"response_format": {"type": "json_object"}}


def body(content: str = "Say something:", **parameters: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 60, **parameters}


def text_body(**parameters: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "Say something:", "temperature": 0, "max_tokens": 60, **parameters}


class Lab:
    """A worker's middle: lines come from the queue and their results go back there; the engine is
    scripted.
    """

    def __init__(self, queue: Queue, *texts: str, worker: str = "w1", suspects: set[Digest] | None = None) -> None:
        """The first choices that run get the first text, those of the next seed the next one."""
        self.queue = queue
        self.worker = worker
        self.texts = [[*TOKENIZER.encode([text], special_tokens=False)[0], END] for text in texts or (TEXT,)]
        self.seeds: list[int] = []
        self.engine = ScriptedEngine(self._script)
        clock = asyncio.get_running_loop().time
        self.running = Running(self.engine, self, Grammars(self), clock, 2.0, suspects=suspects)
        self.results: list[Finished] = []
        self.prepared = 0  # requests that were rendered and tokenized
        self._seq = 0

    def _script(self, _prompt: list[int], sampling: SamplingParams) -> list[int]:
        if sampling.seed not in self.seeds:
            self.seeds.append(sampling.seed)
        return self.texts[min(self.seeds.index(sampling.seed), len(self.texts) - 1)]

    async def compile(self, wanted: OutputFormat) -> str:
        """Take the place of the compiler of grammars."""
        if wanted.source == "never":
            raise FormatError("it cannot be compiled")
        return wanted.source

    def finish(self, finished: Finished) -> None:
        """Take the place of the outbox."""
        self.results.append(finished)
        assert self.queue.commit(self.worker, [finished]) == []

    def accept(self, delta: Delta) -> None:
        assert self.queue.publish(self.worker, [delta]) == []

    def tokens_wait(self, first: bool) -> None:
        """All is published when the test says so."""

    def live_tokens_wait(self) -> None:
        """The same."""

    def publish(self) -> None:
        deltas = [delta for group in self.running.due(live_only=False) for delta in group]
        assert self.queue.publish(self.worker, deltas) == []

    def claim(self, limit: int = 500) -> list[Claim]:
        """Claim, and start what was claimed."""
        self._seq += 1
        claims = self.queue.claim(self.worker, self._seq, limit, models=["demo"])
        prepared, errors = prepare_once(self._prepare, self.running.prepared, None, claims)
        assert errors == []
        self.running.start(prepared)
        return claims

    def _prepare(self, claims: Sequence[Claim]) -> tuple[list[PreparedRequest], list[Finished]]:
        self.prepared += len(claims)
        return PREPARATION.prepare(claims)

    async def run(self) -> None:
        """Step until nothing runs and nothing waits."""
        while self.running.keys():
            self.running.on_step(self.engine.step())
            await asyncio.sleep(0)

    @property
    def computed(self) -> int:
        """How many requests the engine got."""
        return len(self.engine.added)


def submit(
    queue: Queue,
    *bodies: dict[str, Any],
    batch: str = "batch_a",
    endpoint: str = CHAT,
    watched: bool = False,
    created: Sequence[float] = (),
) -> None:
    """A batch of these lines; each has another seed of its own."""
    queue.create_batch(batch, len(bodies), state="in_progress")
    if watched:
        queue.watch(batch, 600)
    lines = [
        (line, Request(endpoint, "demo", json.dumps(one).encode(), seed=line, custom_id=f"c{line}", created=when))
        for line, (one, when) in enumerate(zip(bodies, created or [0.0] * len(bodies), strict=True))
    ]
    for first in range(0, len(lines), 500):
        some = lines[first : first + 500]
        assert queue.ingest(batch, some, first, first + len(some))


def answers(queue: Queue, batch: str = "batch_a") -> list[dict[str, Any]]:
    """What the lines were answered, without what is every answer's own."""
    results = queue.results(batch)
    assert [line for line, _ in results] == list(range(len(results)))
    bodies = [json.loads(result.body) for _, result in results]
    assert len({one["id"] for one in bodies}) == len({result.request_id for _, result in results}) == len(bodies)
    return [{**one, "id": None, "created": None} for one in bodies]


def device_seconds(queue: Queue, line: int) -> float:
    """What computing a line took."""
    result = dict(queue.results("batch_a"))[line]
    return result.usage.device_microseconds / 1e6


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def names(claims: list[Claim]) -> list[RequestKey]:
    return [claim.key for claim in claims]


def test_identical_lines_are_computed_once_and_answered_each(queue: Queue) -> None:
    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body()] * 100, body("Something else"))
        lab.claim()
        assert lab.computed == 2
        assert len(lab.running.keys()) == 101
        await lab.run()
        assert lab.computed == 2
        original, *copies, _ = answers(queue)
        for copy in copies:
            usage = copy["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
            assert {**copy, "usage": None} == {**original, "usage": None}
            assert {**usage, "prompt_tokens_details": original["usage"]["prompt_tokens_details"]} == original["usage"]
        record = queue.batch_fields("batch_a")
        assert (record.completed, record.failed) == (101, 0)
        assert [device_seconds(queue, line) for line in (0, 1, 99, 100)] == [DEVICE_SECONDS, 0.0, 0.0, DEVICE_SECONDS]
        assert lab.running.metrics.duplicates.samples()[0][-1] == 99
        assert lab.running.metrics.finished.samples()[0][-1] == 101
        assert lab.running.copied_tokens == 99 * original["usage"]["completion_tokens"]
        assert (lab.running.finished, lab.running.failed) == (101, 0)

    run(scenario())


def form(*names: str) -> dict[str, Any]:
    """Return a format whose answers have numbers of these names, in that order."""
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": ["a", "b"]}
    return {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}}


SAME = [
    (body(), body()),
    (body(temperature=1, seed=7), body(temperature=1, seed=7)),
    (body(user="\ud800"), body(user="\ud800")),
]
DIFFERENT = [
    (body(), body("Say something: ")),
    (body(top_p=0.5, n=2), dict(reversed(body(n=2, top_p=0.5).items()))),  # in another order
    (body(temperature=1), body(temperature=1)),
    (body(temperature=1, seed=None), body(temperature=1, seed=None)),
    (body(temperature=1, seed=7), body(temperature=1, seed=8)),
    (body(), body(max_tokens=61)),
    (body(), body(stop=["x"])),
    (body(), body(logit_bias={"5": 1})),
    (body(), body(logprobs=True)),
    (body(), body(tools=TOOLS)),
    (body(), body(**FORM)),
    (body(), body(what_no_version_knows_yet=1)),
    (body(response_format=form("a", "b")), body(response_format=form("b", "a"))),  # answers have their order
]


@pytest.mark.parametrize(("bodies", "computed"), [*((pair, 1) for pair in SAME), *((pair, 2) for pair in DIFFERENT)])
def test_lines_are_identical_if_their_bodies_are_and_they_draw_nothing(
    queue: Queue, bodies: tuple[dict[str, Any], ...], computed: int
) -> None:
    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *bodies)
        lab.claim()
        await lab.run()
        assert lab.computed == sum(one.get("n", 1) for one in bodies[:computed])
        assert len(answers(queue)) == 2

    run(scenario())


def test_only_lines_of_one_batch_share_an_answer(queue: Queue) -> None:
    """Batches of other tenants least of all; and live calls run by themselves."""

    async def scenario() -> None:
        lab = Lab(queue)
        for batch, tenant in (("batch_a", "one"), ("batch_b", "one"), ("batch_c", "other")):
            queue.create_batch(batch, 1, tenant=tenant, state="in_progress")
            assert queue.ingest(batch, [(0, Request(CHAT, "demo", json.dumps(body()).encode(), seed=1))], 0, 1)
        for call in ("live_1", "live_2"):
            queue.submit(call, Request(CHAT, "demo", json.dumps(body()).encode(), seed=1, reply_to="api"))
        assert len(lab.claim()) == 5
        await lab.run()
        assert lab.computed == 5
        assert lab.running.metrics.duplicates.samples()[0][-1] == 0

    run(scenario())


BODIES = [
    (CHAT, body(n=3), TEXT),
    (CHAT, body(logprobs=True, top_logprobs=2, stop=["STOP", "x"]), TEXT),
    (CHAT, body(tools=TOOLS), CALLED),
    (COMPLETIONS, text_body(prompt=["One", "Two"], n=2, best_of=3, echo=True, logprobs=1), TEXT),
    (COMPLETIONS, text_body(prompt_logprobs=1, max_tokens=9, return_token_ids=True), TEXT),
    (COMPLETIONS, text_body(max_tokens=0, echo=True, logprobs=1), TEXT),
]


@pytest.mark.parametrize(("endpoint", "line", "text"), BODIES, ids=str)
def test_a_copy_and_its_stream_are_as_if_it_had_run(
    queue: Queue, endpoint: str, line: dict[str, Any], text: str
) -> None:
    async def scenario() -> None:
        lab = Lab(queue, text)
        submit(queue, *[line] * 2, endpoint=endpoint, watched=True)
        submit(queue, *[{**line, "seed": n} for n in range(2)], batch="batch_b", endpoint=endpoint, watched=True)
        lab.claim()
        lab.running.on_step(lab.engine.step(lambda request: 3))
        lab.publish()  # of the original, and of the two that run
        await lab.run()
        for batch in ("batch_a", "batch_b"):
            for one in answers(queue, batch):
                del one["usage"]["prompt_tokens_details"]
        copy, ran = (without_ids(answers(queue, batch)[1]) for batch in ("batch_a", "batch_b"))
        assert copy["usage"].pop("prompt_tokens_details")["cached_tokens"] == copy["usage"]["prompt_tokens"]
        del ran["usage"]["prompt_tokens_details"]
        assert copy == ran
        streams = [streamed(queue, RequestKey(batch, 1)) for batch in ("batch_a", "batch_b")]
        assert streams[0] == streams[1] != {}

    run(scenario())


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer without the ids of its calls, of which each line has its own."""
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls") or []:
            call["id"] = None
    return answer


def streamed(queue: Queue, key: RequestKey) -> dict[int, tuple[str, list[int], Any]]:
    """What readers of a line got: text, tokens and log probabilities of each choice."""
    found: dict[int, tuple[str, list[int], Any]] = {}
    for chunk in (chunk for entry in queue.read_tokens({key: FIRST_ID}) for chunk in entry.chunks):
        text, tokens, logprobs = found.get(chunk.choice, ("", [], []))
        assert (chunk.index, chunk.text_offset) == (len(tokens), len(text))
        found[chunk.choice] = text + chunk.text, tokens + chunk.token_ids, logprobs + (chunk.logprobs or [])
    return found


@pytest.mark.parametrize("line", [body(logprobs=True, top_logprobs=2), body(n=2), body(tools=TOOLS)], ids=str)
def test_copies_differ_in_their_ids_alone(queue: Queue, line: dict[str, Any]) -> None:
    """In `created` too, where the lines were submitted at other times."""

    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[line] * 4, *[{**line, "seed": 1}] * 2, created=[5.0, 5.5, 5.5, 6.0, 5.5, 5.5])
        lab.claim()
        await lab.run()
        raw = [result.body for _, result in queue.results("batch_a")]
        bodies = [json.loads(one) for one in raw]
        assert [one["created"] for one in bodies] == [5, 5, 5, 6, 5, 5]
        assert len({one["id"] for one in bodies}) == len(bodies)
        shared = [one.replace(made["id"].encode(), b"", 1) for one, made in zip(raw, bodies, strict=True)]
        assert shared[1] == shared[2] == shared[3].replace(b'"created":6', b'"created":5', 1)
        assert bodies[1]["choices"] == bodies[0]["choices"]

    run(scenario())


def test_calls_of_tools_have_ids_of_their_own(queue: Queue) -> None:
    async def scenario() -> None:
        lab = Lab(queue, CALLED)
        submit(queue, *[body(tools=TOOLS)] * 3)
        lab.claim()
        await lab.run()
        calls = [one["choices"][0]["message"]["tool_calls"][0] for one in answers(queue)]
        assert len({call["id"] for call in calls}) == 3
        assert {call["function"]["arguments"] for call in calls} == {'{"place": "Köln"}'}

    run(scenario())


def test_copies_that_come_later_are_answered_at_once(queue: Queue) -> None:
    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body()] * 30)
        lab.claim(1)
        await lab.run()
        for _ in range(29):
            (claim,) = lab.claim(1)
            assert lab.running.keys_in_engine() == []
            await lab.run()
            assert lab.results[-1].key == claim.key
        assert (lab.computed, len(answers(queue))) == (1, 30)
        assert queue.batch_fields("batch_a").completed == 30

    run(scenario())


def test_the_answers_that_were_used_last_are_kept(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        lab = Lab(queue)
        a, b, c, d = map(body, "abcd")
        submit(queue, a, b, c, a, d, a, b)
        lab.claim(1)
        await lab.run()
        first = lab.results[0].result
        size = 10 * (len(json.dumps(a)) + len(first.body)) + 200 * first.usage.completion_tokens
        monkeypatch.setattr(duplicates, "MAX_KEPT_BYTES", 3 * size + size // 2)
        computed = []
        for _ in range(6):
            lab.claim(1)
            await lab.run()
            computed.append(lab.computed)
        assert computed == [2, 3, 3, 4, 4, 5]  # d took the place of b
        assert len(answers(queue)) == 7

    run(scenario())


def test_the_answers_of_a_cancelled_batch_are_dropped(queue: Queue) -> None:
    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body()] * 2)
        lab.claim(1)
        await lab.run()
        lab.running.cancel(ControlMessage("1-0", "cancel", batch="batch_a"))
        lab.claim()
        await lab.run()
        assert lab.computed == 2

    run(scenario())


@pytest.mark.parametrize("end", ["cancelled", "lost", "requeued"])
def test_a_copy_goes_on_where_the_original_gets_no_answer(queue: Queue, end: str) -> None:
    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body()] * 4)
        claims = lab.claim()
        first = claims[0]
        lab.running.on_step(lab.engine.step())
        if end == "cancelled":
            lab.running.cancel(ControlMessage("1-0", "cancel", [first.key]))
        elif end == "lost":
            assert lab.running.lose([(first.key, first.fence)]) == 1
        else:
            queue.requeue("w1", lab.running.drop([first.key]))
        await asyncio.sleep(0)
        assert lab.computed == 2
        assert lab.running.keys_in_engine() == [claims[1].key]
        await lab.run()
        assert lab.computed == 2
        assert all(result.succeeded for _, result in queue.results("batch_a"))
        assert [line for line, _ in queue.results("batch_a")] == [1, 2, 3]
        assert lab.running.metrics.duplicates.samples()[0][-1] == 2

    run(scenario())


def test_all_copies_run_where_the_original_fails(queue: Queue) -> None:
    """One after the other would take as many times as long."""

    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body()] * 6)
        lab.claim()
        lab.running.on_step(lab.engine.step())
        lab.engine.failing[lab.engine.added[0].request_id] = "too bad"
        lab.running.on_step(lab.engine.step())
        await asyncio.sleep(0)
        assert lab.computed == 6
        await lab.run()
        assert [line for line, result in queue.results("batch_a") if not result.succeeded] == [0]
        assert [line for line, _ in queue.results("batch_a")] == list(range(6))

    run(scenario())


def test_a_copy_that_the_engine_does_not_take_fails(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for it any longer, and what waited runs."""

    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body()] * 4)
        claims = lab.claim()
        add, refused = lab.engine.add, [claims[1].key]

        def add_others(requests: list[EngineRequest]) -> None:
            if refused:
                del refused[0]
                raise OSError("no room for the message")
            add(requests)

        monkeypatch.setattr(lab.engine, "add", add_others)
        lab.running.cancel(ControlMessage("1-0", "cancel", [claims[0].key]))
        await asyncio.sleep(0)
        assert [finished.key for finished in lab.results] == [claims[1].key]
        assert lab.results[0].result.status == 500
        assert sorted(lab.running.keys()) == names(claims[2:])
        await lab.run()
        assert [line for line, _ in queue.results("batch_a")] == [1, 2, 3]
        assert queue.batch_fields("batch_a").failed == 1

    run(scenario())


@pytest.mark.parametrize("end", ["cancelled", "failed"])
@pytest.mark.parametrize("what", ["line", "batch"])
def test_a_watched_copy_that_takes_over_is_watched_at_once(queue: Queue, end: str, what: str) -> None:
    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body()] * 3)
        first, copy, other = names(lab.claim())
        keys, batch = ([copy], "") if what == "line" else ([], copy.batch)
        lab.running.watch(ControlMessage("1-0", "watch", keys, batch=batch, seconds=600))
        if end == "cancelled":
            lab.running.cancel(ControlMessage("1-0", "cancel", [first]))
        else:
            lab.engine.failing[lab.engine.added[0].request_id] = "too bad"
            lab.running.on_step(lab.engine.step())
        await asyncio.sleep(0)
        lab.running.on_step(lab.engine.step(lambda request: 3))
        lab.publish()
        assert streamed(queue, copy)[0][1] == lab.texts[0][:3]
        running = [copy] if end == "cancelled" else [copy, other]
        assert lab.running.keys_in_engine() == running
        assert (streamed(queue, other) != {}) == (other in running and what == "batch")

    run(scenario())


def test_more_copies_than_may_wait_run(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "MAX_COPIES", 3)

    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body()] * 10, *[body("Something else")] * 3)
        lab.claim()
        assert len(lab.running.keys_in_engine()) == 10
        await lab.run()
        assert lab.computed == 10
        assert lab.running.metrics.duplicates.samples()[0][-1] == 3
        assert len(answers(queue)) == 13

    run(scenario())


def test_each_copy_has_the_error_of_its_own_try(queue: Queue) -> None:
    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body(guided_regex="never")] * 1000)
        lab.claim()
        lab.claim()
        await lab.run()
        assert {result.status for _, result in queue.results("batch_a")} == {400}
        assert queue.batch_fields("batch_a").failed == 1000
        assert lab.computed == 0

    run(scenario())


@pytest.mark.parametrize("end", ["cancelled", "lost", "requeued", "claimed again"])
def test_a_copy_that_leaves_is_not_answered(queue: Queue, end: str) -> None:
    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body()] * 3)
        claims = lab.claim()
        copy, held = claims[1].key, (claims[1].key, claims[1].fence)
        assert lab.running.lose([(copy, copy.line + 1)]) == 0  # under another fence
        if end == "cancelled":
            assert lab.running.cancel(ControlMessage("1-0", "cancel", [copy])) == [held]
        elif end == "lost":
            assert lab.running.lose([held]) == 1
        elif end == "requeued":
            queue.requeue("w1", lab.running.drop([copy]))
        else:
            queue.requeue("w1", [held])
            assert names(lab.claim()) == [copy]
        await lab.run()
        lines = [0, 1, 2] if end == "claimed again" else [0, 2]
        assert sorted(finished.key.line for finished in lab.results) == lines
        assert lab.computed == 1

    run(scenario())


def test_a_cancelled_batch_leaves_nothing(queue: Queue) -> None:
    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body()] * 5)
        claims = lab.claim()
        held = lab.running.cancel(ControlMessage("1-0", "cancel", batch="batch_a"))
        assert sorted(held) == [(claim.key, claim.fence) for claim in claims]
        await asyncio.sleep(0)
        assert lab.running.keys() == lab.results == []
        assert lab.engine.running == {}

    run(scenario())


def test_copies_whose_original_has_ended_can_still_leave(queue: Queue) -> None:
    """They are answered in groups, between which orders come."""

    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body()] * 100)
        claims = lab.claim()
        while not lab.results:
            lab.running.on_step(lab.engine.step())
        await asyncio.sleep(0)
        assert 1 < len(lab.results) < 99
        assert len(lab.running.drop_unstarted()) == 100 - len(lab.results)
        answered = len(lab.results)
        await asyncio.sleep(0)
        assert len(lab.results) == answered
        assert lab.running.keys() == []
        assert [finished.key for finished in lab.results] == names(claims)[:answered]

    run(scenario())


def test_no_copy_is_in_flight_for_a_crash_and_quarantined_lines_run_by_themselves(queue: Queue) -> None:
    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body()] * 3)
        claims = lab.claim()
        assert lab.running.keys_in_engine() == [claims[0].key]
        dead_letter = ApiError(500, "given up").result("req_1")
        queue.quarantine("w1", lab.running.drop(lab.running.keys_in_engine()), dead_letter)
        queue.requeue("w1", lab.running.drop(lab.running.keys()))
        other = Lab(queue, worker="w2")
        isolated = other.claim()
        assert names(isolated) == [claims[0].key]
        assert isolated[0].engine_crashes == 1
        assert other.computed == 1
        queue.requeue("w2", other.running.drop(other.running.keys()), cleared=True)
        other.claim()
        await other.run()
        assert queue.batch_fields("batch_a").completed == 3

    run(scenario())


def test_suspects_run_each_by_itself_until_one_is_answered(queue: Queue) -> None:
    """One after the other would crash a core each; all at once crash one."""

    async def scenario() -> None:
        suspects: set[Digest] = set()
        lab = Lab(queue, suspects=suspects)
        submit(queue, *[body()] * 9, body("Something else"))
        claims = lab.claim(8)
        lab.running.suspect(lab.running.keys_in_engine())
        queue.requeue("w1", lab.running.drop(lab.running.keys()))
        other = Lab(queue, worker="w2", suspects=suspects)
        assert names(other.claim(3)) == names(claims[:3])
        assert (other.computed, other.running.keys_in_engine()) == (3, names(claims[:3]))
        held = other.running.cancel(ControlMessage("1-0", "cancel", [claims[0].key]))
        queue.requeue("w2", held)
        assert names(other.claim(1)) == [claims[0].key]
        assert other.computed == 4
        await other.run()
        assert suspects == set()
        other.claim()
        await other.run()
        assert other.computed == 5  # the other line
        assert len(answers(queue)) == 10

    run(scenario())


def test_a_line_of_which_something_was_published_is_no_copy(queue: Queue) -> None:
    """Its readers have seen the beginning; others may wait for it."""

    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body()] * 3, watched=True)
        lab.claim(1)
        lab.running.on_step(lab.engine.step(lambda request: 5))
        lab.publish()
        queue.requeue("w1", lab.running.drop(lab.running.keys()))
        other = Lab(queue, worker="w2")
        other.claim()
        assert [len(request.output_token_ids) for request in other.engine.added] == [5]
        await other.run()
        third = Lab(queue, worker="w3")
        assert third.claim() == []
        assert len(answers(queue)) == 3
        assert len({one["choices"][0]["message"]["content"] for one in answers(queue)}) == 1
        assert streamed(queue, RequestKey("batch_a", 0)) == streamed(queue, RequestKey("batch_a", 2))

    run(scenario())


def test_a_second_try_is_that_of_the_copies_too(queue: Queue) -> None:
    """It follows from the seed; their usage is that of both tries."""

    async def scenario() -> None:
        lab = Lab(queue, '{"a": ', '{"a": 1}')
        submit(queue, *[body(temperature=1, seed=7, **FORM)] * 3)
        lab.claim()
        await lab.run()
        assert lab.computed == 2
        original, *copies = answers(queue)
        assert [device_seconds(queue, line) for line in range(3)] == [2 * DEVICE_SECONDS, 0.0, 0.0]
        assert original["choices"][0]["message"]["content"] == '{"a": 1}'
        for copy in copies:
            assert copy["choices"] == original["choices"]
            assert copy["usage"]["total_tokens"] == original["usage"]["total_tokens"]
            assert copy["usage"]["prompt_tokens_details"]["cached_tokens"] == copy["usage"]["prompt_tokens"]

    run(scenario())


def test_digests_of_what_takes_no_part_are_empty(queue: Queue) -> None:
    claim = Claim(
        RequestKey("batch_a", 0), 1, Request(CHAT, "demo", json.dumps(body()).encode(), seed=1), None, 1, live=False
    )
    assert len(digest_of(claim)) == 32
    claim.engine_crashes = 1
    assert digest_of(claim) == b""
    claim.engine_crashes, claim.live = 0, True
    assert digest_of(claim) == b""


def test_a_copy_of_what_is_known_is_not_prepared(queue: Queue) -> None:
    """Neither beside its original, nor while that runs, nor after it has ended."""

    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body()] * 9)
        lab.claim(3)
        lab.claim(3)
        assert len(lab.running.keys()) == 6
        await lab.run()
        lab.claim()
        await lab.run()
        assert (lab.prepared, lab.computed, len(answers(queue))) == (1, 1, 9)

    run(scenario())


def test_a_copy_that_was_not_prepared_runs_as_itself(queue: Queue) -> None:
    """Its original was lost between its claim and its start."""

    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body()] * 2)
        (first,) = lab.claim(1)
        (second,) = queue.claim("w1", 2, 1, models=["demo"])
        copies, errors = prepare_once(lab._prepare, lab.running.prepared, None, [second])
        assert lab.running.lose([(first.key, first.fence)]) == 1
        await asyncio.sleep(0)
        lab.running.start(copies)
        assert (lab.running.keys_in_engine(), errors, lab.prepared) == ([second.key], [], 1)
        await lab.run()
        assert [line for line, _ in queue.results("batch_a")] == [1]

    run(scenario())


def test_lines_start_in_the_order_of_the_claim(queue: Queue) -> None:
    """Copies, and lines like an earlier one whose answers are not certain, do not change it."""

    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, body(temperature=1), body(), body(temperature=1), body(), body("Something else"))
        claims = queue.claim("w1", 1, 10, models=["demo"])
        prepared, errors = prepare_once(lab._prepare, lab.running.prepared, None, claims)
        assert ([item.claim.key for item in prepared], errors) == (names(claims), [])

    run(scenario())


def test_lines_whose_answers_are_not_certain_are_prepared_each(queue: Queue) -> None:
    """So are those of which the first cannot run."""

    async def scenario() -> None:
        lab = Lab(queue)
        submit(queue, *[body(temperature=1)] * 3)
        lab.claim()
        await lab.run()
        assert (lab.prepared, lab.computed) == (3, 3)
        assert len(lab.seeds) == 3  # each its own
        submit(queue, *[body(max_tokens=-1)] * 3, batch="batch_b")
        claims = queue.claim("w1", 2, 10, models=["demo"])
        prepared, errors = prepare_once(lab._prepare, lab.running.prepared, None, claims)
        assert (prepared, {finished.key for finished in errors}) == ([], set(names(claims)))
        assert {finished.result.status for finished in errors} == {400}

    run(scenario())
