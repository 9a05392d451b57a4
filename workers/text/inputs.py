"""Encode texts and pairs of texts for pooling models: with the special tokens that the tokenizer
declares, whole or truncated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from workers.text.errors import EncodingError, is_panic

Input = str | tuple[str, str]
"""A text, or a pair of texts."""


class EncodedInput(NamedTuple):
    """The token ids of an input.

    `second_text` is the index of the first token with the second text's token type, 0 without one.
    The first `unpooled` tokens belong to a prompt and are not pooled.
    """

    token_ids: list[int]
    second_text: int = 0
    unpooled: int = 0


class InputEncoder:
    """Encodes inputs, many at a time; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, side: str) -> None:
        """`side` is the default side of truncation."""
        self._tokenizer = tokenizer
        self._side = side

    def encode(self, inputs: Sequence[Input], special_tokens: bool) -> list[EncodedInput]:
        """Return the encoded inputs. Raise EncodingError if any of them cannot be encoded."""
        return [_encoded(encoding) for encoding in encode_batch(self._tokenizer, inputs, special_tokens)]

    def cut(self, given: Input, special_tokens: bool, longest: int, side: str | None) -> EncodedInput:
        """Return at most `longest` tokens of an input, special tokens included.

        The longer text of a pair is truncated first, as in transformers.
        """
        texts = [given] if isinstance(given, str) else list(given)
        around = self._tokenizer.num_special_tokens_to_add(len(texts) == 2) if special_tokens else 0
        first, *rest = encode_batch(self._tokenizer, texts, special_tokens=False)
        room = max(len(texts), longest - around)
        for encoding, length in zip((first, *rest), _lengths(room, *map(len, (first, *rest))), strict=True):
            encoding.truncate(length, direction=side or self._side)
        return _encoded(self._tokenizer.post_process(first, rest[0] if rest else None, special_tokens))

    def from_left(self, side: str | None) -> bool:
        """Return whether inputs are truncated at their beginning."""
        return (side or self._side) == "left"

    def cut_ids(self, token_ids: list[int], longest: int, side: str | None) -> list[int]:
        """Return at most `longest` of the tokens."""
        return token_ids[-longest:] if self.from_left(side) else token_ids[:longest]


def encode_batch(tokenizer: Tokenizer, inputs: Sequence[Input], special_tokens: bool) -> list[Encoding]:
    """Return the encoding of each input. Raise EncodingError if any of them has none."""
    try:
        return tokenizer.encode_batch_fast(list(inputs), add_special_tokens=special_tokens)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise EncodingError(f"The model's tokenizer cannot encode this text: {reason[:500]}") from error


def _encoded(encoding: Encoding) -> EncodedInput:
    types = encoding.type_ids
    return EncodedInput(encoding.ids, types.index(1) if 1 in types else 0)


def _lengths(room: int, first: int, second: int | None = None) -> tuple[int, ...]:
    """Return how many tokens of each text are kept; two texts share the room."""
    if second is None:
        return (min(first, room),)
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    if shorter * 2 > room:
        return (room // 2, room - room // 2) if first <= second else (room - room // 2, room // 2)
    return (first, room - first) if first <= second else (room - second, second)
