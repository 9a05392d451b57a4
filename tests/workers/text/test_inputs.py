"""Texts and pairs as models for numbers take them: cut as the tokenizers library itself cuts."""

import itertools

import pytest

from tests.support.small_tokenizers import bert
from workers.text.inputs import InputEncoder

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog"]
TOKENIZER = bert()


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_is_cut_is_what_the_library_would_leave(side: str) -> None:
    encoder, library = InputEncoder(TOKENIZER, side), bert()
    texts = [" ".join(WORDS[:length]) for length in range(1, 9)]
    for longest in (5, 6, 9, 12):
        library.enable_truncation(longest, direction=side)
        for given in (*texts, *itertools.product(texts, texts)):
            expected = library.encode(*(given if isinstance(given, tuple) else (given,)))
            found = encoder.cut(given, special_tokens=True, longest=longest, side=None)
            second = expected.type_ids.index(1) if 1 in expected.type_ids else 0
            assert (found.token_ids, found.second_text) == (expected.ids, second)


def test_a_second_text_without_a_type_of_its_own_is_not_marked() -> None:
    encoder = InputEncoder(TOKENIZER, "right")
    assert [found.second_text for found in encoder.encode(["fox", ("quick fox", "dog")], special_tokens=True)] == [0, 4]
    assert encoder.cut_ids([1, 2, 3], 2, None) == [1, 2]
    assert encoder.cut_ids([1, 2, 3], 2, "left") == [2, 3]
