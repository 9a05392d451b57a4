"""One choice's tokens, text and log probabilities, piece by piece and over a change of worker."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from jobs.protocol.logprobs import TextOffsets, text_offsets
from jobs.protocol.requests import ChoiceCheckpoint, TokenChunk
from jobs.protocol.validation import parse_call
from workers.engine.messages.core import SamplingParams, TokenLogprobs
from workers.replica.prepared import Prompt
from workers.replica.sequence import Sequence, positions
from workers.settings import DEMO_MODEL
from workers.text.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer.load(DEMO_MODEL)
PROMPT = TOKENIZER.encode(["Say something:"], special_tokens=False)[0]
TEXT = "Naïve 🙂 words, 東京 and 12 + 30 = 42; then STOP here and more."
TOKENS = TOKENIZER.encode([TEXT], special_tokens=False)[0]
WHOLE = TOKENIZER.decode(TOKENS, PROMPT)
STOP_TOKEN = 5


def sequence(
    checkpoint: ChoiceCheckpoint | None = None, max_tokens: int = 1000, min_tokens: int = 0, text: str = "", **body: Any
) -> Sequence:
    call = parse_call("/v1/completions", {"model": "demo", "prompt": PROMPT, "stop_token_ids": [STOP_TOKEN], **body})
    logprobs = -1 if call.logprobs is None else call.logprobs
    sampling = SamplingParams(
        max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,), min_tokens=min_tokens, logprobs=logprobs
    )
    return Sequence(0, Prompt(PROMPT, sampling, text), call, TOKENIZER, checkpoint)


def logprobs_of(token_ids: list[int], start: int = 0) -> list[TokenLogprobs]:
    """What an engine could say of these tokens: the two most likely ones beside each."""
    return [
        TokenLogprobs([token, 10 + i, 11 + i], [-0.5 * i, -0.1, -2.0], 3) for i, token in enumerate(token_ids, start)
    ]


def take(one: Sequence, token_ids: list[int]) -> bool:
    return one.take(token_ids, logprobs=logprobs_of(token_ids, len(one.token_ids)))


def generate(one: Sequence, token_ids: list[int], publish: list[int]) -> tuple[list[TokenChunk], bool]:
    """Feeds tokens one by one, publishing after those numbered; stops at a stop string."""
    chunks: list[TokenChunk] = []
    for number, token_id in enumerate(token_ids):
        if take(one, [token_id]):
            return chunks, True
        if number in publish and (chunk := one.chunk()) is not None:
            chunks.append(chunk)
    return chunks, False


def checkpoint_of(chunks: list[TokenChunk]) -> ChoiceCheckpoint | None:
    if not chunks:
        return None
    return ChoiceCheckpoint(
        [token for chunk in chunks for token in chunk.token_ids],
        chunks[-1].text_offset + len(chunks[-1].text),
        [position for chunk in chunks for position in chunk.logprobs or []],
    )


@pytest.mark.parametrize("stop", [[], ["STOP"], ["never"], ["; then STOP", "here"]])
@pytest.mark.parametrize("echo", ["", "Say something:"])
@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_what_was_published_goes_on_elsewhere_as_if_nothing_had_happened(
    stop: list[str], echo: str, included: bool, seed: int
) -> None:
    print("seed", seed)
    chance = random.Random(seed)
    wanted: dict[str, Any] = {"stop": stop, "logprobs": 2, "text": echo, "include_stop_str_in_output": included}
    one = sequence(**wanted)
    publish = sorted(chance.sample(range(len(TOKENS)), 12))
    chunks, stopped = generate(one, TOKENS[: chance.randrange(len(TOKENS))], publish)
    if not stopped:
        before = checkpoint_of(chunks)
        one = sequence(before, **wanted)
        assert not one.ended
        assert not one.started
        request = one.engine_request(3, live=True, with_prompt_logprobs=False)
        assert request.output_token_ids == ([] if before is None else before.token_ids)
        assert request.stop_strings == bool(stop)
        more, stopped = generate(one, TOKENS[len(request.output_token_ids) :], publish)
        chunks += more
    one.end("length")
    last = one.chunk()
    chunks += [] if last is None else [last]
    ends = [WHOLE.index(string) + included * len(string) for string in stop if string in WHOLE]
    choice = one.choice(0, None)
    assert choice.text == "".join(chunk.text for chunk in chunks) == echo + (WHOLE[: min(ends)] if ends else WHOLE)
    assert stopped == bool(ends)
    assert choice.finish_reason == ("stop" if ends else "length")
    assert [chunk.index for chunk in chunks] == [
        0,
        *itertools.accumulate(len(chunk.token_ids) for chunk in chunks[:-1]),
    ]
    assert [chunk.text_offset for chunk in chunks] == [
        0,
        *itertools.accumulate(len(chunk.text) for chunk in chunks[:-1]),
    ]
    published = checkpoint_of(chunks)
    assert published is not None
    assert published.token_ids == one.token_ids == TOKENS[: len(one.token_ids)]
    assert published.logprobs == choice.logprobs
    assert [position.chosen.token_id for position in published.logprobs] == one.token_ids
    assert [position.chosen.logprob for position in published.logprobs] == [-0.5 * i for i in range(len(one.token_ids))]


def test_an_ended_choice_is_known_from_its_checkpoint() -> None:
    for max_tokens, body, tokens, expected in [
        (len(TOKENS), {}, TOKENS, (WHOLE, "length", None)),
        (1000, {"stop": ["words"]}, TOKENS, ("Naïve 🙂 ", "stop", "words")),
        (1000, {"stop": ["never"]}, [*TOKENS, STOP_TOKEN], (WHOLE, "stop", STOP_TOKEN)),
        (len(TOKENS) + 1, {}, [*TOKENS, STOP_TOKEN], (WHOLE, "stop", STOP_TOKEN)),
    ]:
        one = sequence(ChoiceCheckpoint(tokens, 3), max_tokens, **body)
        assert one.ended
        choice = one.choice(0, None)
        assert (choice.text, choice.finish_reason, choice.stop_reason) == expected
        last = one.chunk()
        assert last is not None
        assert (last.text, last.token_ids, last.text_offset) == (choice.text[3:], [], 3)
        assert one.chunk() is None
    assert not sequence(ChoiceCheckpoint(TOKENS[:5], 3), stop=["words"]).ended


def test_a_stop_string_may_end_with_the_first_token_after_min_tokens() -> None:
    """The string is what one token adds: among the first `min_tokens` it is passed by."""
    number = 4
    begin, end = (TOKENIZER.decode(TOKENS[:count], PROMPT) for count in (number, number + 1))
    stop = [end.removeprefix(begin)]
    assert not take(sequence(stop=stop, min_tokens=number + 1), TOKENS[: number + 1])
    assert take(sequence(stop=stop, min_tokens=number), TOKENS[: number + 1])
    assert sequence(ChoiceCheckpoint(TOKENS[: number + 1], 0), stop=stop, min_tokens=number).ended


@pytest.mark.parametrize("stop", [[], ["never"]])
@pytest.mark.parametrize("included", [False, True])
def test_the_token_that_stops_counts_but_gives_no_text_unless_it_is_included(stop: list[str], included: bool) -> None:
    asked: dict[str, Any] = {"stop": stop, "include_stop_str_in_output": included, "skip_special_tokens": False}
    one = sequence(logprobs=0, **asked)
    assert not take(one, TOKENS[:5])
    assert not one.take([TOKENS[5], STOP_TOKEN], STOP_TOKEN, logprobs_of([TOKENS[5], STOP_TOKEN]))
    one.end("stop", STOP_TOKEN)
    choice = one.choice(0, None)
    shown = [*TOKENS[:6], STOP_TOKEN] if included else TOKENS[:6]
    assert (choice.text, choice.stop_reason) == (TOKENIZER.decode(shown, PROMPT), STOP_TOKEN)
    again = sequence(ChoiceCheckpoint(one.token_ids, 3, choice.logprobs or []), logprobs=0, **asked)
    assert again.ended
    assert again.choice(0, None) == choice
    assert (
        [position.chosen.token_id for position in choice.logprobs or []] == [*TOKENS[:6], STOP_TOKEN] == one.token_ids
    )


def test_a_stop_string_within_one_step_keeps_no_later_token() -> None:
    one = sequence(stop=["words"], logprobs=1)
    assert take(one, TOKENS)
    one.end("stop")
    choice = one.choice(0, None)
    assert choice.text == "Naïve 🙂 "
    assert len(one.token_ids) == len(choice.logprobs or []) < len(TOKENS)


@pytest.mark.parametrize("resumed", [0, 3, 20])
def test_stop_strings_wait_for_the_least_number_of_tokens(resumed: int) -> None:
    """One that is complete by then is text like any other; one that straddles the bound counts."""
    word = next(i for i in range(len(TOKENS)) if "12" in TOKENIZER.decode(TOKENS[:i], PROMPT))
    for min_tokens, expected in [(word - 1, WHOLE[: WHOLE.index("12")]), (word, WHOLE[: WHOLE.index("STOP")])]:
        checkpoint = ChoiceCheckpoint(TOKENS[:resumed], 0) if resumed else None
        one = sequence(checkpoint, min_tokens=min_tokens, stop=["12", "STOP"])
        assert any(one.take([token]) for token in TOKENS[resumed:])
        one.end("stop")
        assert one.choice(0, None).text == expected


def test_special_tokens_show_only_when_asked_for() -> None:
    special = TOKENIZER.eos_token_id
    assert special is not None
    texts = []
    for skip in (True, False):
        one = sequence(skip_special_tokens=skip)
        one.take([TOKENS[0], special, TOKENS[1]])
        one.end("length")
        texts.append(one.choice(0, None).text)
    assert texts[1] == TOKENIZER.decode(TOKENS[:1], PROMPT) + TOKENIZER.special_tokens["eos_token"] + texts[0][1:]


@pytest.mark.parametrize(
    ("echo", "tokens", "text", "text_offset"),
    [
        (True, 7, "a 🙂 b", [0, 1, 2, 2, 2, 2, 3]),
        (False, 7, "🙂 b", [0, 0, 1]),
        (True, 5, "a \ufffd", [0, 1, 2, 2, 2]),
        (False, 5, "\ufffd", [0]),
        (True, 4, "a \ufffd", [0, 1, 2, 2]),
        (False, 4, "", []),
    ],
)
def test_a_stream_after_half_a_character_has_it_whole_or_replaced(
    echo: bool, tokens: int, text: str, text_offset: list[int]
) -> None:
    token_ids = TOKENIZER.encode(["a 🙂 b"], special_tokens=False)[0]
    half, output = token_ids[:4], token_ids[4:tokens]
    call = parse_call("/v1/completions", {"model": "demo", "prompt": half, "echo": echo, "logprobs": 0})
    prompt = Prompt(half, SamplingParams(max_tokens=9, logprobs=0), TOKENIZER.prompt_text(half) if echo else "")
    of_prompt = list(positions(logprobs_of(half), TOKENIZER.token_bytes))
    one = Sequence(0, prompt, call, TOKENIZER, None)
    chunks: list[TokenChunk] = []
    for token_id in output:
        take(one, [token_id])
        chunks.append(one.chunk() or pytest.fail("no chunk"))
    one.end("length")
    last = one.chunk()
    chunks += [] if last is None else [last]
    offsets, found = TextOffsets(), []
    for number, chunk in enumerate(chunks):
        found += offsets.of([*(of_prompt if echo and number == 0 else []), *(chunk.logprobs or [])], chunk.text)
    assert ("".join(chunk.text for chunk in chunks), found) == (text, text_offset)
    choice = one.choice(0, of_prompt)
    assert (choice.text, text_offsets(choice.text, choice.logprobs or [])) == (text, text_offset)


def test_an_ended_choice_asks_the_engine_for_the_prompt_alone() -> None:
    one = sequence(max_tokens=0, text="Say something:", echo=True)
    assert one.ended
    request = one.engine_request(9, live=False, with_prompt_logprobs=True)
    assert (request.sampling.max_tokens, request.output_token_ids) == (1, [])
    first = one.chunk()
    assert first is not None
    assert (first.text, first.token_ids) == ("Say something:", [])
    assert one.choice(0, None).finish_reason == "length"


def test_the_mean_is_per_token() -> None:
    one = sequence(logprobs=0)
    assert one.mean_logprob == 0.0
    take(one, TOKENS[:5])
    assert one.mean_logprob == pytest.approx(-1.0)
