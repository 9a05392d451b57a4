"""What preparation makes of a claim: all that is known of a request before its first token."""

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

_MULTIPLIER = 6364136223846793005  # of Knuth's generator (MMIX), whose period is all of 64 bits


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the answers of a request are read.

    `reasoning_ends` are the texts that end their reasoning: none where they begin behind it, None
    where no reasoning is looked for. `markers` are texts that the parser needs even where they are
    special tokens, which the call would leave out. With `short_ids` a call's id is one that
    Mistral's templates take.
    """

    new_parser: Callable[[], OutputParser]
    reasoning_ends: tuple[str, ...] | None = None
    markers: tuple[str, ...] = ()
    short_ids: bool = False


@dataclass(slots=True)
class Prompt:
    """One prompt of a request, as the engine takes it.

    `sampling` is meant for every choice: its `choice` is not looked at. `stop_token_ids` are all
    that can end a choice, the model's own among them. `logprobs` is 0 where only the best of
    several choices count, else what the call asks for; `prompt_logprobs` is what echo or the call's
    own `prompt_logprobs` needs, whichever is more. `max_tokens` may be 0.
    """

    token_ids: list[int]
    sampling: SamplingParams
    text: str = ""  # with echo: what precedes every choice's text

    def with_next_seed(self) -> Prompt:
        """Return the same to be answered in another way; the seed follows from this one's."""
        seed = (self.sampling.seed * _MULTIPLIER + 1) & MAX_SEED
        return Prompt(self.token_ids, msgspec.structs.replace(self.sampling, seed=seed), self.text)


@dataclass(slots=True)
class PreparedRequest:
    """A claimed request that can run: parsed, rendered, tokenized and checked against the model's
    limits.

    `guide` is all of what guides its answers but the grammar that `output_format` becomes; it is
    there wherever `output_format` is. `retries` is how often at most it is answered again where an
    answer lacks that form.
    """

    claim: Claim
    call: Call
    prompts: list[Prompt]  # one for chats
    tokenizer: TextTokenizer  # for the way back
    output_format: OutputFormat | None = None
    guide: OutputGuide | None = None
    parsing: Parsing | None = None
    retries: int = 0
    system_fingerprint: str | None = None
    digest: bytes = b""  # as of `duplicates.digest_of`


Prepared = PreparedRequest | PreparedPooling
Prepare = Callable[[Sequence[Claim]], tuple[list[Prepared], list[Finished]]]
"""Makes requests of claims, and error results of those that cannot run."""
