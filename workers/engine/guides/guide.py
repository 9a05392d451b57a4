"""The state of one request's guided output."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from workers.engine.guides.vocabulary import Vocabulary
from workers.engine.messages.core import OutputGuide

if TYPE_CHECKING:
    from llguidance import LLMatcher

_LONGEST = 300  # characters of the library's error text
_DEAD_END = "NoExtension"  # the beginning of the library's error text
_QUOTED = 40  # bytes of the output that an error quotes

_LONG_SECONDS = 0.005  # of a processor for one token
_MOST_LONG_SECONDS = 1.0  # of a processor for all tokens of an output that take so long


def is_void(spec: OutputGuide) -> bool:
    """Return whether a guide allows every token at any time."""
    return not spec.grammar and not (spec.in_reasoning and spec.reasoning_end and spec.reasoning_budget >= 0)


def error_of(matcher: LLMatcher) -> str:
    """Return the first line of the library's error text, or ""."""
    if not matcher.is_error():
        return ""
    lines = (line.strip() for line in matcher.get_error().splitlines())
    return next(filter(None, lines), "unknown error")[:_LONGEST].rstrip(":")


ALL_EXCLUDED_BY_GRAMMAR = (
    "no token is left to go on with: the output's grammar allows none that allowed_token_ids, bad_words and min_tokens"
    " leave; give up one of them"
)
"""The error of a request whose grammar and parameters together allow no token."""

_CANNOT_FOLLOW = "the output's grammar cannot be followed: "


class Guide:
    """The state of an output: first its reasoning, if any, then its grammar.

    Each token that is known to the host advances it. So it depends on the output alone: neither
    preemption nor an abandoned step changes it, and it is created again from a checkpoint.

    Until `advanced` and `ready` it belongs to a thread of `GuideThreads`, which calls `take` and
    `prepare`.
    """

    def __init__(
        self, spec: OutputGuide, vocabulary: Vocabulary, matcher: LLMatcher | None, ends: Collection[int]
    ) -> None:
        """Start at the beginning of an output.

        `matcher` belongs to this guide alone; None allows every token. `ends` are the tokens that
        end the output.
        """
        self.ends = sorted(token for token in ends if 0 <= token < vocabulary.vocab_size)
        self.matcher = matcher
        self.grammar = spec.grammar
        self.complete = False
        """Whether no token may follow, not even the end of the text."""
        self.advanced = True
        """Whether `complete`, `finished` and `error` consider the output's last token."""
        self.ready = False
        """Whether `mask` and `mask_error` are those of the next token."""
        self.mask: NDArray[np.int32] | None = None
        """The tokens that may come next, see `TokenMasks`; None for all."""
        self.error = ""
        """Why the output's last token does not fit, as a sentence."""
        self.mask_error = ""
        """Why no token can come next, as a sentence."""
        self.slow = False
        """Whether its last token took longer than a step should wait."""
        self.awaited = False
        """Whether its request is held until it is ready."""
        self.dropped = False
        """Whether its request has ended."""
        self.work: Future[None] | None = None
        """The last work of a thread on it."""
        self._long_seconds = self._taking = 0.0
        self._vocabulary = vocabulary
        self._marker = spec.reasoning_end.encode()
        reasons = spec.in_reasoning and bool(self._marker)
        self._opening = spec.reasoning_begin.encode() if reasons else b""  # rest of the marker that may still come
        self._fits = matcher is not None  # whether the output so far follows the grammar
        self._reasoning = reasons and not self._opening
        self._tail = b""
        self._end = b""  # the last bytes that followed the grammar
        self._budget = spec.reasoning_budget
        self._forced: list[int] = []  # remaining tokens of the end marker

    @property
    def words(self) -> int:
        """Return the size of a mask."""
        return self._vocabulary.words

    @property
    def finished(self) -> bool:
        """Return whether every token is allowed from now on."""
        return not self._reasoning and not self._opening and self.matcher is None

    @property
    def in_grammar(self) -> bool:
        """Return whether the next token must follow the grammar, or be one of `other_tokens`."""
        return not self._reasoning and self._fits

    def other_tokens(self) -> list[int]:
        """Return the tokens that are allowed regardless of the grammar.

        They are the tokens that begin the reasoning, while it may begin, or the one token that
        continues its enforced end. There are none if no grammar restricts the next token.
        """
        if self._opening:
            return [] if self.matcher is None else self._vocabulary.beginnings(self._opening)
        forced = self.forced_token()
        return [] if forced is None else [forced]

    def forced_token(self) -> int | None:
        """Return the only allowed token if the reasoning must end, else None."""
        if self._reasoning and not self._budget and not self._forced:
            self._forced = self._vocabulary.spell(self._marker)
        return self._forced[0] if self._forced else None

    def replay(self, tokens: Iterable[int]) -> str:
        """Advance by tokens generated earlier; return an error text, or ""."""
        for token in tokens:
            began = time.thread_time()
            if self.complete or self.advance(token):
                return "the output so far does not follow its grammar"
            self._spend(time.thread_time() - began)
            if self.mask_error:
                return self.mask_error
        return ""

    def take(self, token: int) -> None:
        """Advance by a token that was drawn; never raises."""
        if self.dropped:
            return
        began = time.thread_time()
        try:
            self.error = self.advance(token)
        except BaseException as error:  # includes the library's panics
            self.error = _CANNOT_FOLLOW + str(error)
        self._taking = time.thread_time() - began
        self.advanced = True

    def prepare(self, slow_seconds: float = _LONG_SECONDS) -> None:
        """Make the mask of the next token; never raises.

        The guide is slow if this and the last token took more than `slow_seconds` of a processor.
        """
        began = time.thread_time()
        if not (self.dropped or self.error or self.complete):
            try:
                self.mask = self._make_mask()
            except BaseException as error:  # includes the library's panics
                self.mask_error = _CANNOT_FOLLOW + str(error)
            seconds = self._taking + time.thread_time() - began
            self.slow = seconds > slow_seconds
            self._spend(seconds)
        self.ready = True

    def advance(self, token: int) -> str:
        """Advance by the next token; return an error text, or ""."""
        if self._opening:
            return self._open(token)
        if self._reasoning:
            return self._reason(token)
        return self._match([token])

    def may_end(self) -> bool:
        """Return whether the grammar allows the text to end here."""
        return self.matcher is not None and self.matcher.is_accepting()

    def failure(self) -> str:
        """Return why the grammar cannot be followed any further, or ""."""
        what = "" if self.matcher is None else error_of(self.matcher)
        if what.startswith(_DEAD_END):
            place = f"after {self._end.decode(errors='replace')!r}" if self._end else "first"
            what = f"no token can come {place}, and the text may not end there"
        return _CANNOT_FOLLOW + what if what else ""

    def _make_mask(self) -> NDArray[np.int32] | None:
        """Return the mask; it counts for nothing if there is a `mask_error`."""
        others = self.other_tokens()
        if not (self.in_grammar or others):
            return None
        mask = np.zeros(self._vocabulary.library_words, np.int32)
        bits = mask.view(np.uint32)
        if self.in_grammar and self.matcher is not None:
            self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self.mask_error = self.failure()
            if self.may_end():
                _allow(bits, self.ends)
        _allow(bits, others)
        return mask[: self._vocabulary.words]

    def _spend(self, seconds: float) -> None:
        """Count the processor time for a token; fail if long ones take too much."""
        if seconds > _LONG_SECONDS:
            self._long_seconds += seconds
        if self._long_seconds > _MOST_LONG_SECONDS and not self.mask_error:
            self.mask_error = (
                f"{_CANNOT_FOLLOW}its tokens take too long, the last one {1000 * seconds:.0f} ms of a processor; make"
                " it simpler, with fewer ways to read a text"
            )

    def _open(self, token: int) -> str:
        """Advance by a token of the opening, which decides whether there is reasoning."""
        text, opening = self._vocabulary.tokens[token], self._opening
        if text.startswith(opening):
            self._opening, self._reasoning = b"", True
            return self._begin_reasoning(text[len(opening) :])
        if text and opening.startswith(text):
            self._opening = opening[len(text) :]
            self._fits = self._allows(token)
        else:
            self._opening = b""
            if self.matcher is not None and not self._fits:
                return "the output begins neither with reasoning nor with a token of its grammar"
        return self._match([token]) if self._fits else ""

    def _begin_reasoning(self, text: bytes) -> str:
        """Reset the matcher and begin the reasoning with `text`."""
        if self.matcher is not None:
            self.matcher.reset()
            self._fits = True
        return self._read_reasoning(text)

    def _allows(self, token: int) -> bool:
        return self._fits and self.matcher is not None and self.matcher.validate_tokens([token]) == 1

    def _reason(self, token: int) -> str:
        if token in self.ends:
            return ""
        if self.forced_token() is not None and self._forced.pop(0) != token:
            return "the reasoning cannot be ended: a token was drawn that does not belong to its end"
        self._budget -= self._budget > 0
        return self._read_reasoning(self._vocabulary.tokens[token])

    def _read_reasoning(self, text: bytes) -> str:
        text = self._tail + text
        _, marker, rest = text.partition(self._marker)
        if not marker:
            self._tail = text[-len(self._marker) :]
            return ""
        self._reasoning, self._forced = False, []
        rest = rest.lstrip()
        return self._match_text(rest) if rest else ""

    def _match_text(self, text: bytes) -> str:
        """Match the text after the end of the reasoning in the same token."""
        tokens = self._vocabulary.spell(text)
        return self._match(tokens) if tokens else f"no tokens spell {text!r}, the text after the reasoning"

    def _match(self, tokens: list[int]) -> str:
        matcher = self.matcher
        if matcher is None or (tokens[-1] in self.ends and self.may_end()):
            return ""
        matcher.consume_tokens(tokens)
        self._end = (self._end + b"".join(self._vocabulary.tokens[token] for token in tokens))[-_QUOTED:]
        failure = self.failure()
        self.complete = not failure and matcher.is_stopped()
        return failure


def _allow(mask: NDArray[np.uint32], tokens: Sequence[int]) -> None:
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
