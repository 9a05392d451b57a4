"""Track one choice of one prompt: its tokens, text and log probabilities, how much is published,
and how it ended.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator

import msgspec

from jobs.protocol.requests import ChoiceCheckpoint, TokenChunk
from jobs.protocol.results import Choice, FinishReason, PositionLogprobs, TokenLogprob
from jobs.protocol.validation import Call
from workers.engine.messages.core import EngineRequest, LiveShare, OutputGuide, SamplingParams, TokenLogprobs
from workers.replica.parsed_text import ParsedText
from workers.replica.prepared import Prompt
from workers.text.stop_strings import StopStrings
from workers.text.tokenizer import TextTokenizer


class Sequence:
    """One choice of a prompt.

    Output tokens are decoded only when their text is needed: at once for stop strings, else for
    publishing or at the end. A sequence resumes from its checkpoint, which may already be complete:
    by a stop string, a stop token or its length.
    """

    __slots__ = (
        "_call",
        "_decoded",
        "_detokenizer",
        "_ending",
        "_min_tokens",
        "_parsed",
        "_prompt",
        "_published_characters",
        "_resumed_tokens",
        "_sampling",
        "_stops",
        "_text",
        "_tokenizer",
        "announced",
        "cached_tokens",
        "device_seconds",
        "ended",
        "last_token",
        "logprobs",
        "number",
        "published_tokens",
        "token_ids",
    )

    def __init__(
        self,
        number: int,
        prompt: Prompt,
        call: Call,
        tokenizer: TextTokenizer,
        checkpoint: ChoiceCheckpoint | None,
        parsed: ParsedText | None = None,
    ) -> None:
        """Create a sequence, from its checkpoint if there is one.

        `number` counts the choices of all prompts of a request; it is the `choice` of the sampling
        noise. `parsed` parses the text, if a parser applies.
        """
        self.number = number
        self.token_ids: list[int] = [] if checkpoint is None else list(checkpoint.token_ids)
        self.published_tokens = self._resumed_tokens = len(self.token_ids)
        # Prompt tokens found in the prefix cache of its first engine
        self.cached_tokens = 0 if checkpoint is None else checkpoint.cached_tokens
        self.device_seconds = 0.0
        self._prompt = prompt
        self._call = call
        self._sampling = prompt.sampling
        self._tokenizer = tokenizer
        self._parsed = parsed
        needed = parsed is not None and tokenizer.are_special(parsed.parsing.markers)
        skipped = call.skip_special_tokens and not needed
        self._detokenizer = tokenizer.detokenizer(prompt.token_ids, skipped, after_text=call.echo)
        self._stops = StopStrings(call.stop, call.include_stop_str_in_output) if call.stop else None
        self._min_tokens = prompt.sampling.min_tokens
        self._decoded = 0
        self._text = prompt.text
        self._published_characters = 0 if checkpoint is None else checkpoint.text_length
        self.announced = checkpoint is not None  # whether anything was published
        self.ended = False  # whether it gets no more tokens
        self.last_token = 0.0  # time of its newest token from this worker, on the monotonic clock
        self._ending: tuple[FinishReason, int | str | None] = "stop", None
        self.logprobs: list[PositionLogprobs] | None = None
        if prompt.sampling.logprobs >= 0:
            self.logprobs = [] if checkpoint is None else list(checkpoint.logprobs)
        self._recognize_end()

    @property
    def resumed(self) -> bool:
        """Return whether an earlier worker began it."""
        return self._resumed_tokens > 0

    @property
    def started(self) -> bool:
        """Return whether this worker generated any of its tokens."""
        return self.new_tokens > 0

    @property
    def new_tokens(self) -> int:
        """Return how many tokens this worker generated."""
        return len(self.token_ids) - self._resumed_tokens

    @property
    def prompt_length(self) -> int:
        return len(self._prompt.token_ids)

    @property
    def finish_reason(self) -> FinishReason:
        """Return why it ended."""
        return self._ending[0]

    @property
    def length(self) -> int:
        """Return the number of prompt and output tokens."""
        return self.prompt_length + len(self.token_ids)

    @property
    def tokens_left(self) -> int:
        """Return how many more tokens it may get."""
        return self._sampling.max_tokens - len(self.token_ids)

    @property
    def mean_logprob(self) -> float:
        """Return the mean log probability per token, which ranks the choices of `best_of`."""
        chosen = [position.chosen.logprob or 0.0 for position in self.logprobs or ()]
        return sum(chosen) / max(1, len(chosen))

    def engine_request(
        self,
        request_id: int,
        *,
        live: bool,
        with_prompt_logprobs: bool,
        batch_id: str = "",
        arrived: float = 0.0,
        guide: OutputGuide | None = None,
        share: LiveShare | None = None,
    ) -> EngineRequest:
        """Return the engine request that continues this sequence.

        A sequence with nothing left to generate only scores the prompt. `batch_id` groups requests
        with outputs of similar length. `arrived` is the time in `EngineRequest`.
        """
        prompt_logprobs = self._sampling.prompt_logprobs if with_prompt_logprobs else -1
        if self.ended:
            output: list[int] = []
            sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=prompt_logprobs)
        else:
            output = self.token_ids.copy()
            sampling = self._sampling
            if (self.number, prompt_logprobs) != (sampling.choice, sampling.prompt_logprobs):
                sampling = msgspec.structs.replace(sampling, choice=self.number, prompt_logprobs=prompt_logprobs)
        return EngineRequest(
            request_id,
            self._prompt.token_ids,
            output,
            sampling,
            live,
            self._call.priority,
            batch_id,
            self._stops is not None,
            0.0 if self.resumed else arrived,  # it has waited for its first worker
            None if self.ended else guide,
            share=share,
        )

    def take(self, token_ids: list[int], stop_token: int = -1, logprobs: list[TokenLogprobs] | None = None) -> bool:
        """Append generated tokens in order; return True if a stop string ended the sequence.

        Tokens after the stop string are discarded. A `stop_token` other than -1 is the last of the
        tokens: it counts but adds no text, unless the call includes it. `logprobs` has one item per
        token, if requested.
        """
        stopped = False
        if self._stops is None:
            self.token_ids += token_ids
        else:
            stopped = self._take_until_stop(self._stops, token_ids, stop_token)
        if self.logprobs is not None and logprobs is not None:
            kept = len(self.token_ids) - len(self.logprobs)
            self.logprobs += positions(logprobs[:kept], self._tokenizer.token_bytes)
        return stopped

    def end(self, reason: FinishReason, stop_token: int = -1) -> None:
        """End the sequence; `stop_token` as for `take`.

        A stop string already found takes precedence over `reason`.
        """
        stop_reason: int | str | None = stop_token if stop_token in self._call.stop_token_ids else None
        self._decode(self._shown_tokens(stop_token))
        self._decoded = len(self.token_ids)
        text = self._detokenizer.finish()
        self._text += text if self._stops is None else self._stops.feed(text) + self._stops.finish()
        if self._parsed is not None:
            self._parsed.finish(self._text, len(self.token_ids))
        if self._stops is not None and self._stops.matched is not None:
            reason, stop_reason = "stop", self._stops.matched
        self.ended, self._ending = True, (reason, stop_reason)

    def chunk(self) -> TokenChunk | None:
        """Return the unpublished tokens and text, and mark them published; None if there are
        none.
        """
        index, offset = self.published_tokens, self._published_characters
        if index == len(self.token_ids) and not self.ended:
            return None
        self._decode(len(self.token_ids))
        self.published_tokens = len(self.token_ids)
        self._published_characters = max(offset, len(self._text))
        text, token_ids = self._text[offset:], self.token_ids[index:]
        parsed = None if self._parsed is None else self._parsed.deltas(index)
        if not (token_ids or text or parsed) and self.announced:
            return None
        chunk = TokenChunk(
            self.number, index, token_ids, text, offset, None if self.logprobs is None else self.logprobs[index:]
        )
        chunk.parsed = parsed
        if not self.announced:
            self.announced = True
            chunk.cached_tokens = self.cached_tokens
            chunk.prompt_tokens = self.prompt_length
            chunk.prompt_token_ids = self._prompt.token_ids if self._call.return_token_ids else None
        return chunk

    def unpublish(self, name: str) -> None:
        """Mark everything unpublished, for the choice `name` of another request (see
        `ParsedText`).
        """
        self.published_tokens = self._published_characters = 0
        self.announced = False
        if self._parsed is not None:
            self._parsed.name = name

    @property
    def content(self) -> str:
        """Return the text without reasoning, once it has ended."""
        return self._text if self._parsed is None else self._parsed.content

    @property
    def reasoning_tokens(self) -> int:
        """Return the number of tokens up to and including the end of the reasoning."""
        if self._parsed is None or not self._parsed.has_reasoning:
            return 0
        ends = self._parsed.parsing.reasoning_ends or ()

        def has_ended(tokens: int) -> bool:
            text = self._tokenizer.decode(self.token_ids[:tokens], self._prompt.token_ids, skip_special_tokens=False)
            return any(end in text for end in ends)

        tokens = len(self.token_ids)
        ended = bisect.bisect_left(range(tokens + 1), True, key=has_ended)
        return min(ended, tokens)

    def choice(self, index: int, prompt_logprobs: list[PositionLogprobs] | None) -> Choice:
        """Return the choice for the response, once it has ended."""
        call, logprobs = self._call, self.logprobs if self._call.logprobs is not None else None
        if logprobs is not None and call.echo:
            logprobs = [*at_most(prompt_logprobs or [], call.logprobs or 0), *logprobs]
        of_prompt = None if call.prompt_logprobs is None else at_most(prompt_logprobs or [], call.prompt_logprobs)
        choice = Choice(
            index,
            self._text,
            *self._ending,
            logprobs,
            of_prompt,
            token_ids=self.token_ids if call.return_token_ids else None,
            prompt_token_ids=self._prompt.token_ids if call.return_token_ids else None,
            tokens_as_ids=call.return_tokens_as_token_ids,
        )
        return choice if self._parsed is None else self._parsed.add_to(choice)

    def _recognize_end(self) -> None:
        """End the sequence if its checkpoint is already complete: by the last token, a stop string
        or its length.
        """
        last = self.token_ids[-1] if self.token_ids else -1
        stop_token = last if last in self._sampling.stop_token_ids else -1
        if self._stops is not None:
            self._decode(self._shown_tokens(stop_token))
        if stop_token >= 0 or (self._stops is not None and self._stops.matched is not None):
            self.end("stop", stop_token)
        elif self.tokens_left <= 0:
            self.end("length")

    def _shown_tokens(self, stop_token: int) -> int:
        """Return how many of the tokens add text, if the last is `stop_token`."""
        return len(self.token_ids) - (stop_token >= 0 and not self._call.include_stop_str_in_output)

    def _take_until_stop(self, stops: StopStrings, token_ids: list[int], stop_token: int) -> bool:
        for token_id in token_ids[:-1] if stop_token >= 0 else token_ids:
            self.token_ids.append(token_id)
            self._decode(len(self.token_ids))
            if stops.matched is not None:
                return True
        if stop_token >= 0:
            self.token_ids.append(stop_token)
        return False

    def _decode(self, upto: int) -> None:
        """Decode tokens into text; a streaming parser reads the text of each token separately."""
        if self._parsed is None or not self._parsed.follows:
            self._add_text(upto)
            return
        for tokens in range(self._decoded + 1, upto + 1):
            self._add_text(tokens)
            self._parsed.read(self._text, tokens)

    def _add_text(self, upto: int) -> None:
        """Decode tokens; the first `min_tokens` cannot complete a stop string."""
        stops = self._stops
        if stops is not None and self._decoded < self._min_tokens:
            early = min(upto, self._min_tokens)
            self._text += stops.pass_by(self._detokenizer.feed(self.token_ids[self._decoded : early]))
            self._decoded = early
        if self._decoded < upto:
            text = self._detokenizer.feed(self.token_ids[self._decoded : upto])
            self._decoded = upto
            self._text += text if stops is None else stops.feed(text)


def positions(items: Iterable[TokenLogprobs], token_bytes: Callable[[int], bytes]) -> Iterator[PositionLogprobs]:
    """Yield the engine's log probabilities with the tokens' texts."""
    for item in items:
        ranks = itertools.chain((item.rank,), itertools.count(1))
        own, *likeliest = map(TokenLogprob, item.token_ids, map(token_bytes, item.token_ids), item.logprobs, ranks)
        yield PositionLogprobs(own, likeliest)


def at_most(items: Iterable[PositionLogprobs], most: int) -> list[PositionLogprobs]:
    """Return the same positions with at most `most` top tokens each."""
    return [item if len(item.top) <= most else PositionLogprobs(item.chosen, item.top[:most]) for item in items]
