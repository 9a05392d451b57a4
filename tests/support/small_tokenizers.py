"""Small real tokenizers of the kinds that models use, trained on a few lines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Add 12 and 30: 12 + 30 = 42. Naïve café, 東京 and Köln; 你好，世界!",
    "emoji: 🙂🙃👩‍👩‍👧 family, flags 🇩🇪🇫🇷 and more 🙂🙂",
]
SPECIAL = ["<|begin|>", "<|end|>", "<|user|>"]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("→added←", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral: pieces with a visible space, and single bytes for what is not in the
    vocabulary.
    """
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary += ["▁", *map(chr, range(33, 127)), "▁t", "▁th", "▁the", "é", "東", "fo", "ox", "▁a"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary)},
            merges=[("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("f", "o"), ("o", "x"), ("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """A decoder without a table of its own."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[call-arg]
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    )
    return tokenizer


def bert() -> Tokenizer:
    """As BERT: words in lower case, with tokens around a text and between two."""
    words = sorted({word.lower() for text in CORPUS for word in re.findall("[a-zA-Z]+|[0-9]", text)})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, ".", ",", ":"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(vocabulary[:5])
    return tokenizer


def panicking() -> Tokenizer:
    """Its regular expression gives up on many an x without a y, and its decoder on tokens that it
    strips more from than they have.
    """
    tokenizer = byte_level()
    split = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.Sequence([decoders.Strip("a", 2, 2), decoders.ByteLevel()])
    return tokenizer


def write_folder(
    folder: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None, template: str | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|begin|>", "eos_token": "<|end|>"} if config is None else config
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
