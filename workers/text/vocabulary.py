"""Derive from a vocabulary how few tokens a text can have, before tokenization."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

_COMPOSED = 3  # most bytes that Unicode's composition (NFC) can merge into one
_KEEPS_ALL = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"})


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Return the most bytes of text that one token can have, or None if unlimited or unknown.

    The number is known if every byte of a text ends up in some token: none is dropped, merged into
    an unknown token, or absorbed by a neighboring token.
    """
    model = tokenizer.model
    if not isinstance(model, models.BPE) or any(
        token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()
    ):
        return None
    pre_tokenizers, normalizers = list(_parts(tokenizer.pre_tokenizer)), list(_parts(tokenizer.normalizer))
    if not all(part["type"] in _KEEPS_ALL and part.get("behavior") != "Removed" for part in pre_tokenizers):
        return None
    if not all(_grows(part) or part["type"] == "NFC" for part in normalizers):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if any(part["type"] == "ByteLevel" for part in pre_tokenizers):
        complete = all(character in vocabulary for character in ByteLevel.alphabet())
    else:
        complete = model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not complete:
        return None
    longest = max(len(token.encode()) for token in vocabulary)
    return longest * _COMPOSED if any(part["type"] == "NFC" for part in normalizers) else longest


def _grows(normalizer: dict[str, Any]) -> bool:
    """Return whether the normalizer can only make a text longer."""
    if normalizer["type"] == "Replace" and "String" in normalizer["pattern"]:
        return len(normalizer["pattern"]["String"].encode()) <= len(normalizer["content"].encode())
    return bool(normalizer["type"] == "Prepend")


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer in order."""
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()))


def _flat(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state["type"] != "Sequence":
        yield state
        return
    for part in state.get("pretokenizers") or state.get("normalizers") or []:
        yield from _flat(part)
