"""Refuse or shorten texts that are far too long, before they are tokenized."""

from __future__ import annotations

import contextlib

from workers.replica.sampling_params import too_long
from workers.text.errors import EncodingError
from workers.text.tokenizer import TextTokenizer

_PROBED_CHARACTERS = 8  # characters per token of the context, twice the ratio of most texts


class LongTexts:
    """Check texts before tokenization; thread-safe."""

    def __init__(self, tokenizer: TextTokenizer, longest: int) -> None:
        """Create the check; `longest` is the most tokens that the model accepts."""
        self._tokenizer = tokenizer
        self._longest = longest

    def refuse(self, text: str, param: str) -> None:
        """Raise ApiError for a text that certainly exceeds the model's context."""
        if len(text) > self._longest:
            self._refuse_length(len(text.encode(errors="replace")), param)
        if len(text) > _PROBED_CHARACTERS * self._longest:
            self._probe(text, param)

    def shorten(self, text: str, kept: int, from_left: bool) -> str:
        """Shorten a text of far more than `kept` tokens; keep its end if `from_left`."""
        characters = _PROBED_CHARACTERS * kept
        while len(text) > characters:
            part = text[-characters:] if from_left else text[:characters]
            with contextlib.suppress(EncodingError):
                # Cutting a text can change the tokens at the cut, so a tenth more is required
                if len(self._tokenizer.encode([part], special_tokens=False)[0]) > 1.1 * kept:
                    return part
            characters *= 4
        return text

    def _probe(self, text: str, param: str) -> None:
        """Raise ApiError if the beginning of a text alone exceeds the model's context.

        The probe reads a tenth more, since the cut can add tokens.
        """
        longest = self._longest
        with contextlib.suppress(EncodingError):
            start = len(self._tokenizer.encode([text[: _PROBED_CHARACTERS * longest]], special_tokens=False)[0])
            if start > 1.1 * longest:
                too_long(f"your {param} resulted in more than {longest} tokens", param, longest, param)

    def _refuse_length(self, size: int, param: str) -> None:
        """Raise ApiError for a text whose byte size alone exceeds the model's context."""
        longest = self._tokenizer.longest_token
        if longest is not None and size // longest > self._longest:
            too_long(f"your {param} resulted in at least {size // longest} tokens", param, self._longest, param)
