"""A vocabulary for the tiny models, and grammars whose texts a test can list or check by itself."""

import json
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from tests.workers.engine.models.tiny_models import VOCAB

END = VOCAB - 1
"""What ends a text, where a request asks for that; a token without bytes."""

_WORDS = ["re", "red", "ed", "gr", "green", "ee", "blue", "bl", "ue", '{"', '":', '"}', "</", "think", "</think>", "12"]
_WORDS += ["true", "false", "null", ', "', "\n\n", " {", ">{", "aa", "ab", "ba"]

TOKENS: list[bytes] = [bytes([code]) for code in range(32, 127)] + [
    word.encode() for word in [*_WORDS, "\n", "é", "éa"]
]
TOKENS += [b""] * (VOCAB - len(TOKENS))


def bytes_of(tokens: list[int]) -> bytes:
    return b"".join(TOKENS[token] for token in tokens)


def token(text: str) -> int:
    return TOKENS.index(text.encode())


def choice(*texts: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": "start: " + " | ".join(map(json.dumps, texts))}]})


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def schema(value: object) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(value))


class Prefixes:
    """Whether bytes begin a text of a grammar, or are one: asked of a new matcher byte by byte."""

    def __init__(self, grammar: str) -> None:
        tokens: Any = _Bytes()
        self._new = LLMatcher(LLTokenizer(tokens), grammar, log_level=0)

    def begins(self, text: bytes) -> bool:
        matcher = self._new.deep_copy()
        return matcher.validate_tokens(list(text)) == len(text)

    def is_whole(self, text: bytes) -> bool:
        matcher = self._new.deep_copy()
        return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


class _Bytes:
    """A tokenizer of one token per byte."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = ()

    def __init__(self) -> None:
        self.tokens = [*(bytes([code]) for code in range(256)), b""]
