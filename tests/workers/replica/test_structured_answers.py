"""Answers with structure end to end: a real Redis, the real engine, the demo model.

One worker for all, and two for the death of one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jobs.protocol.requests import StreamEntry
from jobs.protocol.results import Result
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from tests.support.poison import Poison, held, poisoned_environment
from tests.support.redis_server import running_server
from tests.support.requests import token_ids_in
from tests.support.waiting import wait_until
from tests.support.worker_process import running_worker
from tests.workers.replica.test_answers_survive import has_published
from tests.workers.replica.test_parsed_answers import joined, shown
from tests.workers.test_worker import SETTINGS, answer, follow, question, run_batch, submit_live

TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{%- for call in message.tool_calls or [] -%}"
    "<tool_call>\n{{ call.function | tojson }}\n</tool_call>{%- endfor -%}"
    "{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking -%}{{ '<think>\n' }}{%- else -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}{%- endif -%}"
)
WORKER = ("--chat-template", TEMPLATE, "--reasoning-parser", "qwen3")  # the parser of calls, hermes, follows from it
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"enum": ["Köln", "Bonn"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def queue() -> Iterator[Queue]:
    """A queue with a worker at its other end."""
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder)) as server:
        queue = Queue(connect(server.url), SETTINGS)
        flags = ("--lease-seconds", "2", "--stream-interval", "0.2", "--retry-on-invalid", "2")
        with running_worker(queue, server.url, *flags, *WORKER):
            yield queue


def ask(**body: Any) -> dict[str, Any]:
    return question("What is 2 + 3?", **{"max_tokens": 300, "temperature": 1.0, "seed": 5, **body})


def choice_of(result: Result | None) -> dict[str, Any]:
    assert result is not None
    assert result.status == 200, result.body
    found: dict[str, Any] = answer(result)["choices"][0]
    return found


def check_call(function: dict[str, Any]) -> None:
    schema = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}[function["name"]]
    jsonschema.validate(json.loads(function["arguments"]), schema)


def test_forced_calls_are_valid(queue: Queue) -> None:
    asked = {"tools": TOOLS, "parallel_tool_calls": False}
    bodies: list[dict[str, Any] | bytes] = [ask(tool_choice="required", seed=seed, **asked) for seed in range(8)]
    bodies += [ask(tool_choice=NAMED, seed=seed, **asked) for seed in range(8)]
    results = run_batch(queue, bodies)
    reasons = []
    for result in results:
        choice = choice_of(result)
        (call,) = choice["message"]["tool_calls"]
        check_call(call["function"])
        assert choice["message"]["content"] is None
        reasons.append(choice["finish_reason"])
    assert reasons == ["tool_calls"] * 8 + ["stop"] * 8


def test_a_form_of_the_answer_holds_behind_the_reasoning(queue: Queue) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    asked = {"response_format": form, "thinking_token_budget": 9, **THINKING}
    for result in run_batch(queue, [ask(seed=seed, **asked) for seed in range(4)]):
        message = choice_of(result)["message"]
        jsonschema.validate(json.loads(message["content"]), PARAMETERS)
        assert message["reasoning_content"]
        assert result.usage.reasoning_tokens is not None
        assert 9 <= result.usage.reasoning_tokens < 9 + len("</think>") + 1
    (plain,) = run_batch(queue, [ask(response_format=form)])
    jsonschema.validate(json.loads(choice_of(plain)["message"]["content"]), PARAMETERS)
    assert plain.usage.reasoning_tokens == 0


def test_a_strict_tool_leaves_text_free(queue: Queue) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    with_tool, without = run_batch(queue, [ask(tools=strict, temperature=0), ask(temperature=0)])
    assert choice_of(with_tool)["message"] == choice_of(without)["message"]
    assert choice_of(with_tool)["finish_reason"] == "stop"


def test_a_form_that_makes_no_sense_names_its_parameter(queue: Queue) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "x", "parameters": bad}}
    forced, formed = run_batch(
        queue, [ask(tools=[tool], tool_choice="required"), ask(structured_outputs={"json": bad})]
    )
    assert [(result.status, answer(result)["error"]["param"]) for result in (forced, formed)] == [
        (400, "tools"),
        (400, "structured_outputs"),
    ]


def test_a_line_that_is_cut_is_answered_again(queue: Queue) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    bodies: list[dict[str, Any] | bytes] = [
        ask(max_tokens=3, **body)
        for body in ({"response_format": form}, {"response_format": form, "temperature": 0}, {})
    ]
    cut, greedy, free = run_batch(queue, bodies)
    assert [choice_of(result)["finish_reason"] for result in (cut, greedy, free)] == ["length"] * 3
    assert cut.usage.prompt_tokens == 3 * free.usage.prompt_tokens == 3 * greedy.usage.prompt_tokens
    assert [result.usage.completion_tokens for result in (cut, greedy, free)] == [9, 3, 3]


def told_of(entries: list[StreamEntry]) -> dict[str, Any]:
    """What the deltas of a stream say, which are in order and none of them twice."""
    deltas = [delta for entry in entries for chunk in entry.chunks for delta in chunk.parsed or []]
    counts = [delta.tokens for delta in deltas]
    assert counts == sorted(set(counts))
    return joined(deltas)


def test_a_tool_loop_is_streamed(queue: Queue) -> None:
    body = ask(tools=TOOLS, tool_choice=NAMED, stream=True, thinking_token_budget=5, **THINKING)
    entries = follow(queue, submit_live(queue, body)[1])
    message = choice_of(entries[-1].result)["message"]
    assert told_of(entries) == shown(message)
    (call,) = message["tool_calls"]
    check_call(call["function"])
    answered = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    (result,) = run_batch(queue, [ask(tools=TOOLS, messages=[*body["messages"], message, answered])])
    assert choice_of(result)["message"]["content"]


@pytest.mark.proof
def test_calls_go_on_over_the_death_of_their_worker(redis_client: object, redis_url: str, tmp_path: Path) -> None:
    """With the ids that they have, and no delta twice."""
    queue = Queue(connect(redis_url), SETTINGS)
    flags = ("--lease-seconds", "1", "--stream-interval", "0.05", *WORKER)
    body = ask(tools=TOOLS, tool_choice="required", stream=True, min_tokens=30, thinking_token_budget=20, **THINKING)
    poison = Poison("2 + 3", "hold", start=70)  # by the length of the prompt some 40 tokens of the answer
    with running_worker(queue, redis_url, *flags, **poisoned_environment(poison, hold=tmp_path / "hold")) as worker:
        undisturbed = follow(queue, submit_live(queue, body)[1])
        assert sum(len(token_ids_in(entry)) for entry in undisturbed) > 40
        with held(tmp_path / "hold"):
            key, api = submit_live(queue, body)
            wait_until(lambda: has_published(queue, key, {0: 25}), 60, "a beginning")
            worker_id = worker.wait_ready().id
            worker.kill()
            queue.reap(worker_id)
    with running_worker(queue, redis_url, *flags):
        entries = follow(queue, api)
    message, expected = (choice_of(one[-1].result)["message"] for one in (entries, undisturbed))
    assert told_of(entries) == shown(message)
    without_ids = [[call["function"] for call in one["tool_calls"]] for one in (message, expected)]
    assert without_ids[0] == without_ids[1] != []
    assert message["reasoning_content"] == expected["reasoning_content"]
