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


def text_offsets(text: str, positions: Sequence[PositionLogprobs]) -> list[int]:
    """Where each token begins in the text that they make, in characters.

    A token that goes on with a character begins where that does. One that left nothing in the text (a special token, what stands behind
    a stop string, the space that some vocabularies drop at the start) takes no room.
    """
    written, offsets = text.encode(errors="replace"), []
    place = characters = 0  # of `written`
    for position in positions:
        inside = place < len(written) and written[place] & 0xC0 == 0x80
        offsets.append(characters - inside)
        end = place + _written_length(written, place, position.chosen.token)
        characters += sum(byte & 0xC0 != 0x80 for byte in written[place:end])
        place = end
    return offsets


class TextOffsets:
    """The same while the text is not there yet, of the tokens alone."""

    def __init__(self, start: int = 0) -> None:
        self._offset = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, positions: Sequence[PositionLogprobs]) -> list[int]:
        """The offsets of the next tokens."""
        return [self._next(position.chosen.token) for position in positions]

    def _next(self, token: bytes) -> int:
        broken_off = bool(self._decoder.getstate()[0]) and token[:1] != b"" and token[0] & 0xC0 != 0x80  # its rest never came
        offset = self._offset
        self._offset += len(self._decoder.decode(token))
        return offset + broken_off


def _written_length(written: bytes, place: int, token: bytes) -> int:
    """How many bytes of the text a token made."""
    for form in (token, token.decode(errors="replace").encode()):  # a broken character was replaced
        if written.startswith(form, place):
            return len(form)
    return len(token) - 1 if place == 0 and token.startswith(b" ") and written.startswith(token[1:]) else 0


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
