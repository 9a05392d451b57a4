"""Load a model's tokenizer: encode texts in bulk, and create detokenizers.

`tokenizer.json` is read with the tokenizers library, which takes milliseconds and no torch. A model
with only an older vocabulary file is converted by transformers in a separate process, which does
load torch.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from workers.model_folder import GENERATION, pointer_problem, tokenizer_problem, transformer_folder
from workers.text.chat_template import ChatTemplate, read_chat_template
from workers.text.detokenizer import Detokenizer, DetokenizerFactory
from workers.text.errors import TokenizerError, is_panic
from workers.text.inputs import InputEncoder, encode_batch
from workers.text.message_contents import Message
from workers.text.sentence_files import SENTENCE_FILES
from workers.text.vocabulary import longest_token

logger = logging.getLogger(__name__)

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONVERSION_SECONDS = 120


class TextTokenizer:
    """Encode and decode one model's text.

    Thread-safe; encoding releases the interpreter lock.
    """

    def __init__(self, tokenizer: Tokenizer, config: Mapping[str, Any], chat_template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._detokenizers = DetokenizerFactory(tokenizer)
        self.special_tokens = _special_tokens(config)
        self.chat_template = chat_template
        self.inputs = InputEncoder(tokenizer, config.get("truncation_side") or "right")

    @classmethod
    def load(cls, source: str, chat_template: str | None = None) -> TextTokenizer:
        """Load from a local folder or a hub repository; `chat_template` (a file or Jinja text)
        replaces the model's own.

        Raises TokenizerError, one sentence, if there is no usable tokenizer.
        """
        files = _Files(transformer_folder(locate(source)))
        config = {**files.json("special_tokens_map.json"), **files.json("tokenizer_config.json")}
        tokenizer = _read_tokenizer(source, files)
        _complete(tokenizer, config)
        own = _own_templates(files, config) if chat_template is None else {"default": read_chat_template(chat_template)}
        template = ChatTemplate(
            own.get("default"), _special_tokens(config), source, tool_source=own.get("tool_use") or None
        )
        return cls(tokenizer, config, template)

    @property
    def eos_token_id(self) -> int | None:
        """Return the token that ends a text, if the tokenizer names one."""
        return self._tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))

    @property
    def empty_prompt(self) -> list[int]:
        """Return the tokens of an empty prompt.

        This is the token that begins a text, else the token that ends one; [] without either.
        """
        ids = (self._tokenizer.token_to_id(self.special_tokens.get(name, "")) for name in ("bos_token", "eos_token"))
        return next(([token_id] for token_id in ids if token_id is not None), [])

    def render(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """Return the prompt's text for chat messages; see `ChatTemplate.render`."""
        return self.chat_template.render(messages, **variables)

    def encode(self, texts: Sequence[str], special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text.

        `special_tokens` adds the model's special tokens; rendered chats already have them. Raises
        EncodingError if any of the texts cannot be encoded.
        """
        return [encoding.ids for encoding in encode_batch(self._tokenizer, texts, special_tokens)]

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's name of each token."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def encode_word(self, word: str) -> list[list[int]]:
        """Return the token ids of a word at the start of a text and, if different, after a space;
        [] for a word without tokens.
        """
        start, later = self.encode([word.lstrip() or word, f" {word.lstrip()}"], special_tokens=False)
        return [ids for ids in ((start, later) if start != later else (start,)) if ids]

    @functools.cached_property
    def longest_token(self) -> int | None:
        """Return the most bytes of text that one token can have, or None if unknown."""
        return longest_token(self._tokenizer)

    def detokenizer(
        self, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True, after_text: bool = False
    ) -> Detokenizer:
        """Return a detokenizer for the output that follows this prompt; see
        `DetokenizerFactory.start`.
        """
        return self._detokenizers.start(prompt_token_ids, skip_special_tokens, after_text)

    def prompt_text(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return a prompt's text without half a character at its end."""
        return self._detokenizers.prompt_text(token_ids, skip_special_tokens)

    def are_special(self, texts: Iterable[str]) -> bool:
        """Return whether one of these texts is a special token."""
        return any(self._detokenizers.special_id(text) is not None for text in texts)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token inside a text, possibly part of a character.

        A special token's bytes are its name.
        """
        return self._detokenizers.token_bytes(token_id)

    def vocabulary(self, shown: Iterable[str] = ()) -> list[bytes]:
        """Return the bytes of each token by id, empty for unknown ids and for special tokens not in
        `shown`.

        The first call takes some tenths of a second for a large vocabulary. Raises FormatError if
        tokens have no bytes of their own.
        """
        tokens = self._vocabulary.copy()
        for text in shown:
            token_id = self._detokenizers.special_id(text)
            if token_id is not None:
                tokens[token_id] = text.encode()
        return tokens

    @functools.cached_property
    def _vocabulary(self) -> list[bytes]:
        return self._detokenizers.vocabulary()

    def decode(
        self, token_ids: Sequence[int], prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> str:
        """Return the text of a whole output."""
        detokenizer = self.detokenizer(prompt_token_ids, skip_special_tokens)
        return detokenizer.feed(token_ids) + detokenizer.finish()


class _Files:
    """The tokenizer's files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def json(self, name: str) -> dict[str, Any]:
        text = self.text(name)
        try:
            value = {} if text is None else json.loads(text)
        except ValueError as error:
            raise TokenizerError(f"{self.folder / name} is not valid JSON: {error}.") from None
        return value if isinstance(value, dict) else {}

    def text(self, name: str) -> str | None:
        path = self.folder / name
        if not path.is_file():
            return None
        if problem := pointer_problem(path):
            raise TokenizerError(f"{problem}.")
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{path} cannot be read: {error}.") from None


def locate(source: str) -> Path:
    """Return the folder of `source`: a local folder, or the hub's files in the local cache."""
    if os.path.isdir(source):
        return Path(source)
    if os.path.isfile(source):
        raise TokenizerError(f"{source!r} is a file: give the folder of a tokenizer's files.")
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise TokenizerError(f"The model folder {source!r} does not exist.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=_HUB_FILES))
    except LocalEntryNotFoundError:
        raise TokenizerError(
            f"{source!r} is neither a local folder nor in the local cache, and the model hub is out of reach: give"
            " a folder."
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).split("\n", 1)[0].rstrip(".")
        raise TokenizerError(f"The tokenizer of {source!r} cannot be loaded from the model hub: {reason}.") from None


_HUB_FILES = [
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "additional_chat_templates/*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "config.json",
    GENERATION,
    *SENTENCE_FILES,
]


def _read_tokenizer(source: str, files: _Files) -> Tokenizer:
    path = files.folder / "tokenizer.json"
    if not path.is_file():
        if problem := tokenizer_problem(files.folder):
            raise TokenizerError(f"{problem}.")
        return _convert(source, files.folder)
    try:
        return Tokenizer.from_file(str(path))
    except BaseException as error:  # the library raises plain Exception
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise TokenizerError(f"{pointer_problem(path) or f'{path} cannot be read as a tokenizer: {error}'}.") from None


def _convert(source: str, model_folder: Path) -> Tokenizer:
    logger.warning(
        "%s has no tokenizer.json: transformers converts its vocabulary, which takes some seconds at every start",
        source,
    )
    with tempfile.TemporaryDirectory() as folder:
        target = os.path.join(folder, "tokenizer.json")
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "workers.text.convert", str(model_folder), target],
                capture_output=True,
                text=True,
                timeout=_CONVERSION_SECONDS,
                check=False,
            )
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode else None
        except subprocess.TimeoutExpired:
            reason = f"it took longer than {_CONVERSION_SECONDS} s"
        if reason is None:
            return Tokenizer.from_file(target)
    raise TokenizerError(
        f"{source!r} has no tokenizer.json, and transformers cannot make one from its files ({reason}): "
        "name another tokenizer with --tokenizer (a folder or a hub name), or put a tokenizer.json beside the weights."
    )


def _complete(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Apply transformers' changes after reading a tokenizer: no truncation or padding, and no
    missing token.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    declared = config.get("added_tokens_decoder")
    if isinstance(declared, dict):
        for _, fields in sorted(declared.items(), key=lambda item: int(item[0])):
            if tokenizer.token_to_id(fields["content"]) is None:
                tokenizer.add_tokens(
                    [AddedToken(**{name: fields[name] for name in _ADDED_TOKEN_FIELDS if name in fields})]
                )


_ADDED_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens, for templates."""
    named: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            named[name] = value
    return named


def _own_templates(files: _Files, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the model's own templates by name; only "default" and "tool_use" are used.

    Templates in files take precedence over the configuration's.
    """
    own = config.get("chat_template")
    named = {entry["name"]: entry["template"] for entry in own} if isinstance(own, list) else {"default": own}
    named["default"] = files.text("chat_template.jinja") or named.get("default")
    named["tool_use"] = files.text("additional_chat_templates/tool_use.jinja") or named.get("tool_use")
    return {name: source for name, source in named.items() if isinstance(source, str)}
