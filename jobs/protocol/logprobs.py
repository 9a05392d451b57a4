"""Log probabilities in the shapes of OpenAI's chats, OpenAI's completions, and vLLM's prompts."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from jobs.protocol.results import PositionLogprobs, TokenLogprob

_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes inside a character
_LOWEST = -9999.0  # OpenAI's value for "next to impossible"; JSON has no infinity


# A long answer has hundreds of thousands of log probabilities, so each is one small object that the
# garbage collector does not track, and the text of a repeated token is cached.
class ChatToken(msgspec.Struct, gc=False):
    """One of a chat's tokens in OpenAI's JSON."""

    token: str
    logprob: float
    bytes: list[int]


class ChatPosition(ChatToken, gc=False):
    """The same with the most likely tokens at its position."""

    top_logprobs: list[ChatToken]


class PromptToken(msgspec.Struct, gc=False):
    """One of a prompt's tokens in vLLM's JSON."""

    logprob: float
    rank: int
    decoded_token: str


class _ChatTexts(dict[bytes, tuple[str, list[int]]]):
    def __missing__(self, token: bytes) -> tuple[str, list[int]]:
        made = self[token] = _name(token, ""), list(token)
        return made


class _Names(dict[bytes, str]):
    def __missing__(self, token: bytes) -> str:
        made = self[token] = _name(token, "bytes:")
        return made

    def of(self, token: TokenLogprob) -> str:
        return self[token.token]


class _Decoded(dict[bytes, str]):
    def __missing__(self, token: bytes) -> str:
        made = self[token] = token.decode(errors="replace")
        return made


def chat_logprobs(positions: Sequence[PositionLogprobs], as_ids: bool = False) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice; `as_ids` names tokens by their ids, like vLLM."""
    texts, content = _ChatTexts(), []
    for position in positions:
        top = []
        for token in position.top:
            text, raw = texts[token.token]
            top.append(ChatToken(_by_id(token) if as_ids else text, _number(token.logprob), raw))
        chosen = position.chosen
        text, raw = texts[chosen.token]
        content.append(ChatPosition(_by_id(chosen) if as_ids else text, _number(chosen.logprob), raw, top))
    return {"content": content, "refusal": None}


def completion_logprobs(
    positions: Sequence[PositionLogprobs], text_offset: list[int], as_ids: bool = False
) -> dict[str, Any]:
    """Return the `logprobs` of a completion's choice.

    `text_offset` is the position of each token in its text, in characters. `as_ids` names tokens by
    their ids, like vLLM.
    """
    names = _by_id if as_ids else _Names().of
    return {
        "text_offset": text_offset,
        "token_logprobs": [
            None if (logprob := position.chosen.logprob) is None else _number(logprob) for position in positions
        ],
        "tokens": [names(position.chosen) for position in positions],
        "top_logprobs": [_by_name(position, names) for position in positions],
    }


def prompt_logprobs(positions: Sequence[PositionLogprobs]) -> list[dict[int, PromptToken] | None]:
    """Return vLLM's `prompt_logprobs`: by token id, the prompt's own token first.

    The first token has null, since nothing predicts it.
    """
    decoded = _Decoded()
    return [
        None
        if position.chosen.logprob is None
        else {
            token.token_id: PromptToken(_number(token.logprob), token.rank, decoded[token.token])
            for token in (position.chosen, *position.top)
        }
        for position in positions
    ]


def text_offsets(text: str, positions: Sequence[PositionLogprobs]) -> list[int]:
    """Return the position of each token in the text of all tokens, in characters.

    Tokens after a stop string begin at its end.
    """
    return [min(offset, len(text)) for offset in TextOffsets().of(positions, text)]


class TextOffsets:
    """Finds the position of one choice's tokens in its text, in characters, as both arrive in
    pieces.

    A token that continues a character begins where the character does; the first one may continue
    a character of the prompt. A token without text (a special token, a space that some vocabularies
    drop at the start) has length 0. While a token's text is held back, its bytes are taken for its
    text.
    """

    def __init__(self) -> None:
        self._text = b""  # after the last token with a known position
        self._characters = 0  # up to that position
        self._begun = False  # whether any text has arrived
        self._broken = b""  # bytes of an incomplete character that the text shows as U+FFFD
        self._waiting: list[bytes] = []  # tokens whose text has not arrived yet

    def of(self, positions: Sequence[PositionLogprobs], text: str) -> list[int]:
        """Return the offsets of the next tokens, given the next piece of text."""
        self._text += text.encode(errors="replace")
        waiting, self._waiting = self._waiting, []
        if self._text and not self._begun:
            self._begun = True
            self._skip_begun(b"".join([*waiting, *(position.chosen.token for position in positions[:4])])[:4])
        for token in waiting:
            self._place(token)
        return [self._place(position.chosen.token) for position in positions]

    def _place(self, token: bytes) -> int:
        if inside := self._in_broken(token):
            offset, self._broken = self._characters - 1, self._broken + token[:inside]
            if rest := token[inside:]:
                self._place(rest)
            return offset
        self._broken = b""
        inside = _goes_on(self._text)  # inside a character that is counted already
        if self._waiting or (len(self._text) < len(token) and token.startswith(self._text)):
            counted = inside or self._characters == 0
            before = b"".join(self._waiting).lstrip(_CONTINUATION if counted else b"")
            self._waiting.append(token)
            return self._characters + (_characters(before, token) if before else -(inside and _goes_on(token)))
        offset = self._characters - inside
        length = self._length(token)
        self._characters += sum(not _goes_on(self._text[i : i + 1]) for i in range(length))
        self._text = self._text[length:]
        return offset

    def _in_broken(self, token: bytes) -> int:
        """Return how many bytes of a token continue the incomplete character before it."""
        if not self._broken:
            return 0
        return next((length for length in range(len(token[:3]), 0, -1) if _is_begun(self._broken + token[:length])), 0)

    def _length(self, token: bytes) -> int:
        """Return how many bytes of the text belong to this token."""
        if self._text.startswith(token):
            return len(token)
        # Broken characters were replaced, but not the end of one that another token began
        end = token[: len(token) - len(token.lstrip(_CONTINUATION))]
        for kept in (end, b""):
            form = kept + token[len(kept) :].decode(errors="replace").encode()
            if self._text.startswith(form):
                self._broken = token[codecs.utf_8_decode(token, "replace")[1] :]
                return len(form)
        at_start = self._characters == 0 and token.startswith(b" ")
        return len(token) - 1 if at_start and self._text.startswith(token[1:]) else 0

    def _skip_begun(self, tokens: bytes) -> None:
        """Pass over the bytes that a prompt has of the text's first character."""
        first = self._text[:4].decode(errors="ignore")[:1].encode()
        length = len(tokens) - len(tokens.lstrip(_CONTINUATION))
        if 0 < length < len(first) and first.endswith(tokens[:length]):
            self._text, self._characters = self._text[len(first) - length :], 1


def _characters(written: bytes, following: bytes) -> int:
    """Return the number of characters that begin in `written`, except one that `following`
    continues.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    count = len(decoder.decode(written))
    return count + (bool(decoder.getstate()[0]) and not _goes_on(following))


def _is_begun(text: bytes) -> bool:
    """Return whether the text is an incomplete character."""
    return codecs.utf_8_decode(text, "replace") == ("", 0)


def _goes_on(text: bytes) -> bool:
    """Return whether the text begins inside a character."""
    return text[:1] != b"" and text[0] in _CONTINUATION


def _by_name(position: PositionLogprobs, names: Callable[[TokenLogprob], str]) -> dict[str, float] | None:
    """Return the most likely tokens and the chosen one, by text.

    Of two with the same text the more likely one is kept.
    """
    if position.chosen.logprob is None:
        return None
    found: dict[str, float] = {}
    for token in position.top:
        found.setdefault(names(token), _number(token.logprob))
    found.setdefault(names(position.chosen), _number(position.chosen.logprob))
    return found


def _by_id(token: TokenLogprob) -> str:
    return f"token_id:{token.token_id}"


def _name(token: bytes, prefix: str) -> str:
    """Return the token's text, or its bytes as escapes like OpenAI if they are no whole
    characters.
    """
    try:
        return token.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in token)


def _number(logprob: float | None) -> float:
    return _LOWEST if logprob is None or logprob < _LOWEST else logprob
