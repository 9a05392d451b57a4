"""Chats whose answers call tools or reason: what is streamed, what the next worker makes of it, and
the result; over a real queue, without a model.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import Sequence
from typing import Any

import pytest

from jobs.protocol.chat import CHAT
from jobs.protocol.output_format import OutputFormat
from jobs.protocol.requests import ParsedDelta, Request, RequestKey
from jobs.queue.request_queue import Queue
from tests.support.scripted_engine import ScriptedEngine
from tests.workers.replica.test_running import Bench, answer, pieces, run_to_the_end, stream
from workers.engine.messages.core import SamplingParams
from workers.replica.answer_parsers import AnswerParsers
from workers.replica.grammars import Grammars
from workers.replica.preparation import Preparation
from workers.replica.running import Running
from workers.replica.sampling_params import ModelLimits
from workers.settings import DEMO_MODEL
from workers.text.parsers.registry import find_reasoning_format, find_tool_parser
from workers.text.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer.load(DEMO_MODEL)
END = TOKENIZER.eos_token_id or 0
PARSERS = AnswerParsers(find_tool_parser("hermes"), find_reasoning_format("qwen3"))
PREPARATION = Preparation(TOKENIZER, ["demo"], ModelLimits(4096, 1024), PARSERS)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "time")
]
CALLS = [("weather", '{"place": "Köln 🙂"}'), ("time", '{"zone": [1, {"a": "}"}]}')]
THOUGHT = "<think>\nThe user 🙂 wants it.\n</think>\n\n"
CALLED = "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {args}}}\n</tool_call>' for name, args in CALLS)
REQUIRED = json.dumps([{"name": name, "parameters": json.loads(args)} for name, args in CALLS], ensure_ascii=False)
NAMED = {"type": "function", "function": {"name": "weather"}}


class InstantCompiler:
    """The engine is scripted: it reads no grammar."""

    async def compile(self, wanted: OutputFormat) -> str:
        return wanted.source


class ChatBench(Bench):
    """A bench whose engine answers chats with a text."""

    def __init__(self, queue: Queue, text: str, worker: str = "w1", preparation: Preparation = PREPARATION) -> None:
        super().__init__(queue, worker)
        tokens = [*TOKENIZER.encode([text], special_tokens=False)[0], END]

        def script(_prompt: list[int], _sampling: SamplingParams) -> list[int]:
            return tokens

        self.engine = ScriptedEngine(script)
        self.running = Running(self.engine, self, Grammars(InstantCompiler()), lambda: self.now, 2.0)
        self.preparation = preparation

    def claim(self) -> None:
        """Start what the queue gives, once its grammars are there."""
        asyncio.run(self._claim())

    async def _claim(self) -> None:
        self._seq += 1
        prepared, errors = self.preparation.prepare(self.queue.claim(self.worker, self._seq, 10, models=["demo"]))
        assert errors == []
        self.running.start(prepared)
        await asyncio.gather(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))


def submit(queue: Queue, name: str, **body: Any) -> RequestKey:
    """A live call; the API process is called like it."""
    messages = [{"role": "user", "content": "Hello"}]
    raw = json.dumps({"model": "demo", "messages": messages, "max_tokens": 1000, "stream": True, **body}).encode()
    queue.submit(f"live_{name}", Request(CHAT, "demo", raw, seed=1, reply_to=name))
    return RequestKey(f"live_{name}", 0)


def choices(queue: Queue, text: str, **body: Any) -> list[dict[str, Any]]:
    """The answer's choices where the model writes this text."""
    name = secrets.token_hex(4)
    bench = ChatBench(queue, text, name)
    submit(queue, name, stream=False, **body)
    bench.claim()
    found: list[dict[str, Any]] = run_to_the_end(bench)["choices"]
    return found


def message(queue: Queue, text: str, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = choices(queue, text, **body)[0]["message"]
    return found


def joined(deltas: list[ParsedDelta]) -> dict[str, Any]:
    """Put the deltas of a choice together, as a client does."""
    calls: list[dict[str, Any]] = []
    for delta in (delta for one in deltas for delta in one.tool_calls):
        if delta.name is not None:
            assert delta.index == len(calls)
            calls.append({"id": delta.id, "name": delta.name, "arguments": ""})
        calls[delta.index]["arguments"] += delta.arguments
    content, reasoning = ("".join(getattr(one, name) for one in deltas) for name in ("content", "reasoning"))
    return {"content": content or None, "reasoning": reasoning or None, "calls": calls}


def shown(message: dict[str, Any]) -> dict[str, Any]:
    """The same of the message of a whole answer."""
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls") or []]
    return {"content": message["content"], "reasoning": message.get("reasoning_content"), "calls": calls}


ANSWERS: list[tuple[str, dict[str, Any]]] = [
    (THOUGHT + CALLED, {"tools": TOOLS}),
    (THOUGHT + "Just a moment.\n" + CALLED, {"tools": TOOLS, "n": 2}),
    (THOUGHT + REQUIRED, {"tools": TOOLS, "tool_choice": "required"}),
    (THOUGHT + CALLS[0][1], {"tools": TOOLS, "tool_choice": NAMED}),
    (REQUIRED, {"tools": TOOLS, "tool_choice": "required", "max_tokens": 20}),
    (REQUIRED, {"tools": TOOLS[:1], "tool_choice": "required", "max_tokens": 1}),
    (CALLS[0][1], {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 6}),
    (THOUGHT + CALLED, {"tools": TOOLS, "parallel_tool_calls": False, "include_reasoning": False}),
    (THOUGHT + "It says </tool_call>, 東京.", {"tools": TOOLS, "stop": ["京"]}),
    (THOUGHT, {}),
    ("<tool_call>{", {"tools": TOOLS}),
]


@pytest.mark.parametrize(("text", "body"), ANSWERS)
@pytest.mark.parametrize("seed", range(4))
def test_a_streamed_answer_goes_on_elsewhere_as_if_nothing_had_happened(
    queue: Queue, text: str, body: dict[str, Any], seed: int
) -> None:
    """No delta is published twice or left out, and the ids of calls stay."""
    print("seed", seed)
    chance = random.Random(seed)
    submit(queue, "moved", **body)
    workers = 0
    while True:
        workers += 1
        bench = ChatBench(queue, text, f"w{workers}")
        bench.claim()
        for _ in range(chance.randrange(1, 40)):
            if bench.results:
                break
            bench.step(lambda request: chance.randrange(4))
            if chance.random() < 0.4:
                bench.publish()
        if bench.results:
            break
        bench.leave()
    print(workers, "workers")
    entries, whole = stream(queue, "moved"), answer(bench)
    for choice in range(body.get("n", 1)):
        parsed = [delta for chunk in pieces(entries, choice) for delta in chunk.parsed or []]
        counts = [delta.tokens for delta in parsed]
        assert counts == sorted(set(counts))
        assert joined(parsed) == shown(whole["choices"][choice]["message"])
        assert all(chunk.parsed is not None for chunk in pieces(entries, choice))


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_deltas_do_not_depend_on_when_they_are_published(queue: Queue, cut: int) -> None:
    def deltas(count: int) -> list[ParsedDelta]:
        bench = ChatBench(queue, THOUGHT + CALLED, f"w{count}")
        submit(queue, f"by{count}", tools=TOOLS)
        bench.claim()
        while not bench.results:
            bench.step(lambda request: count)
            bench.publish()
        return [delta for chunk in pieces(stream(queue, f"by{count}"), 0) for delta in chunk.parsed or []]

    def without_ids(parsed: list[ParsedDelta]) -> list[Any]:
        return [
            (
                one.tokens,
                one.content,
                one.reasoning,
                [(call.index, call.arguments, call.name) for call in one.tool_calls],
            )
            for one in parsed
        ]

    assert without_ids(deltas(cut)) == without_ids(deltas(100_000))


def test_calls_end_an_answer(queue: Queue) -> None:
    (choice,) = choices(queue, CALLED, tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    calls = choice["message"]["tool_calls"]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == CALLS
    assert {call["type"] for call in calls} == {"function"}
    assert len({call["id"] for call in calls}) == 2
    assert choice["message"]["content"] is None


@pytest.mark.parametrize(
    ("text", "body", "reason"),
    [
        (REQUIRED, {"tool_choice": "required"}, "tool_calls"),
        (CALLS[0][1], {"tool_choice": NAMED}, "stop"),
        ("No.", {}, "stop"),
        (CALLED, {"tool_choice": "none"}, "stop"),
        (CALLED, {"max_tokens": 40}, "length"),
        (CALLED + " and", {"stop": [" and"]}, "tool_calls"),
    ],
)
def test_the_reason_of_an_end_is_openais(queue: Queue, text: str, body: dict[str, Any], reason: str) -> None:
    (choice,) = choices(queue, text, **{"tools": TOOLS, **body})
    assert choice["finish_reason"] == reason


def test_forced_calls_are_read_in_their_own_form(queue: Queue) -> None:
    required = message(queue, REQUIRED, tools=TOOLS, tool_choice="required")["tool_calls"]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in required] == CALLS
    (named,) = message(queue, CALLS[0][1], tools=TOOLS, tool_choice=NAMED)["tool_calls"]
    assert named["function"] == {"name": "weather", "arguments": CALLS[0][1]}


@pytest.mark.parametrize(
    ("text", "body"),
    [(REQUIRED, {"tools": TOOLS, "tool_choice": "required"}), (CALLS[0][1], {"tools": TOOLS, "tool_choice": NAMED})],
)
def test_a_forced_call_that_is_cut_is_a_call_with_cut_arguments(queue: Queue, text: str, body: dict[str, Any]) -> None:
    tokens = TOKENIZER.encode([text], special_tokens=False)[0]
    counts = []
    for most in range(1, len(tokens) + 1):
        (choice,) = choices(queue, text, max_tokens=most, **body)
        found = [(call["name"], call["arguments"]) for call in shown(choice["message"])["calls"]]
        assert (choice["finish_reason"], choice["message"]["content"] or "") == ("length", "")
        for (name, arguments), whole in zip(found, CALLS, strict=False):
            assert (name, whole[1].startswith(arguments.rstrip("\ufffd"))) == (whole[0], True)
        counts.append(len(found))
    assert counts == sorted(counts)
    assert set(counts) == ({1} if len(found) == 1 else {0, 1, 2})


def test_a_call_without_parallel_calls_is_the_first(queue: Queue) -> None:
    (call,) = message(queue, CALLED, tools=TOOLS, parallel_tool_calls=False)["tool_calls"]
    assert call["function"]["name"] == "weather"


def test_an_answer_in_a_form_of_its_own_calls_nothing(queue: Queue) -> None:
    form = {"type": "json_object"}
    assert message(queue, CALLED, tools=TOOLS, response_format=form)["content"] == CALLED


def test_special_tokens_that_no_parser_needs_stay_hidden(queue: Queue) -> None:
    special = TOKENIZER.special_tokens["eos_token"]
    text = f"{THOUGHT}Yes{special}."
    assert (
        message(queue, text, ignore_eos=True, max_tokens=len(TOKENIZER.encode([text], special_tokens=False)[0]))[
            "content"
        ]
        == "\n\nYes."
    )
    assert message(
        queue,
        text,
        ignore_eos=True,
        max_tokens=len(TOKENIZER.encode([text], special_tokens=False)[0]),
        skip_special_tokens=False,
    )["content"].startswith(f"\n\nYes{special}.")
    tagged = AnswerParsers(None, find_reasoning_format(f"tags:<think>,{special}"))
    bench = ChatBench(queue, text, "w9", Preparation(TOKENIZER, ["demo"], ModelLimits(4096, 1024), tagged))
    submit(queue, "b", stream=False, ignore_eos=True, max_tokens=len(TOKENIZER.encode([text], special_tokens=False)[0]))
    bench.claim()
    found = run_to_the_end(bench)["choices"][0]["message"]
    assert found["reasoning_content"] == text.removeprefix("<think>").partition(special)[0]


def test_reasoning_is_apart_and_counted(queue: Queue) -> None:
    bench = ChatBench(queue, THOUGHT + "Yes.")
    submit(queue, "a", stream=False, n=2)
    bench.claim()
    body = run_to_the_end(bench)
    for choice in body["choices"]:
        assert shown(choice["message"]) == {
            "content": "\n\nYes.",
            "reasoning": "\nThe user 🙂 wants it.\n",
            "calls": [],
        }
    (tokens,) = TOKENIZER.encode([THOUGHT + "Yes."], special_tokens=False)
    ended = next(count for count in range(len(tokens)) if "</think>" in TOKENIZER.decode(tokens[:count]))
    assert bench.results[0].result.usage.reasoning_tokens == 2 * ended


@pytest.mark.parametrize(
    ("text", "body", "counted"),
    [
        ("Yes.", {}, False),
        ("It ends with </think>.", {}, False),
        ("<think>On and on", {}, True),
        ("<think>On and on", {"include_reasoning": False}, True),
    ],
)
def test_reasoning_without_an_end_is_all_or_nothing(
    queue: Queue, text: str, body: dict[str, Any], counted: bool
) -> None:
    bench = ChatBench(queue, text)
    submit(queue, "a", stream=False, **body)
    bench.claim()
    found = shown(run_to_the_end(bench)["choices"][0]["message"])
    usage = bench.results[0].result.usage
    assert usage.reasoning_tokens == (usage.completion_tokens if counted else 0)
    assert found["reasoning"] == ("On and on" if counted and not body else None)


def test_without_a_parser_the_text_is_the_content(queue: Queue) -> None:
    bench = ChatBench(queue, THOUGHT + CALLED, preparation=Preparation(TOKENIZER, ["demo"], ModelLimits(4096, 1024)))
    submit(queue, "a", stream=True)
    bench.claim()
    body = run_to_the_end(bench)
    assert body["choices"][0]["message"]["content"] == THOUGHT + CALLED
    assert bench.results[0].result.usage.reasoning_tokens is None
    assert {chunk.parsed is None for chunk in pieces(stream(queue, "a"), 0)} == {True}


def test_token_ids_are_in_the_answer_when_asked_for(queue: Queue) -> None:
    (choice,) = choices(queue, "Yes.", return_token_ids=True)
    assert choice["token_ids"] == [*TOKENIZER.encode(["Yes."], special_tokens=False)[0], END]
    (plain,) = choices(queue, "Yes.")
    assert not plain.keys() & {"token_ids"} or plain["token_ids"] is None
    bench = ChatBench(queue, "Yes.")
    submit(queue, "b", return_token_ids=True)
    bench.claim()
    run_to_the_end(bench)
    first = pieces(stream(queue, "b"), 0)[0]
    assert first.prompt_tokens == len(first.prompt_token_ids or []) == bench.results[0].result.usage.prompt_tokens


FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"required": ["a"]}}}


class LineBench(ChatBench):
    """A bench whose engine gives a line one text after the other, one for each seed."""

    def __init__(self, queue: Queue, texts: Sequence[str], seeds: list[int], retries: int = 5) -> None:
        super().__init__(queue, texts[0], secrets.token_hex(4))
        tokens = [[*ids, END] for ids in TOKENIZER.encode(list(texts), special_tokens=False)]

        def script(_prompt: list[int], sampling: SamplingParams) -> list[int]:
            if sampling.seed not in seeds:
                seeds.append(sampling.seed)
            return tokens[seeds.index(sampling.seed)]

        self.engine = ScriptedEngine(script)
        self.running = Running(self.engine, self, Grammars(InstantCompiler()), lambda: self.now, 2.0)
        self.preparation = Preparation(TOKENIZER, ["demo"], ModelLimits(4096, 1024), PARSERS, retries)


def submit_line(queue: Queue, live: bool = False, **body: Any) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    asked = {"model": "demo", "messages": messages, "max_tokens": 12, "response_format": FORM, "temperature": 1, **body}
    name, request = secrets.token_hex(4), Request(CHAT, "demo", json.dumps(asked).encode(), seed=1)
    if live:
        queue.submit(f"live_{name}", request)
        return
    queue.create_batch(name, 1, state="in_progress")
    queue.ingest(name, [(0, request)], 0, 1)


def answered(
    queue: Queue, *texts: str, retries: int = 5, live: bool = False, **body: Any
) -> tuple[LineBench, list[int]]:
    """A line whose tries give these texts, and the seeds of the tries."""
    seeds: list[int] = []
    bench = LineBench(queue, texts, seeds, retries)
    submit_line(queue, live, **body)
    bench.claim()
    run_to_the_end(bench)
    return bench, seeds


CUT = '{"a": "one two three four five six seven eight'


@pytest.mark.parametrize(
    ("texts", "body", "tries"),
    [
        (['{"a": 1}'], {}, 1),
        ([CUT, '{"b": 1}', "no", '{"a": 1}'], {}, 4),
        ([CUT, '{"b": 1}'], {"response_format": {"type": "json_object"}}, 2),
        ([CUT, '{"a": 1}'], {"n": 2}, 2),
        ([THOUGHT, '{"a": 1}'], {"max_tokens": 40}, 2),
        ([CUT] * 6, {}, 6),
        ([CUT], {"temperature": 0}, 1),
        (["no"], {"response_format": {"type": "text"}}, 1),
    ],
)
def test_a_line_without_its_form_is_answered_again(
    queue: Queue, texts: list[str], body: dict[str, Any], tries: int
) -> None:
    bench, seeds = answered(queue, *texts, **body)
    assert len(seeds) == tries
    (finished,) = bench.results
    one = answered(queue, texts[-1], retries=0, **body)[0].results[0].result.usage
    if texts[-1] != CUT:
        assert {choice["message"]["content"] for choice in answer(bench)["choices"]} == {texts[-1]}
    usage = finished.result.usage
    assert usage.prompt_tokens == tries * one.prompt_tokens
    assert (usage.completion_tokens > one.completion_tokens) == (tries > 1)
    assert bench.running.finished == 1
    assert bench.running.num_sequences == len(bench.engine.running) == 0


def test_tries_end_with_the_last_and_clients_that_wait_have_one(queue: Queue) -> None:
    bench, seeds = answered(queue, CUT, CUT, CUT, retries=2)
    assert len(seeds) == 3
    assert answer(bench)["choices"][0]["finish_reason"] == "length"
    assert len(answered(queue, CUT, '{"a": 1}', live=True)[1]) == 1


@pytest.mark.parametrize("steps", [3, 11, 12, 13, 15])
def test_another_worker_tries_the_same(queue: Queue, steps: int) -> None:
    """It goes on in the first try, or takes up the second one anew."""
    texts = [CUT, '{"a": 1}']
    _, expected = answered(queue, *texts)
    seeds: list[int] = []
    submit_line(queue)
    first, second = (LineBench(queue, texts, seeds) for _ in range(2))
    first.claim()
    for _ in range(steps):
        first.step()
        first.now += 1
        first.publish()
    assert first.results == []
    first.leave()
    second.claim()
    assert answer_text(second) == texts[1]
    assert seeds == expected


def answer_text(bench: Bench) -> str:
    text: str = run_to_the_end(bench)["choices"][0]["message"]["content"]
    return text
