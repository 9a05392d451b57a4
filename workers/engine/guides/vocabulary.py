"""The bytes of each token, and the grammar library's view of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# A grammar that is never entered. Its option applies to the whole list.
_NO_FORCING = b'{"name":"no_forcing","lark_grammar":"%llguidance {\\"no_forcing\\": true}\\nstart: \\"\\""}'


_MOST_ITEMS = 5000
"""Most items of the parser for one mask. An object of 500 optional properties needs 2,000, and no
larger one fits a row of the parser.
"""


class Vocabulary:
    """The bytes of `vocab_size` tokens; special tokens and ids beyond `tokens` have none.

    The library has one more token, `end`, for the end of the text: its bit in a mask is set if the
    text may end here, regardless of the tokens that end it.
    """

    def __init__(self, tokens: Sequence[bytes], vocab_size: int) -> None:
        self.tokens = [*tokens[:vocab_size], *[b""] * (vocab_size - len(tokens))]
        self.vocab_size = vocab_size
        self.end = vocab_size
        self.words = -(-vocab_size // 32)
        """Number of 32-bit words of a mask."""
        self.library_words = -(-(vocab_size + 1) // 32)
        self._making = threading.Lock()

    @property
    def library(self) -> LLTokenizer:
        """Return the library's tokenizer.

        Creating it at the first use takes some tenths of a second for a large vocabulary.
        """
        with self._making:
            return self._library

    def compile(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of a grammar; errors are in the matcher's state.

        If a grammar allows only one continuation, the library by default allows only the first
        token of its own tokenization of that text. This matcher allows every token that fits, and
        the model chooses, since the core has no tokenizer.
        """
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(step_max_items=_MOST_ITEMS)
        return LLMatcher(self.library, _without_forcing(grammar), log_level=0, limits=limits)

    def spell(self, text: bytes) -> list[int]:
        """Return tokens that spell `text`, the longest fit at each place; [] if there are none."""
        spelled: list[int] = []
        while text:
            length = next((size for size in range(min(self._longest, len(text)), 0, -1) if text[:size] in self._ids), 0)
            if not length:
                return []
            spelled.append(self._ids[text[:length]])
            text = text[length:]
        return spelled

    def beginnings(self, text: bytes) -> list[int]:
        """Return the tokens that `text` may begin with, if other tokens can complete it."""
        heads = ((text[:size], text[size:]) for size in range(1, len(text) + 1))
        return [self._ids[head] for head, rest in heads if head in self._ids and (not rest or self.spell(rest))]

    @cached_property
    def _library(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        tokens: Any = _Tokens(self)
        return LLTokenizer(tokens)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {token: number for number, token in reversed(list(enumerate(self.tokens))) if token}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)


class _Tokens:
    """The interface that the library expects of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = [*vocabulary.tokens, b""]
        self.eos_token_id = vocabulary.end
        self._spell = vocabulary.spell

    def __call__(self, text: str) -> list[int]:
        return self._spell(text.encode())


def _without_forcing(grammar: str) -> str:
    if not grammar.lstrip().startswith("{"):  # a grammar in Lark's syntax
        grammar = msgspec.json.encode({"grammars": [{"lark_grammar": grammar}]}).decode()
    whole = msgspec.json.decode(grammar, type=dict[str, msgspec.Raw])
    grammars = bytes(whole["grammars"]).rstrip().removesuffix(b"]")
    whole["grammars"] = msgspec.Raw(grammars + b"," + _NO_FORCING + b"]")
    return msgspec.json.encode(whole).decode()
