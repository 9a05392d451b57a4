"""What the library knows of the tokens, and which of them it allows."""

import numpy as np
import pytest

from tests.workers.engine.guides.texts import END, TOKENS, bytes_of, choice, regex, schema, token
from tests.workers.engine.models.tiny_models import VOCAB
from workers.engine.guides.guide import Guide
from workers.engine.guides.vocabulary import Vocabulary
from workers.engine.messages.core import OutputGuide


def allowed(vocabulary: Vocabulary, grammar: str, text: str = "", ends: tuple[int, ...] = (END,)) -> list[int]:
    guide = Guide(OutputGuide(grammar), vocabulary, vocabulary.compile(grammar), ends)
    assert not guide.replay(vocabulary.spell(text.encode()))
    guide.prepare()
    assert guide.mask is not None
    assert not guide.mask_error
    bits = np.unpackbits(guide.mask.view(np.uint8), None, vocabulary.vocab_size, "little")
    return [int(number) for number in np.flatnonzero(bits)]


@pytest.mark.parametrize("grammar", [choice("red"), 'start: "red"', schema({"const": "red"}), regex("red")])
def test_what_a_grammar_forces_may_be_written_in_any_tokens(grammar: str) -> None:
    vocabulary = Vocabulary(TOKENS, VOCAB)
    before = '"' if "const" in grammar else ""
    assert allowed(vocabulary, grammar, before) == sorted([token("r"), token("re"), token("red")])


def test_the_end_of_the_text_is_what_the_request_says() -> None:
    vocabulary = Vocabulary(TOKENS, VOCAB)
    grammar = choice("red", "redder")
    assert allowed(vocabulary, grammar, "re") == [token("d")]
    assert allowed(vocabulary, grammar, "red") == [token("d"), END]
    assert allowed(vocabulary, grammar, "red", ()) == [token("d")]
    assert allowed(vocabulary, grammar, "red", (END, 7, VOCAB + 5, -1)) == [7, token("d"), END]


@pytest.mark.parametrize("size", [31, 32, 33, 64, 96])
def test_a_vocabulary_of_any_size_has_whole_masks(size: int) -> None:
    tokens = [bytes([97 + number % 26]) for number in range(size)]
    found = allowed(Vocabulary(tokens, size), regex("[a-c]d"), ends=(size - 1,))
    assert found == [number for number in range(size) if number % 26 < 3]
    shorter = Vocabulary(tokens[:-3], size)
    assert len(shorter.tokens) == size
    assert allowed(shorter, regex("[a-z]+"), ends=()) == list(range(size - 3))


def test_text_is_spelled_in_the_longest_tokens_or_not_at_all() -> None:
    vocabulary = Vocabulary(TOKENS, VOCAB)
    for text in ("</think>", "</thinking", "redgreenx", "éa é"):
        assert bytes_of(vocabulary.spell(text.encode())) == text.encode()
    assert vocabulary.spell(b"</think>") == [token("</think>")]
    assert vocabulary.spell(b"</thin") == [token("</"), *map(token, "thin")]
    assert vocabulary.spell(b"red\x00") == []
    assert vocabulary.spell(b"") == []
