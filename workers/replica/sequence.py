"""One choice of one prompt: its tokens, their text and log probabilities, how much of that is
published, and how it ended.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator

import msgspec

from jobs.protocol.requests import ChoiceCheckpoint, TokenChunk
from jobs.protocol.results import Choice, FinishReason, PositionLogprobs, TokenLogprob
from jobs.protocol.validation import Call
from workers.engine.messages.core import EngineRequest, OutputGuide, SamplingParams, TokenLogprobs
from workers.replica.parsed_text import ParsedText
from workers.replica.prepared import Prompt
from workers.text.stop_strings import StopStrings
from workers.text.tokenizer import TextTokenizer


class Sequence:
    """Output tokens become text only when someone needs the text: at once for stop strings, else
    when they are published or at the end.

    It starts from its checkpoint, which may show that it has ended: by a stop string, by a token
    that stops, or by its length.
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
        """`number` counts the choices of all prompts of a request; it is the `choice` of the
        noise. `parsed` reads its text, if a parser applies.
        """
        self.number = number
        self.token_ids: list[int] = [] if checkpoint is None else list(checkpoint.token_ids)
        self.published_tokens = self._resumed_tokens = len(self.token_ids)
        # Of the prompt, from its first engine's prefix cache
        self.cached_tokens = 0 if checkpoint is None else checkpoint.cached_tokens
        self.device_seconds = 0.0
        self._prompt = prompt
        self._call = call
        self._sampling = prompt.sampling
        self._tokenizer = tokenizer
        self._parsed = parsed
        needed = parsed is not None and tokenizer.are_special(parsed.parsing.markers)
        skipped = call.skip_special_tokens and not needed
        self._detokenizer = tokenizer.detokenizer(prompt.token_ids, skipped)
        self._stops = StopStrings(call.stop, call.include_stop_str_in_output) if call.stop else None
        self._min_tokens = prompt.sampling.min_tokens
        self._decoded = 0
        self._text = prompt.text
        self._published_characters = 0 if checkpoint is None else checkpoint.text_length
        self.announced = checkpoint is not None  # whether anything was published
        self.ended = False  # whether it gets no more tokens
        self.last_token = 0.0  # when it got one from this worker, on the monotonic clock
        self._ending: tuple[FinishReason, int | str | None] = "stop", None
        self.logprobs: list[PositionLogprobs] | None = None
        if prompt.sampling.logprobs >= 0:
            self.logprobs = [] if checkpoint is None else list(checkpoint.logprobs)
        self._recognize_end()

    @property
    def resumed(self) -> bool:
        """Whether an earlier worker began it."""
        return self._resumed_tokens > 0

    @property
    def started(self) -> bool:
        """Whether this worker generated anything for it."""
        return self.new_tokens > 0

    @property
    def new_tokens(self) -> int:
        """How many this worker generated."""
        return len(self.token_ids) - self._resumed_tokens

    @property
    def prompt_length(self) -> int:
        return len(self._prompt.token_ids)

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self._ending[0]

    @property
    def length(self) -> int:
        """Tokens of its prompt and its output."""
        return self.prompt_length + len(self.token_ids)

    @property
    def tokens_left(self) -> int:
        """How many more it may get."""
        return self._sampling.max_tokens - len(self.token_ids)

    @property
    def mean_logprob(self) -> float:
        """The log probability per token, by which the best of several is found."""
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
    ) -> EngineRequest:
        """What the engine is to do: go on from here or, when nothing is left to generate, look at
        the prompt alone.

        `batch_id` names requests whose outputs may be about as long; `arrived` as there.
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
        )

    def take(self, token_ids: list[int], stop_token: int = -1, logprobs: list[TokenLogprobs] | None = None) -> bool:
        """Add generated tokens, in order; whether a stop string ended it, after which it keeps no
        more of them.

        `stop_token`, if any, is the last of the tokens: it counts but gives no text, unless the
        call includes it. `logprobs` has one item per token, if it asked.
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
        """No more tokens come; `stop_token` as for `take`.

        A stop string that was found goes before any other reason.
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
        """What is not published yet, which counts as published from now on."""
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
        """Begin anew with what is published, as the choice of another request (`ParsedText`)."""
        self.published_tokens = self._published_characters = 0
        self.announced = False
        if self._parsed is not None:
            self._parsed.name = name

    @property
    def content(self) -> str:
        """Its text without reasoning, once it has ended."""
        return self._text if self._parsed is None else self._parsed.content

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens it has up to the end of its reasoning, that included."""
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
        """The whole of it, for the response, once it has ended."""
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
        """End the sequence where its checkpoint is the whole of it: by the last token, by a stop
        string or by its length.
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
        """Return how many of the tokens give text, when the last is `stop_token`."""
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
        """Make text of tokens; a parser that follows them reads that of each by itself."""
        if self._parsed is None or not self._parsed.follows:
            self._add_text(upto)
            return
        for tokens in range(self._decoded + 1, upto + 1):
            self._add_text(tokens)
            self._parsed.read(self._text, tokens)

    def _add_text(self, upto: int) -> None:
        """Decode tokens; of the first `min_tokens` none can complete a stop string."""
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
    """The engine's log probabilities, with the tokens' texts."""
    for item in items:
        ranks = itertools.chain((item.rank,), itertools.count(1))
        own, *likeliest = map(TokenLogprob, item.token_ids, map(token_bytes, item.token_ids), item.logprobs, ranks)
        yield PositionLogprobs(own, likeliest)


def at_most(items: Iterable[PositionLogprobs], most: int) -> list[PositionLogprobs]:
    """The same with fewer of the likeliest tokens."""
    return [item if len(item.top) <= most else PositionLogprobs(item.chosen, item.top[:most]) for item in items]
