"""Define a prepared request: everything known before its first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from jobs.protocol.output_format import OutputFormat
from jobs.protocol.requests import Claim, Finished
from jobs.protocol.validation import Call
from workers.engine.messages.core import MAX_SEED, OutputGuide, SamplingParams
from workers.replica.pooling_in_flight import PreparedPooling
from workers.text.parsers.base import OutputParser
from workers.text.tokenizer import TextTokenizer

_MULTIPLIER = 6364136223846793005  # Knuth's MMIX generator, full period of 64 bits


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the answers of a request are parsed.

    `reasoning_ends` are the texts that end the reasoning: empty if the answers begin after it, None
    if reasoning is not parsed. `markers` are texts that the parser needs even if they are special
    tokens, which the call would omit. With `short_ids`, ids of tool calls fit Mistral's templates.
    """

    new_parser: Callable[[], OutputParser]
    reasoning_ends: tuple[str, ...] | None = None
    markers: tuple[str, ...] = ()
    short_ids: bool = False


@dataclass(slots=True)
class Prompt:
    """One prompt of a request, ready for the engine.

    `sampling` applies to every choice; its `choice` field is ignored. `stop_token_ids` are all
    tokens that end a choice, the model's own included. `logprobs` is 0 if log probabilities only
    rank the choices, else the number requested; `prompt_logprobs` is the larger of the needs of
    echo and the call's own `prompt_logprobs`. `max_tokens` may be 0.
    """

    token_ids: list[int]
    sampling: SamplingParams
    text: str = ""  # with echo: text that precedes each choice

    def with_next_seed(self) -> Prompt:
        """Return the prompt with the next seed, for another try; it is derived from this seed."""
        seed = (self.sampling.seed * _MULTIPLIER + 1) & MAX_SEED
        return Prompt(self.token_ids, msgspec.structs.replace(self.sampling, seed=seed), self.text)


@dataclass(slots=True)
class PreparedRequest:
    """A claimed request that can run: parsed, rendered, tokenized and checked against the model's
    limits.

    `guide` is the output guide without the grammar compiled from `output_format`; it is set if
    `output_format` is. `retries` is how often the request may run again if an answer lacks that
    form.
    """

    claim: Claim
    call: Call
    prompts: list[Prompt]  # one for a chat
    tokenizer: TextTokenizer  # to decode the output
    output_format: OutputFormat | None = None
    guide: OutputGuide | None = None
    parsing: Parsing | None = None
    retries: int = 0
    system_fingerprint: str | None = None
    digest: bytes = b""  # from `duplicates.digest_of`


Prepared = PreparedRequest | PreparedPooling
Prepare = Callable[[Sequence[Claim]], tuple[list[Prepared], list[Finished]]]
"""Prepares claims: returns requests, and error results of those that cannot run."""
