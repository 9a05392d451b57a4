"""Log probabilities in the shapes that clients know: OpenAI's for chats, OpenAI's for completions, and vLLM's for prompts."""

import codecs
from collections.abc import Sequence
from typing import Any

from jobs.results import PositionLogprobs, TokenLogprob

_LOWEST = -9999.0  # OpenAI's word for "next to impossible"; JSON has no infinity


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    """The `logprobs` of a chat's choice."""
    content = [_chat_token(position.chosen) | {"top_logprobs": [_chat_token(token) for token in position.top]} for position in positions]
    return {"content": content, "refusal": None}


def completion_logprobs(positions: Sequence[PositionLogprobs], text_offset: list[int]) -> dict[str, Any]:
    """The `logprobs` of a completion's choice; `text_offset` is where each token begins in its text, in characters."""
    return {
        "text_offset": text_offset,
        "token_logprobs": [None if (token := position.chosen).logprob is None else _number(token) for position in positions],
        "tokens": [_name(position.chosen.token, "bytes:") for position in positions],
        "top_logprobs": [_by_name(position) for position in positions],
    }


def prompt_logprobs(positions: Sequence[PositionLogprobs]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token first; null for the first token, which nothing predicts."""
    return [None if position.chosen.logprob is None else _by_id(position) for position in positions]


class TextOffsets:
    """Counts where tokens begin in their text, in characters; a token that goes on with a character begins before that."""

    def __init__(self, start: int = 0) -> None:
        self._offset = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, positions: Sequence[PositionLogprobs]) -> list[int]:
        """The offsets of the next tokens."""
        return [self._next(position.chosen.token) for position in positions]

    def _next(self, token: bytes) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(token))
        return offset


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": _name(token.token, ""), "logprob": _number(token), "bytes": list(token.token)}


def _by_name(position: PositionLogprobs) -> dict[str, float] | None:
    """The most likely tokens and the chosen one; of two that read the same the more likely one counts."""
    if position.chosen.logprob is None:
        return None
    names: dict[str, float] = {}
    for token in (*position.top, position.chosen):
        names.setdefault(_name(token.token, "bytes:"), _number(token))
    return names


def _by_id(position: PositionLogprobs) -> dict[str, Any]:
    return {
        str(token.token_id): {"logprob": _number(token), "rank": token.rank, "decoded_token": token.token.decode(errors="replace")}
        for token in (position.chosen, *position.top)
    }


def _name(token: bytes, prefix: str) -> str:
    """The token's text, or its bytes as escapes where they are no whole characters, as OpenAI writes them."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in token)


def _number(token: TokenLogprob) -> float:
    return _LOWEST if token.logprob is None else max(token.logprob, _LOWEST)
