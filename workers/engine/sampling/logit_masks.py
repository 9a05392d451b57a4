"""Change or rule out logits by request: bias, allowed tokens, min_tokens, bad words.

Only the affected logits are accessed, by position in the flat [R * vocab] view.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.cuda.staging import to_device
from workers.engine.messages.core import SamplingParams
from workers.engine.sampling.rows import Lists, LogitsStage, SampledRows


def logit_stages(num_slots: int, vocab_size: int, eos_token_ids: Collection[int]) -> tuple[LogitsStage, ...]:
    """Return the stages of this file, in execution order."""
    return LogitBias(), AllowedTokens(vocab_size), MinTokens(num_slots, vocab_size, eos_token_ids), BadWords()


class LogitBias:
    """Add the request's bias to logits."""

    def __init__(self) -> None:
        self._bias = Lists()

    def uses(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def set(self, slot: int, params: SamplingParams) -> None:
        bias = dict(params.logit_bias)
        self._bias.put(slot, np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32))

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        users = self._bias.users(rows.slots)
        if not users:
            return
        at, tokens, bias = self._bias.gather(rows.slots, users)
        places = _places(logits, at, tokens)
        logits.view(-1).index_add_(0, places, to_device(bias, logits.device))


class AllowedTokens:
    """Rule out every token that is not allowed."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._allowed = Lists()

    def uses(self, params: SamplingParams) -> bool:
        return bool(params.allowed_token_ids)

    def set(self, slot: int, params: SamplingParams) -> None:
        allowed = {token for token in params.allowed_token_ids if 0 <= token < self._vocab_size}
        self._allowed.put(slot, np.array(sorted(allowed), np.int64))

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        users = self._allowed.users(rows.slots)
        if not users:
            return
        places, flat = _places(logits, *self._allowed.gather(rows.slots, users)), logits.view(-1)
        kept = flat[places]
        logits.index_fill_(0, to_device(np.array(users, np.int64), logits.device), -torch.inf)
        flat.index_copy_(0, places, kept)


class MinTokens:
    """Rule out stop and end-of-text tokens among a request's first `min_tokens` tokens."""

    def __init__(self, num_slots: int, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._until = np.zeros(num_slots, np.int64)
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._stops = Lists()

    def uses(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def set(self, slot: int, params: SamplingParams) -> None:
        self._until[slot] = params.min_tokens
        stops = self._eos_token_ids.union(params.stop_token_ids) if params.min_tokens else ()
        self._stops.put(slot, np.array([token for token in stops if 0 <= token < self._vocab_size], np.int64))

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        early = rows.indices < self._until[rows.slots]
        if not early.any():
            return
        users = [row for row in self._stops.users(rows.slots) if early[row]]
        if users:
            logits.view(-1).index_fill_(0, _places(logits, *self._stops.gather(rows.slots, users)), -torch.inf)


class BadWords:
    """Rule out the last token of a word if the output ends with the word's other tokens."""

    def __init__(self) -> None:
        self._last = Lists()  # by word: its last token, and the number of tokens before it
        # By earlier token of a word: its distance from the last token, and its id
        self._rest = Lists()

    def uses(self, params: SamplingParams) -> bool:
        return bool(params.bad_words)

    def set(self, slot: int, params: SamplingParams) -> None:
        words = set(params.bad_words)
        rest = [(distance, token) for word in words for distance, token in enumerate(word[-2::-1], 1)]
        self._last.put(
            slot,
            np.array([word[-1] for word in words], np.int64),
            np.array([len(word) - 1 for word in words], np.int64),
        )
        self._rest.put(slot, *np.array(rest, np.int64).reshape(-1, 2).T)

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        users = self._last.users(rows.slots)
        if not users:
            return
        at, last, before = self._last.gather(rows.slots, users)
        missing = torch.zeros(
            len(last), device=logits.device
        )  # number of tokens by which the output's end differs from the word's beginning
        longer = self._rest.users(rows.slots)
        if longer:
            row, distance, token = self._rest.gather(rows.slots, longer)
            position = rows.lengths[row] - distance
            in_output = position >= rows.prompt_lengths[row]
            word = np.repeat(np.arange(len(last)), before)
            host = np.stack((rows.slots[row], np.maximum(position, 0), token, word, in_output))
            slot, column, expected, of_word, inside = to_device(host, logits.device)
            differs = (rows.tokens[slot, column] != expected) | (inside == 0)
            missing.index_add_(0, of_word, differs.float())
        # The minimum makes the order of words with the same last token irrelevant.
        limits = torch.where(missing == 0, -torch.inf, torch.inf)
        logits.view(-1).scatter_reduce_(0, _places(logits, at, last), limits, "amin")


def _places(logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> Tensor:
    return to_device(rows * logits.shape[1] + tokens, logits.device)
