"""Texts that are far too long, so that no time is spent on tokens that are not needed."""

from __future__ import annotations

import contextlib

from workers.replica.sampling_params import too_long
from workers.text.errors import EncodingError
from workers.text.tokenizer import TextTokenizer

_PROBED_CHARACTERS = 8  # per token of the context, twice as many as most texts have


class LongTexts:
    """Looks at texts before they are tokenized; thread-safe."""

    def __init__(self, tokenizer: TextTokenizer, longest: int) -> None:
        """`longest`: tokens that the model can take."""
        self._tokenizer = tokenizer
        self._longest = longest

    def refuse(self, text: str, param: str) -> None:
        """Raise ApiError for a text that certainly does not fit."""
        if len(text) > self._longest:
            self._refuse_length(len(text.encode(errors="replace")), param)
        if len(text) > _PROBED_CHARACTERS * self._longest:
            self._probe(text, param)

    def shorten(self, text: str, kept: int, from_left: bool) -> str:
        """Return the part of a text that has more than `kept` tokens, of a long one not all; cut
        from the left its end.
        """
        characters = _PROBED_CHARACTERS * kept
        while len(text) > characters:
            part = text[-characters:] if from_left else text[:characters]
            with contextlib.suppress(EncodingError):
                # A tenth more, as the cut gives some and takes others
                if len(self._tokenizer.encode([part], special_tokens=False)[0]) > 1.1 * kept:
                    return part
            characters *= 4
        return text

    def _probe(self, text: str, param: str) -> None:
        """Raise ApiError for a text whose beginning alone has more tokens than the model can take:
        a tenth more, as the cut gives some.
        """
        longest = self._longest
        with contextlib.suppress(EncodingError):
            start = len(self._tokenizer.encode([text[: _PROBED_CHARACTERS * longest]], special_tokens=False)[0])
            if start > 1.1 * longest:
                too_long(f"your {param} resulted in more than {longest} tokens", param, longest, param)

    def _refuse_length(self, size: int, param: str) -> None:
        """Raise ApiError for a text of so many bytes that it certainly does not fit."""
        longest = self._tokenizer.longest_token
        if longest is not None and size // longest > self._longest:
            too_long(f"your {param} resulted in at least {size // longest} tokens", param, self._longest, param)
