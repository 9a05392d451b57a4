"""Pieces of text put together are the text of the whole, and no piece ends in half a character."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from tests.support import small_tokenizers
from workers.text.detokenizer import DetokenizerFactory
from workers.text.errors import FormatError

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": small_tokenizers.byte_level,
    "byte_fallback": small_tokenizers.byte_fallback,
    "metaspace": small_tokenizers.metaspace,
    "word_piece": small_tokenizers.word_piece,
}
TOKENIZERS = {name: make() for name, make in KINDS.items()}
HALVES = {**TOKENIZERS, "byte_level_window": small_tokenizers.byte_level()}
HALVES["byte_level_window"].decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("~", 0, 0)])
TEXT = "The fox 🙂 says: Naïve café, 東京, 👩‍👩‍👧 and 你好 — 12 + 30 = 42."


def pieces(
    tokenizer: Tokenizer,
    token_ids: list[int],
    cuts: list[int],
    prompt: list[int] | None = None,
    skip_special_tokens: bool = True,
    after_text: bool = False,
) -> list[str]:
    detokenizer = DetokenizerFactory(tokenizer).start(prompt or [], skip_special_tokens, after_text)
    bounds = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    return [
        *(detokenizer.feed(token_ids[start:end]) for start, end in itertools.pairwise(bounds)),
        detokenizer.finish(),
    ]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_make_the_whole(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=8))
    skip = data.draw(st.booleans())
    text = "".join(pieces(tokenizer, token_ids, cuts, skip_special_tokens=skip))
    one_by_one = "".join(pieces(tokenizer, token_ids, list(range(len(token_ids))), skip_special_tokens=skip))
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert text == one_by_one
    if kind == "byte_fallback":
        # A broken sequence spoils its neighbors in the library's decoder only, so what is not
        # broken must agree.
        if "\ufffd" not in whole:
            assert text == whole
    else:
        assert text == whole


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_characters_split_over_tokens_come_out_whole(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    got = pieces(tokenizer, token_ids, list(range(len(token_ids))))
    assert "".join(got) == TEXT
    assert all("\ufffd" not in piece for piece in got)
    assert "" in got  # some tokens end in the middle of a character


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_level_window"])
def test_a_prompt_that_ends_inside_a_character_is_decoded_with_its_output(kind: str) -> None:
    tokenizer = HALVES[kind]
    token_ids = tokenizer.encode("ok 🦊!", add_special_tokens=False).ids
    halves = [count for count in range(len(token_ids)) if tokenizer.decode(token_ids[:count]).endswith("\ufffd")]
    assert len(halves) > 1
    for half in halves:
        prompt, output, end = token_ids[:half], token_ids[half:], token_ids[-1:]
        assert DetokenizerFactory(tokenizer).prompt_text(prompt) == "ok "
        for answer, after_text, alone in ((output, "🦊!", "🦊!"), ([], "\ufffd", ""), (end, "\ufffd!", "!")):
            shown = "".join(pieces(tokenizer, answer, [1, 2], prompt, after_text=True))
            assert shown == after_text
            assert "".join(pieces(tokenizer, answer, [1, 2], prompt)) == alone


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_prompt_and_its_output_make_the_whole(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=20))
    cut = data.draw(st.integers(0, 20))
    text = DetokenizerFactory(tokenizer).prompt_text(token_ids[:cut], skip_special_tokens=False)
    after = pieces(tokenizer, token_ids[cut:], [], token_ids[:cut], skip_special_tokens=False, after_text=True)
    assert text + "".join(after) == "".join(pieces(tokenizer, token_ids, [], skip_special_tokens=False))


def test_half_a_character_before_a_special_token_ends_there() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    prompt = [*tokenizer.encode("ok 🦊", add_special_tokens=False).ids[:-1], tokenizer.token_to_id("<|end|>")]
    assert DetokenizerFactory(tokenizer).prompt_text(prompt, skip_special_tokens=False) == "ok \ufffd<|end|>"
    assert DetokenizerFactory(tokenizer).prompt_text(prompt) == "ok \ufffd"
    assert pieces(tokenizer, [], [], prompt, after_text=True) == ["", ""]


def test_special_and_unknown_tokens_have_no_text() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    fox = tokenizer.encode("fox", add_special_tokens=False).ids
    end = tokenizer.token_to_id("<|end|>")
    added = tokenizer.token_to_id("→added←")
    assert "".join(pieces(tokenizer, [end, *fox, end, added, 10**6], [1, 2])) == "fox→added←"


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_spelled_out_when_asked_for(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    special = sorted(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)[-1]
    the, *_ = tokenizer.encode("the", add_special_tokens=False).ids
    text = "".join(pieces(tokenizer, [the, special], [1], prompt=[the], skip_special_tokens=False))
    assert text.endswith(tokenizer.id_to_token(special))


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_bytes_of_tokens_make_the_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    factory = DetokenizerFactory(tokenizer)
    joined = b"".join(map(factory.token_bytes, tokenizer.encode(TEXT, add_special_tokens=False).ids))
    assert joined.decode().removeprefix(" ") == TEXT


def test_the_bytes_of_single_tokens() -> None:
    level, pieces_of_words = DetokenizerFactory(TOKENIZERS["byte_level"]), DetokenizerFactory(TOKENIZERS["word_piece"])
    assert level.token_bytes(TOKENIZERS["byte_level"].token_to_id("<|end|>")) == b"<|end|>"
    assert level.token_bytes(TOKENIZERS["byte_level"].token_to_id("→added←")) == "→added←".encode()
    assert level.token_bytes(10**6) == b""
    assert pieces_of_words.token_bytes(TOKENIZERS["word_piece"].token_to_id("the")) == b" the"
    assert pieces_of_words.token_bytes(TOKENIZERS["word_piece"].token_to_id("##o")) == b"o"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_a_vocabulary_has_what_each_token_adds_to_a_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    factory, added = DetokenizerFactory(tokenizer), tokenizer.get_added_tokens_decoder()
    tokens = factory.vocabulary()
    assert len(tokens) == max(tokenizer.get_vocab().values()) + 1
    for token_id, token in enumerate(tokens):
        special = token_id in added and added[token_id].special
        assert token == (b"" if special else factory.token_bytes(token_id))
    assert b" the" in tokens
    if kind == "byte_level":
        assert tokens[tokenizer.token_to_id("→added←")] == "→added←".encode()


def test_a_vocabulary_without_a_text_for_each_token_is_refused() -> None:
    with pytest.raises(FormatError, match="no fixed text for each token"):
        DetokenizerFactory(TOKENIZERS["word_piece"]).vocabulary()


@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace"])
def test_the_first_space_stays_after_a_prompt_and_goes_at_the_very_start(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode("the fox", add_special_tokens=False).ids
    special = next(iter(sorted(tokenizer.get_added_tokens_decoder())))
    assert "".join(pieces(tokenizer, token_ids, [1, 2], prompt=[special])) == "the fox"
    assert "".join(pieces(tokenizer, token_ids, [1, 2], prompt=[special, *token_ids])) == " the fox"


def test_words_are_joined_with_what_the_prompt_ended_in() -> None:
    tokenizer = TOKENIZERS["word_piece"]
    token_ids = tokenizer.encode("the lazy dog", add_special_tokens=False).ids
    assert "".join(pieces(tokenizer, token_ids[1:], [1], prompt=token_ids[:1])) == " lazy dog"


def test_a_token_costs_little() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    seed = 7
    print("seed", seed)
    token_ids = random.Random(seed).choices(range(tokenizer.get_vocab_size()), k=20_000)
    detokenizer = DetokenizerFactory(tokenizer).start([])
    detokenizer.feed(token_ids)

    def cost() -> float:
        started = time.process_time()
        for token_id in token_ids:
            detokenizer.feed((token_id,))
        return (time.process_time() - started) / len(token_ids)

    assert min(cost() for _ in range(5)) < 20e-6
