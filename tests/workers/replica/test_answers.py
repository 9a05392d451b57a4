"""What a request can ask for, end to end: a real Redis, the real engine, the demo model.

One worker for all.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.protocol.results import Result
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from tests.support.redis_server import running_server
from tests.support.requests import text_in, token_ids_in
from tests.support.worker_process import running_worker
from tests.workers.test_worker import (
    CHAT,
    COMPLETIONS,
    SETTINGS,
    answer,
    endless,
    follow,
    run_batch,
    submit_live,
    text_of,
)
from workers.settings import DEMO_MODEL
from workers.text.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer.load(DEMO_MODEL)
PROMPTS = ["Repeat this list in order: one two three", "What is 2 + 3?", "Spell the word apple."]


@pytest.fixture(scope="module")
def queue() -> Iterator[Queue]:
    """A queue with a worker at its other end."""
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder)) as server:
        queue = Queue(connect(server.url), SETTINGS)
        with running_worker(
            queue, server.url, "--lease-seconds", "2", "--stream-interval", "0.2", "--max-num-seqs", "16"
        ):
            yield queue


def complete(queue: Queue, *bodies: dict[str, Any], **common: Any) -> list[Result]:
    """Results of completions that go through all their tokens unless they say otherwise."""
    defaults = {
        "model": "demo",
        "prompt": PROMPTS[0],
        "max_tokens": 24,
        "temperature": 1.0,
        "seed": 11,
        "ignore_eos": True,
    }
    results = run_batch(queue, [{**defaults, **common, **body} for body in bodies], COMPLETIONS)
    assert [result.status for result in results] == [200] * len(bodies), [result.body for result in results]
    return results


def choices(result: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer(result)["choices"]
    return found


def texts(result: Result) -> list[str]:
    return [choice["text"] for choice in choices(result)]


def token_ids(queue: Queue, **body: Any) -> list[int]:
    """The output of a streamed completion."""
    defaults = {
        "model": "demo",
        "prompt": PROMPTS[0],
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    _, api = submit_live(queue, {**defaults, **body}, COMPLETIONS)
    entries = follow(queue, api)
    assert entries[-1].result is not None
    assert entries[-1].result.status == 200, entries[-1].result.body
    return [token_id for entry in entries for token_id in token_ids_in(entry)]


def test_choices_draw_by_their_numbers(queue: Queue) -> None:
    several, same, one, other = complete(
        queue, {"n": 4}, {"prompt": [PROMPTS[0]] * 4}, {"n": 1}, {"prompt": [PROMPTS[0]] * 2, "n": 2, "seed": 12}
    )
    assert len(set(texts(several))) == 4
    assert texts(several) == texts(same)
    assert texts(several)[0] == texts(one)[0]
    assert not set(texts(several)) & set(texts(other))
    assert [choice["index"] for choice in choices(several)] == [0, 1, 2, 3]
    assert several.usage.prompt_tokens == one.usage.prompt_tokens == same.usage.prompt_tokens // 4
    assert several.usage.completion_tokens == 4 * 24
    assert several.usage.cached_tokens <= one.usage.prompt_tokens


def test_lists_of_prompts_are_answered_in_their_order(queue: Queue) -> None:
    ids = TOKENIZER.encode(PROMPTS, special_tokens=True)
    by_text, by_ids, *alone = complete(
        queue, {"prompt": PROMPTS}, {"prompt": ids}, *({"prompt": p} for p in PROMPTS), temperature=0
    )
    assert texts(by_text) == texts(by_ids) == [texts(result)[0] for result in alone]
    assert by_ids.usage.prompt_tokens == sum(map(len, ids))


def test_chats_have_several_choices_too(queue: Queue) -> None:
    asked = {"logprobs": True, "top_logprobs": 2, "skip_special_tokens": False}
    (result,) = run_batch(queue, [endless(20, n=3, temperature=1.0, seed=3, **asked)], CHAT)
    found = choices(result)
    assert [choice["index"] for choice in found] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in found}) > 1
    for choice in found:
        content = choice["logprobs"]["content"]
        assert len(content) == 20
        assert all(len(item["top_logprobs"]) == 2 for item in content)
        assert b"".join(bytes(item["bytes"]) for item in content).decode() == choice["message"]["content"]


def test_the_best_are_those_of_the_highest_mean(queue: Queue) -> None:
    best, every = complete(queue, {"n": 2, "best_of": 5}, {"n": 5, "logprobs": 0}, stop=["e"])
    means = [
        sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"])
        for choice in choices(every)
    ]
    order = sorted(range(5), key=lambda index: -means[index])
    assert texts(best) == [texts(every)[index] for index in order[:2]]
    assert choices(best)[0]["logprobs"] is None
    assert best.usage.completion_tokens == every.usage.completion_tokens


def test_log_probabilities_of_an_output_are_those_of_the_same_prompt(queue: Queue) -> None:
    (prompt,) = TOKENIZER.encode(PROMPTS[:1], special_tokens=True)
    output = token_ids(queue)
    generated, scored, whole = complete(
        queue,
        {"logprobs": 3},
        {"prompt": prompt + output, "logprobs": 3, "echo": True, "max_tokens": 0},
        {"logprobs": 3, "echo": True, "prompt_logprobs": 1},
        temperature=0,
    )
    expected, found = choices(generated)[0]["logprobs"], choices(scored)[0]["logprobs"]
    assert len(expected["tokens"]) == len(output)
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert len(found[name]) == len(prompt) + len(output)
    assert found["tokens"][len(prompt) :] == expected["tokens"]
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][len(prompt) :] == pytest.approx(expected["token_logprobs"], abs=1e-4)
    for at, likeliest in enumerate(expected["top_logprobs"]):
        assert found["top_logprobs"][len(prompt) + at] == pytest.approx(likeliest, abs=1e-4)
        assert max(likeliest.values()) == expected["token_logprobs"][at]  # greedy
    echoed = choices(whole)[0]
    assert echoed["text"] == PROMPTS[0] + texts(generated)[0]
    assert echoed["logprobs"]["tokens"] == found["tokens"]
    assert echoed["logprobs"]["token_logprobs"] == pytest.approx(found["token_logprobs"], abs=1e-4, nan_ok=True)
    of_prompt = echoed["prompt_logprobs"]
    assert of_prompt[0] is None
    assert [next(iter(position)) for position in of_prompt[1:]] == [str(token) for token in prompt[1:]]
    assert (scored.usage.completion_tokens, choices(scored)[0]["finish_reason"]) == (0, "length")


def test_echo_without_output_needs_no_engine(queue: Queue) -> None:
    (result,) = complete(queue, {"echo": True, "max_tokens": 0, "n": 2, "prompt": PROMPTS[:2]})
    assert texts(result) == [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]


def test_stop_strings_wait_for_min_tokens(queue: Queue) -> None:
    (whole,) = complete(queue, {}, temperature=0)
    text = texts(whole)[0]
    stop = text[:2]
    at_once, later = complete(queue, {"stop": stop}, {"stop": stop, "min_tokens": 8}, temperature=0)
    assert (texts(at_once)[0], choices(at_once)[0]["stop_reason"]) == ("", stop)
    assert text.startswith(texts(later)[0])
    assert later.usage.completion_tokens >= 8


def test_min_tokens_keeps_the_end_away(queue: Queue) -> None:
    end = TOKENIZER.eos_token_id
    short, long = complete(queue, {}, {"min_tokens": 12}, logit_bias={str(end): 100}, ignore_eos=False)
    assert (short.usage.completion_tokens, choices(short)[0]["finish_reason"]) == (1, "stop")
    assert (long.usage.completion_tokens, choices(long)[0]["finish_reason"]) == (13, "stop")


def test_penalties_keep_tokens_from_coming_again(queue: Queue) -> None:
    plain = token_ids(queue)
    for penalty in (
        {"repetition_penalty": 50.0},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "logit_bias": {str(plain[0]): 3}},
    ):
        output = token_ids(queue, **penalty)
        assert len(set(output)) > len(set(plain)), penalty


def test_allowed_tokens_alone_are_generated(queue: Queue) -> None:
    allowed = TOKENIZER.encode(["yes no"], special_tokens=False)[0]
    assert set(token_ids(queue, allowed_token_ids=allowed, temperature=1.0)) <= set(allowed)
    (stopped,) = complete(queue, {"allowed_token_ids": allowed, "stop_token_ids": allowed, "max_tokens": 9})
    assert stopped.usage.completion_tokens == 1


def test_the_text_may_end_with_the_stop_string(queue: Queue) -> None:
    (whole,) = complete(queue, {}, temperature=0)
    stop = texts(whole)[0].split()[1]
    without, included = complete(
        queue, {"stop": stop}, {"stop": stop, "include_stop_str_in_output": True}, temperature=0
    )
    assert texts(included) == [texts(without)[0] + stop]


def test_bias_and_bad_words_reach_the_engine(queue: Queue) -> None:
    plain = token_ids(queue)
    wanted = TOKENIZER.encode(["x"], special_tokens=False)[0][0]
    assert set(token_ids(queue, logit_bias={str(wanted): 100})) == {wanted}
    assert plain[0] not in token_ids(queue, logit_bias={str(plain[0]): -100})
    (whole,) = complete(queue, {}, temperature=0)
    word = texts(whole)[0].split()[0]
    (without,) = complete(queue, {"bad_words": [word]}, temperature=0)
    assert word not in texts(without)[0].split()


def test_only_the_likeliest_pass_a_min_p_of_one(queue: Queue) -> None:
    greedy, strict = complete(queue, {"temperature": 0}, {"temperature": 1.0, "min_p": 1.0})
    assert texts(greedy) == texts(strict)


def test_special_tokens_are_returned_when_asked_for(queue: Queue) -> None:
    end = TOKENIZER.eos_token_id
    hidden, shown = complete(queue, {}, {"skip_special_tokens": False}, logit_bias={str(end): 100}, max_tokens=3)
    assert texts(hidden) == [""]
    assert texts(shown) == [TOKENIZER.special_tokens["eos_token"] * 3]


def test_a_prompt_is_cut_to_its_last_tokens(queue: Queue) -> None:
    (prompt,) = TOKENIZER.encode(PROMPTS[:1], special_tokens=True)
    cut, same = complete(queue, {"truncate_prompt_tokens": 5}, {"prompt": prompt[-5:]})
    assert texts(cut) == texts(same)
    assert cut.usage.prompt_tokens == 5


def test_a_stream_contains_every_choice(queue: Queue) -> None:
    body = {
        "model": "demo",
        "prompt": PROMPTS[:2],
        "n": 2,
        "logprobs": 2,
        "echo": True,
        "max_tokens": 30,
        "seed": 5,
        "stream": True,
    }
    _, api = submit_live(queue, body, COMPLETIONS)
    entries = follow(queue, api)
    result = entries[-1].result
    assert result is not None
    assert ["".join(text_in(entry, choice) for entry in entries) for choice in range(4)] == texts(result)
    whole = [choice["logprobs"]["token_logprobs"] for choice in choices(result)]
    for choice in range(4):
        chunks = [chunk for entry in entries for chunk in entry.chunks if chunk.choice == choice]
        prompt = [position.chosen.logprob for position in chunks[0].prompt_logprobs or []]
        assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])
        assert (
            prompt + [position.chosen.logprob for chunk in chunks for position in chunk.logprobs or []] == whole[choice]
        )


def test_chat_answers_do_not_change_because_log_probabilities_are_returned(queue: Queue) -> None:
    plain, detailed = run_batch(queue, [endless(40), endless(40, logprobs=True, top_logprobs=5)])
    assert text_of(plain) == text_of(detailed)


def test_an_echo_of_token_ids_has_the_special_ones_in_text_and_offsets(queue: Queue) -> None:
    end = TOKENIZER.eos_token_id
    assert end is not None
    name = TOKENIZER.token_bytes(end).decode()
    body = {"prompt": [end, *TOKENIZER.encode(["a fox"], special_tokens=False)[0], end], "echo": True, "logprobs": 1}
    (result,) = complete(queue, {**body, "max_tokens": 2})
    (choice,) = choices(result)
    assert choice["text"].startswith(f"{name}a fox{name}")
    starts = [*choice["logprobs"]["text_offset"], None]
    of_prompt = len(body["prompt"])
    pieces = [choice["text"][start:stop] for start, stop in itertools.pairwise(starts)]
    assert pieces[:of_prompt] == choice["logprobs"]["tokens"][:of_prompt]


def test_a_prompt_that_ends_inside_a_character_is_decoded_with_the_answer(queue: Queue) -> None:
    *half, last = TOKENIZER.encode(["Hello 🙂"], special_tokens=False)[0]
    body = {"prompt": half, "max_tokens": 1, "allowed_token_ids": [last], "logprobs": 0}
    results = complete(queue, {**body, "echo": True}, body, {"prompt": half, "echo": True, "max_tokens": 0})
    assert [texts(result) for result in results] == [["Hello 🙂"], ["🙂"], ["Hello \ufffd"]]
    offsets = choices(results[0])[0]["logprobs"]["text_offset"]
    assert [offset for offset, token in zip(offsets, [*half, last], strict=True) if not _is_text(token)] == [6] * 4
    assert choices(results[1])[0]["logprobs"]["text_offset"] == [0]


def _is_text(token_id: int) -> bool:
    return TOKENIZER.token_bytes(token_id).isascii()


@pytest.mark.parametrize("prompt", [None, "", [""]])
def test_without_a_prompt_a_text_begins(queue: Queue, prompt: Any) -> None:
    (result,) = complete(queue, {"echo": True, "prompt": prompt}, temperature=0)
    (begun,) = complete(queue, {"prompt": TOKENIZER.empty_prompt}, temperature=0)
    assert texts(result) == texts(begun) != [""]
    assert result.usage.prompt_tokens == 1


def test_a_top_p_of_0_takes_the_most_likely_token(queue: Queue) -> None:
    (greedy,) = complete(queue, {}, temperature=0)
    (narrow,) = complete(queue, {"top_p": 0}, temperature=2)
    assert texts(narrow) == texts(greedy)
