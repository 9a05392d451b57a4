"""Parse one choice's text: into deltas for a stream, and the message at its end."""

from __future__ import annotations

import hashlib

import msgspec

from jobs.protocol.requests import ParsedDelta, ToolCallDelta
from jobs.protocol.results import Choice, FinishReason, ParsedMessage, ToolCall
from jobs.protocol.validation import Call
from workers.replica.prepared import Parsing
from workers.text.parsers.base import Parsed, ToolCallPiece


class ParsedText:
    """Collect a parser's output."""

    __slots__ = (
        "_call",
        "_content",
        "_deltas",
        "_parser",
        "_read",
        "_reasoning",
        "_tool_calls",
        "has_reasoning",
        "name",
        "parsing",
    )

    def __init__(self, parsing: Parsing, call: Call, name: str) -> None:
        """Create the state of one choice. `name` is the choice's name on every worker; ids of its
        tool calls derive from it.
        """
        self.parsing = parsing
        self._parser = parsing.new_parser()
        self._call = call
        self.name = name
        self._read = 0  # characters read
        self.has_reasoning = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[tuple[str, list[str]]] = []  # function name, and pieces of the arguments
        self._deltas: list[ParsedDelta] | None = [] if call.stream else None

    @property
    def follows(self) -> bool:
        """Return whether it parses each token separately, for a stream, or all text at the end."""
        return self._deltas is not None

    def read(self, text: str, tokens: int) -> None:
        """Parse further text of a choice that has this many tokens."""
        new, self._read = text[self._read :], len(text)
        if new:
            self._take(self._parser.feed(new), tokens)

    def finish(self, text: str, tokens: int) -> None:
        """Parse to the end; text held back until then counts as part of one token more."""
        self.read(text, tokens + 1)
        self._take(self._parser.finish(), tokens + 1)

    def deltas(self, published_tokens: int) -> list[ParsedDelta] | None:
        """Return the deltas of unpublished tokens, once; None without a stream."""
        if self._deltas is None:
            return None
        deltas, self._deltas = self._deltas, []
        return [delta for delta in deltas if delta.tokens > published_tokens]

    def add_to(self, choice: Choice) -> Choice:
        """Return an ended choice with its parsed content, reasoning and calls.

        As in OpenAI's API, a call of a function that the caller named does not change the finish
        reason.
        """
        called = choice.finish_reason == "stop" and self._tool_calls and self._call.tool_name is None
        reason: FinishReason = "tool_calls" if called else choice.finish_reason
        return msgspec.structs.replace(choice, message=self._message(), finish_reason=reason)

    @property
    def content(self) -> str:
        """Return the text that is neither reasoning nor a call."""
        return "".join(self._content)

    def _message(self) -> ParsedMessage:
        content, reasoning = self.content, "".join(self._reasoning)
        calls = [
            ToolCall(self._call_id(index), name, "".join(pieces))
            for index, (name, pieces) in enumerate(self._tool_calls)
        ]
        return ParsedMessage(content if content or not (reasoning or calls) else None, reasoning or None, calls)

    def _take(self, parsed: Parsed, tokens: int) -> None:
        reasoning = parsed.reasoning if self._call.include_reasoning else ""
        self.has_reasoning = self.has_reasoning or bool(parsed.reasoning)
        pieces = [piece for piece in parsed.tool_calls if self._call.parallel_tool_calls or piece.index == 0]
        self._content.append(parsed.content)
        self._reasoning.append(reasoning)
        calls = [self._take_piece(piece) for piece in pieces]
        if self._deltas is not None and (parsed.content or reasoning or calls):
            self._deltas.append(ParsedDelta(tokens, parsed.content, reasoning, calls))

    def _take_piece(self, piece: ToolCallPiece) -> ToolCallDelta:
        """Add a piece of a call; the first piece of each call has the function's name."""
        if piece.name is None:
            self._tool_calls[piece.index][1].append(piece.arguments)
            return ToolCallDelta(piece.index, piece.arguments)
        self._tool_calls.append((piece.name, [piece.arguments]))
        return ToolCallDelta(piece.index, piece.arguments, self._call_id(piece.index), piece.name)

    def _call_id(self, index: int) -> str:
        """Return the id of a tool call, the same on any worker."""
        digest = hashlib.sha256(f"{self.name}/{index}".encode()).hexdigest()
        return digest[:9] if self.parsing.short_ids else f"call_{digest[:24]}"
