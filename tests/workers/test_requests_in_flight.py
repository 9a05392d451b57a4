"""One request's tokens and text, piece by piece and over a change of worker."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from jobs.requests import Checkpoint, ChoiceCheckpoint, Claim, Request, RequestKey, TokenChunk
from jobs.validation import parse_call
from workers.engine.messages import SamplingParams
from workers.prepared import Prepared, Prompt
from workers.requests_in_flight import RequestInFlight
from workers.settings import DEMO_MODEL
from workers.text.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer.load(DEMO_MODEL)
PROMPT = TOKENIZER.encode(["Say something:"], special_tokens=False)[0]
TEXT = "Naïve 🙂 words, 東京 and 12 + 30 = 42; then STOP here and more."
TOKENS = TOKENIZER.encode([TEXT], special_tokens=False)[0]


def request(stop: list[str] | None = None, checkpoint: Checkpoint | None = None, max_tokens: int = 1000) -> RequestInFlight:
    claim = Claim(RequestKey("live_a", 0), 7, Request("/v1/completions", "demo", b"{}", 1, reply_to="api"), checkpoint, 1, True)
    call = parse_call("/v1/completions", {"model": "demo", "prompt": PROMPT, "stop": stop, "stop_token_ids": [5]})
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(5,))
    return RequestInFlight(Prepared(claim, call, [Prompt(PROMPT, sampling)], TOKENIZER), 1, 0.0)


def stopped_at(token_ids: list[int], text_length: int) -> Checkpoint:
    return Checkpoint({0: ChoiceCheckpoint(token_ids, text_length)})


def text_of(body: bytes) -> str:
    text: str = json.loads(body)["choices"][0]["text"]
    return text


def generate(flight: RequestInFlight, token_ids: list[int], publish: list[int]) -> tuple[list[TokenChunk], bool]:
    """Feeds tokens one by one, publishing after those numbered; stops at a stop string."""
    chunks: list[TokenChunk] = []
    for number, token_id in enumerate(token_ids):
        if flight.take([token_id]):
            return chunks, True
        if number in publish:
            chunks += flight.delta().chunks
    return chunks, False


@pytest.mark.parametrize("stop", [[], ["STOP"], ["never"], ["; then STOP", "here"]])
@pytest.mark.parametrize("seed", range(8))
def test_what_was_published_goes_on_elsewhere_as_if_nothing_had_happened(stop: list[str], seed: int) -> None:
    print("seed", seed)
    chance = random.Random(seed)
    first = request(stop)
    cut = chance.randrange(len(TOKENS))
    publish = sorted(chance.sample(range(len(TOKENS)), 12))
    chunks, stopped = generate(first, TOKENS[:cut], publish)
    if not stopped:
        published = [token_id for chunk in chunks for token_id in chunk.token_ids]
        checkpoint = stopped_at(published, chunks[-1].text_offset + len(chunks[-1].text)) if published else None
        second = request(stop, checkpoint)
        assert second.already_over() is None
        assert second.engine_request.output_token_ids == published
        more, stopped = generate(second, TOKENS[len(published) :], publish)
        chunks += more
        first = second
    finished = first.finish("length", None)
    assert finished.delta is not None
    chunks += finished.delta.chunks
    assert finished.delta.total == finished.result.usage.completion_tokens
    whole = TOKENIZER.decode(TOKENS, PROMPT)
    ends = [whole.index(one) for one in stop if one in whole]
    expected = whole[: min(ends)] if ends else whole
    assert text_of(finished.result.body) == "".join(chunk.text for chunk in chunks) == expected
    assert stopped == bool(ends)
    assert [chunk.index for chunk in chunks] == [0, *itertools.accumulate(len(chunk.token_ids) for chunk in chunks[:-1])]
    assert [chunk.text_offset for chunk in chunks] == [0, *itertools.accumulate(len(chunk.text) for chunk in chunks[:-1])]
    assert finished.result.usage.completion_tokens == sum(len(chunk.token_ids) for chunk in chunks)


@pytest.mark.parametrize("stop", [[], ["never"]])
def test_the_token_that_stops_counts_but_gives_no_text(stop: list[str]) -> None:
    flight = request(stop)
    flight.cached_tokens = 3
    assert not flight.take(TOKENS[:5])
    assert not flight.take([TOKENS[5], 5], stop_token=5)
    finished = flight.finish("stop", flight.stop_reason(5), stop_token=5)
    assert text_of(finished.result.body) == TOKENIZER.decode(TOKENS[:6], PROMPT)
    assert finished.result.usage.completion_tokens == 7
    assert finished.result.usage.cached_tokens == 3
    assert json.loads(finished.result.body)["choices"][0]["stop_reason"] == 5


def test_a_stop_string_within_one_step_keeps_no_later_token() -> None:
    flight = request(["words"])
    assert flight.take(TOKENS)
    finished = flight.finish("stop", None)
    assert text_of(finished.result.body) == "Naïve 🙂 "
    assert finished.result.usage.completion_tokens < len(TOKENS)


def test_a_full_checkpoint_leaves_nothing_to_generate() -> None:
    finished = request(checkpoint=stopped_at(TOKENS, len(TEXT)), max_tokens=len(TOKENS)).already_over()
    assert finished is not None
    assert text_of(finished.result.body) == TOKENIZER.decode(TOKENS, PROMPT)
    stopped = request(["words"], stopped_at(TOKENS, 8)).already_over()
    assert stopped is not None
    assert json.loads(stopped.result.body)["choices"][0]["finish_reason"] == "stop"
