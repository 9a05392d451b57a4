"""The chunks of a live call's answer, in OpenAI's form."""

import json
import secrets
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from api.http.event_stream import event
from jobs.protocol.endpoint import AnswerHead, ChoiceEnd
from jobs.protocol.logprobs import TextOffsets
from jobs.protocol.requests import StreamEntry, TokenChunk
from jobs.protocol.results import Result, Usage, encode_json
from jobs.protocol.validation import Call


class Chunks:
    """Convert the stream entries of one call into OpenAI's chunks."""

    def __init__(self, call: Call, created: int, system_fingerprint: str | None = None) -> None:
        """`system_fingerprint` is that of the worker that accepted the call."""
        self._call = call
        self._endpoint = call.endpoint
        new_id = call.endpoint.new_id()
        self._head = AnswerHead(new_id, call.model, created, system_fingerprint, call.service_tier)
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)
        self._usage: dict[int, Usage] = {}  # so far, by choice
        counts = call.include_usage and call.continuous_usage_stats
        self._only_text = not (call.return_token_ids or counts)  # for chunks without log probabilities
        self._around: dict[int, tuple[bytes, bytes]] = {}  # of the text in an event, by choice

    def events(self, entries: Iterable[StreamEntry]) -> bytes:
        """Return the server-sent events of these entries; empty if they have nothing to show."""
        return b"".join(map(self._events_of, entries))

    def openings(self) -> list[dict[str, Any]]:
        """Return the chunks with the role, one for each choice of a chat."""
        opening = self._endpoint.opening()
        if opening is None:
            return []
        return [self._with_usage(self._endpoint.chunk(self._head, index, opening)) for index in range(self._call.n)]

    def of(self, entry: StreamEntry) -> list[dict[str, Any]]:
        """Return the chunks of one entry: its text and, at the end, finish reasons and usage."""
        chunks = [self._with_usage(shown) for chunk in entry.chunks for shown in self._tokens(chunk)]
        if entry.result is not None:
            chunks += map(self._with_usage, self._ending(entry.result))
        return chunks

    def _events_of(self, entry: StreamEntry) -> bytes:
        only_text = self._only_text and entry.result is None
        for chunk in entry.chunks:
            if chunk.parsed is not None or chunk.logprobs or chunk.prompt_logprobs:
                only_text = False
        if not only_text:
            return b"".join(map(event, self.of(entry)))
        return b"".join([self._text_event(chunk) for chunk in entry.chunks if chunk.text])

    def _text_event(self, chunk: TokenChunk) -> bytes:
        """Return an event of plain text; events of one choice differ in their text only."""
        around = self._around.get(chunk.choice)
        if around is None:
            around = self._around[chunk.choice] = self._event_around_text(chunk.choice)
        return around[0] + encode_json(chunk.text) + around[1]

    def _event_around_text(self, choice: int) -> tuple[bytes, bytes]:
        mark = secrets.token_hex()
        [shown] = self._tokens(TokenChunk(choice, 0, [], mark, 0))
        before, _, behind = event(self._with_usage(shown)).partition(encode_json(mark))
        return before, behind

    def _ending(self, result: Result) -> list[dict[str, Any]]:
        body = json.loads(result.body)
        if not result.succeeded:
            return [body]
        ending = [self._ending_of(choice) for choice in body["choices"]]
        if self._call.include_usage:
            ending.append(self._endpoint.usage_chunk(self._head, result.usage))
        return ending

    def _ending_of(self, choice: dict[str, Any]) -> dict[str, Any]:
        end = ChoiceEnd(choice["finish_reason"], choice.get("stop_reason"))
        return self._endpoint.chunk(self._head, choice["index"], self._endpoint.delta(None, ()), end)

    def _tokens(self, chunk: TokenChunk) -> list[dict[str, Any]]:
        """Return the chunks of new tokens; log probabilities of an echoed prompt come first."""
        self._count(chunk)
        positions = [*(chunk.prompt_logprobs or ()), *(chunk.logprobs or ())]
        offsets = self._offsets[chunk.choice]
        deltas = self._endpoint.deltas(chunk, positions, offsets, self._call.return_tokens_as_token_ids)
        with_ids = self._call.return_token_ids and (chunk.token_ids or chunk.prompt_token_ids)
        if with_ids:
            deltas = deltas or [self._endpoint.delta(None, ())]
            deltas[0]["token_ids"] = chunk.token_ids
        shown = [self._endpoint.chunk(self._head, chunk.choice, delta) for delta in deltas]
        if with_ids and chunk.prompt_token_ids is not None:
            self._endpoint.add_prompt_ids(shown[0], chunk.prompt_token_ids)
        return shown

    def _count(self, chunk: TokenChunk) -> None:
        before = self._usage.get(chunk.choice, Usage(chunk.prompt_tokens, 0, chunk.cached_tokens))
        tokens = chunk.index + len(chunk.token_ids)
        self._usage[chunk.choice] = Usage(before.prompt_tokens, tokens, before.cached_tokens)

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Add `usage` to a chunk that has none, with include_usage.

        It is null or, with vLLM's continuous_usage_stats, that of the chunk's choice so far.
        """
        if self._call.include_usage and "error" not in chunk and "usage" not in chunk:
            usage = self._usage.get(chunk["choices"][0]["index"]) if self._call.continuous_usage_stats else None
            chunk["usage"] = None if usage is None else usage.as_openai()
        return chunk
