"""Convert token ids to text incrementally, never splitting a character.

Byte-level BPE and SentencePiece-like vocabularies are decoded by a table from token to bytes and an
incremental UTF-8 decoder, which costs well under a microsecond per token. Other vocabularies use
the tokenizer's own decoder over a window of the last tokens.

The joined pieces equal the tokenizer's decoding of all ids at once, with one difference: a broken
byte sequence of a byte-fallback vocabulary does not affect its valid neighbors. A prompt that ends
inside a character is decoded together with its output.
"""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from workers.text.errors import FormatError, is_panic

_WINDOW = 8  # prompt tokens that give context to the first output tokens
_UNFINISHED = "\ufffd"
_MOST_HELD = 3  # bytes of a character without its last one


class Detokenizer(Protocol):
    """Decode one request's output incrementally."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the whole characters that these tokens complete."""
        ...

    def finish(self) -> str:
        """Return the text held back, once no more tokens come; U+FFFD for half a character."""
        ...


class DetokenizerFactory:
    """Create a detokenizer per request, of the kind that the vocabulary needs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._table, self._leading_space_goes = _make_table(tokenizer, self._special)
        full_table, _ = _make_table(tokenizer, frozenset())
        self._full_table = _WindowBytes(tokenizer, frozenset()) if full_table is None else full_table

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with this text, or None."""
        token_id = self._tokenizer.token_to_id(text)
        return token_id if token_id in self._special else None

    def start(
        self, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True, after_text: bool = False
    ) -> Detokenizer:
        """Return a detokenizer for the output that follows this prompt.

        A character that the prompt begins and the output completes is in the output. With
        `after_text`, for an output that follows `prompt_text`, so is half a character at the
        prompt's end.
        """
        if self._table is None:
            return self._window(prompt_token_ids, skip_special_tokens, after_text)
        skipped = self._special if skip_special_tokens else frozenset()
        at_start = self._leading_space_goes and all(token_id in skipped for token_id in prompt_token_ids)
        table = self._table if skip_special_tokens else self._full_table
        return _TableDetokenizer(table, at_start, self._begun(prompt_token_ids), after_text)

    def prompt_text(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return a prompt's text without half a character at its end."""
        detokenizer = self.start([], skip_special_tokens)
        text = detokenizer.feed(token_ids)
        if self._table is None:
            held = self._window(token_ids, skip_special_tokens, after_text=True).held
            return (text + detokenizer.finish()).removesuffix(held)
        return text if self._begun(token_ids) else text + detokenizer.finish()

    def _window(
        self, prompt_token_ids: Sequence[int], skip_special_tokens: bool, after_text: bool
    ) -> _WindowDetokenizer:
        last = prompt_token_ids[-_WINDOW:]
        context = [token_id for token_id in last if not (skip_special_tokens and token_id in self._special)]
        holds = bool(last) and last[-1] not in self._special
        return _WindowDetokenizer(self._tokenizer, context, skip_special_tokens, holds, after_text)

    def _begun(self, prompt_token_ids: Sequence[int]) -> bytes:
        """Return the bytes of half a character at the end of a prompt."""
        data = b""
        for token_id in reversed(prompt_token_ids):
            data = self._full_table[token_id] + data
            if len(data) >= _MOST_HELD:
                break
        return _half_character(data)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes inside a text: a special token's name, b"" for unknown ids."""
        return self._full_table[token_id]

    def vocabulary(self) -> list[bytes]:
        """Return each token's bytes in the output, by id.

        Special tokens, which are not shown, and unknown ids have none. Raises FormatError if a
        token's text depends on its neighbors.
        """
        if self._table is None:
            raise FormatError(
                "The model's tokenizer has no fixed text for each token, so that its answers cannot follow a form:"
                " leave the form out, or use another model."
            )
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        tokens = [b""] * (max(ids.values(), default=-1) + 1)
        for token, token_id in ids.items():
            if token_id not in self._special:
                tokens[token_id] = self._table.to_bytes(token)
        return tokens


class _TokenBytes(dict[int, bytes], ABC):
    """Bytes by token id, filled on first use; special and unknown ids have none."""

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special = special

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
        value = b"" if token is None else self.to_bytes(token)
        self[token_id] = value
        return value

    @abstractmethod
    def to_bytes(self, token: str) -> bytes: ...


class _ByteLevelBytes(_TokenBytes):
    def to_bytes(self, token: str) -> bytes:
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:  # an added token outside the byte alphabet
            return token.encode()


class _PieceBytes(_TokenBytes):
    def __init__(self, tokenizer: Tokenizer, special: frozenset[int], replacement: str, byte_fallback: bool) -> None:
        super().__init__(tokenizer, special)
        self._replacement = replacement
        self._byte_fallback = byte_fallback

    def to_bytes(self, token: str) -> bytes:
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(self._replacement, " ").encode()


class _WindowBytes(_TokenBytes):
    """Token bytes from the tokenizer's own decoder, for other vocabularies: the bytes that a token
    adds to a text that ends with the same token.
    """

    def to_bytes(self, token: str) -> bytes:
        # The lookup cannot fail: the caller got the token from its id.
        token_id: int = self._tokenizer.token_to_id(token)  # type: ignore[assignment]
        once, twice = (self._tokenizer.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
        return (twice[len(once) :] or once).encode()


class _TableDetokenizer:
    __slots__ = ("_at_start", "_hides", "_rest", "_table")

    def __init__(self, table: _TokenBytes, at_start: bool, begun: bytes, after_text: bool) -> None:
        self._table = table
        self._rest = begun  # of an incomplete character
        self._hides = bool(begun) and not after_text  # the rest is the prompt's alone
        self._at_start = at_start

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._table
        data = b"".join([table[token_id] for token_id in token_ids])
        if self._hides and data:
            self._hides = False
            if codecs.utf_8_decode(self._rest + data[:1], "replace")[0].startswith(_UNFINISHED):
                self._rest = b""
        data = self._rest + data
        text, used = codecs.utf_8_decode(data, "replace")
        self._rest = data[used:]
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        return _UNFINISHED if self._rest and not self._hides else ""


class _WindowDetokenizer:
    """Decode the last tokens with and without the new one; the difference is the new text.

    text-generation-inference uses the same method.
    """

    __slots__ = ("_hidden", "_known", "_skip_special_tokens", "_tokenizer", "_window", "held")

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool, holds: bool, after_text: bool
    ) -> None:
        """Start after the last tokens of a prompt; `holds` if it may end inside a character."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(context)
        self._known = len(self._window)  # tokens of the window with released text
        while holds and self._known and self._decode(self._window[: self._known]).endswith(_UNFINISHED):
            self._known -= 1
        self.held = self._new_text()  # at the prompt's end
        self._hidden = "" if after_text else self.held

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._feed_one, token_ids))

    def finish(self) -> str:
        return self._shown(self._new_text())

    def _feed_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._new_text()
        if not text or text.endswith(_UNFINISHED):
            return ""
        self._window = self._window[self._known :]
        self._known = len(self._window)
        return self._shown(text)

    def _new_text(self) -> str:
        return self._decode(self._window)[len(self._decode(self._window[: self._known])) :]

    def _shown(self, text: str) -> str:
        """Return new text without that of the prompt."""
        hidden, self._hidden = self._hidden, ""
        return text.removeprefix(hidden if text.startswith(hidden) else hidden.rstrip(_UNFINISHED))

    def _decode(self, token_ids: list[int]) -> str:
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        except BaseException as error:  # tokens on which the decoder fails have no text
            if not is_panic(error):
                raise
            return ""


def _half_character(data: bytes) -> bytes:
    """Return the bytes of an incomplete character at the end."""
    return data[codecs.utf_8_decode(data, "replace")[1] :]


def _make_table(tokenizer: Tokenizer, special: frozenset[int]) -> tuple[_TokenBytes | None, bool]:
    """Return the byte table of this vocabulary, or None, and whether decoding drops a space at the
    very start.
    """
    steps = list(_decoder_steps(tokenizer))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevelBytes(tokenizer, special), False
    if kinds == ["Metaspace"]:
        return _PieceBytes(tokenizer, special, steps[0]["replacement"], byte_fallback=False), steps[0].get(
            "prepend_scheme"
        ) != "never"
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replaced, strip = steps[0], steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
        plain = replaced["content"] == " " and "String" in replaced["pattern"]
        if plain and strip["content"] == " " and strip["start"] in (0, 1) and strip["stop"] == 0:
            return _PieceBytes(tokenizer, special, replaced["pattern"]["String"], byte_fallback=True), strip[
                "start"
            ] == 1
    return None, False


def _decoder_steps(tokenizer: Tokenizer) -> Iterable[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _byte_alphabet() -> dict[str, int]:
    """Return the inverse of GPT-2's map from bytes to printable characters (Radford et al. 2019,
    `encoder.py`).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = _byte_alphabet()
