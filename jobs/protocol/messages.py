"""The answer of a chat as clients read it: its message, and the deltas of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from jobs.protocol.results import Choice, ToolCall

if TYPE_CHECKING:
    from jobs.protocol.requests import ParsedDelta


REASONING = ("reasoning", "reasoning_content")
"""Members of a message that hold its reasoning: vLLM's name, and its older one."""


class _Piece(msgspec.Struct, frozen=True):
    kind: Literal["reasoning", "content", "call", "arguments"]
    call: int  # its index; -1 for text
    text: str
    id: str | None = None

    @property
    def run(self) -> tuple[str, int]:
        """Return the run of a piece; adjacent pieces of the same run form one delta."""
        return self.kind, self.call


def message_of(choice: Choice) -> dict[str, Any]:
    """Return the `message` of a choice; without a parser, its content is the text."""
    if choice.message is None:
        return {"role": "assistant", "content": choice.text, "refusal": None}
    found = choice.message
    message: dict[str, Any] = {"role": "assistant", "content": found.content, "refusal": None}
    if found.reasoning:
        message |= dict.fromkeys(REASONING, found.reasoning)
    if found.tool_calls:
        message["tool_calls"] = [_tool_call(call) for call in found.tool_calls]
    return message


def deltas_of(parsed: Sequence[ParsedDelta]) -> list[dict[str, Any]]:
    """Return the `delta` of each chunk of a stream, in the order of the text.

    A tool call begins with a delta of its own with its id and name, like OpenAI's.
    """
    return [_delta(list(pieces)) for _, pieces in groupby(_pieces(parsed), key=lambda piece: piece.run)]


def _delta(pieces: list[_Piece]) -> dict[str, Any]:
    first, text = pieces[0], "".join(piece.text for piece in pieces)
    if first.kind == "call":
        function = {"name": first.text, "arguments": ""}
        return {"tool_calls": [{"index": first.call, "id": first.id, "type": "function", "function": function}]}
    if first.kind == "arguments":
        return {"tool_calls": [{"index": first.call, "function": {"arguments": text}}]}
    return dict.fromkeys(REASONING, text) if first.kind == "reasoning" else {first.kind: text}


def _pieces(parsed: Sequence[ParsedDelta]) -> Iterator[_Piece]:
    for delta in parsed:
        if delta.reasoning:
            yield _Piece("reasoning", -1, delta.reasoning)
        if delta.content:
            yield _Piece("content", -1, delta.content)
        for call in delta.tool_calls:
            if call.name is not None:
                yield _Piece("call", call.index, call.name, call.id)
            if call.arguments:
                yield _Piece("arguments", call.index, call.arguments)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
