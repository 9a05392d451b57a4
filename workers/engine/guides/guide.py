"""What may come next in one request's output."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from workers.engine.guides.vocabulary import Vocabulary
from workers.engine.messages.core import OutputGuide

if TYPE_CHECKING:
    from llguidance import LLMatcher

_LONGEST = 300  # characters of what the library says is wrong


def is_void(spec: OutputGuide) -> bool:
    """Return whether it allows everything at any time."""
    return not spec.grammar and not (spec.in_reasoning and spec.reasoning_end and spec.reasoning_budget >= 0)


def error_of(matcher: LLMatcher) -> str:
    """Return the first line of what the library says is wrong, or ""."""
    if not matcher.is_error():
        return ""
    lines = (line.strip() for line in matcher.get_error().splitlines())
    return next(filter(None, lines), "unknown error")[:_LONGEST].rstrip(":")


class Guide:
    """The state of an output: first, where it has one, its reasoning; then its grammar.

    It is advanced by each token that the host knows. So it depends on the output alone: neither
    preemption nor a step that is taken back changes it, and from a checkpoint it is made anew.
    """

    def __init__(
        self, spec: OutputGuide, vocabulary: Vocabulary, matcher: LLMatcher | None, ends: Collection[int]
    ) -> None:
        """`matcher` is this guide's own, None where everything is allowed; `ends` are the tokens
        that end the output.
        """
        self.ends = sorted(token for token in ends if 0 <= token < vocabulary.vocab_size)
        self.matcher = matcher
        self.grammar = spec.grammar
        self.complete = False
        """Whether nothing more may come, not even the end of the text."""
        self._vocabulary = vocabulary
        self._marker = spec.reasoning_end.encode()
        reasons = spec.in_reasoning and bool(self._marker)
        self._opening = spec.reasoning_begin.encode() if reasons else b""  # what is still to come, while it may
        self._fits = matcher is not None  # whether the output so far follows the grammar
        self._reasoning = reasons and not self._opening
        self._tail = b""
        self._budget = spec.reasoning_budget
        self._forced: list[int] = []  # tokens of the marker that are still to come

    @property
    def finished(self) -> bool:
        """Whether everything is allowed from now on."""
        return not self._reasoning and not self._opening and self.matcher is None

    @property
    def in_grammar(self) -> bool:
        """Whether the next token must follow the grammar, or be one of `other_tokens`."""
        return not self._reasoning and self._fits

    def other_tokens(self) -> list[int]:
        """Return the tokens that are allowed whatever the grammar says: those that begin the
        reasoning, where it may begin, and the only one where it has to end. None where no grammar
        keeps others out.
        """
        if self._opening:
            return [] if self.matcher is None else self._vocabulary.beginnings(self._opening)
        forced = self.forced_token()
        return [] if forced is None else [forced]

    def forced_token(self) -> int | None:
        """Return the only token allowed, where the reasoning has to end."""
        if self._reasoning and not self._budget and not self._forced:
            self._forced = self._vocabulary.spell(self._marker)
        return self._forced[0] if self._forced else None

    def replay(self, tokens: Iterable[int]) -> str:
        """Advance by what was generated before; return what is wrong with it, in a sentence."""
        for token in tokens:
            if self.complete or self.advance(token):
                return "the output so far does not follow the grammar that it should go on with"
        return ""

    def advance(self, token: int) -> str:
        """Record the next token, -1 where none could be drawn; return why the output cannot go on,
        in a sentence, or "".
        """
        if token < 0:
            return (
                "no token is left to go on with: the output's grammar allows none that allowed_token_ids, bad_words"
                " and min_tokens leave; give up one of them"
            )
        if self._opening:
            return self._open(token)
        if self._reasoning:
            return self._reason(token)
        return self._match([token])

    def may_end(self) -> bool:
        """Return whether the grammar lets the text end here."""
        return self.matcher is not None and self.matcher.is_accepting()

    def failure(self) -> str:
        """Return why the grammar cannot be followed any further, in a sentence, or ""."""
        what = "" if self.matcher is None else error_of(self.matcher)
        return f"the output's grammar cannot be followed: {what}" if what else ""

    def _open(self, token: int) -> str:
        """Record a token by which it may be known whether there is reasoning."""
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
                return "the output begins neither its reasoning nor what its grammar allows"
        return self._match([token]) if self._fits else ""

    def _begin_reasoning(self, text: bytes) -> str:
        """Give up what was matched so far; `text` is the reasoning's."""
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
            return "the reasoning cannot be ended: another token was drawn than its end needs"
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
        """For what the token that ends the reasoning goes on with."""
        tokens = self._vocabulary.spell(text)
        return self._match(tokens) if tokens else f"no tokens make up {text!r}, which comes behind the reasoning"

    def _match(self, tokens: list[int]) -> str:
        matcher = self.matcher
        if matcher is None or (tokens[-1] in self.ends and self.may_end()):
            return ""
        matcher.consume_tokens(tokens)
        failure = self.failure()
        self.complete = not failure and matcher.is_stopped()
        return failure
