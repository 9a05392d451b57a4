"""How many tokens a text has at least, before it is tokenized."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from tests.support import small_tokenizers
from workers.text.vocabulary import longest_token


def composing() -> Tokenizer:
    tokenizer = small_tokenizers.byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


TOKENIZERS = {
    "byte_level": small_tokenizers.byte_level(),
    "byte_fallback": small_tokenizers.byte_fallback(),
    "composing": composing(),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(
    text=st.text(
        st.sampled_from("the x\u0301\u0308aα\u0313\u0345 🙂東\u1100\u1161\u11a8") | st.characters(codec="utf-8"),
        max_size=60,
    )
)
def test_no_text_has_fewer_tokens_than_it_says(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    longest = longest_token(tokenizer)
    assert longest is not None
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) * longest >= len(text.encode())


def incomplete() -> Tokenizer:
    tokenizer = small_tokenizers.byte_fallback()
    tokenizer.model.byte_fallback = False
    return tokenizer


def swallowing() -> Tokenizer:
    tokenizer = small_tokenizers.byte_level()
    tokenizer.add_tokens([AddedToken("<x>", lstrip=True)])
    return tokenizer


def removing() -> Tokenizer:
    tokenizer = small_tokenizers.byte_level()
    split = pre_tokenizers.Split(" ", "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel()])
    return tokenizer


def collapsing() -> Tokenizer:
    tokenizer = small_tokenizers.byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(" +"), " ")])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [small_tokenizers.word_piece(), small_tokenizers.metaspace(), incomplete(), swallowing(), removing(), collapsing()],
)
def test_where_text_can_vanish_nothing_is_said(tokenizer: Tokenizer) -> None:
    assert longest_token(tokenizer) is None
