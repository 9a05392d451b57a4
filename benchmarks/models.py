"""Random-weight models of real shapes with a byte-level BPE tokenizer, written once and kept.

The text they produce is noise; the work per token is that of the real model.
"""

import json
import os
import sysconfig
from pathlib import Path
from typing import Any

from benchmarks.weights import write_checkpoint

VOCABULARY_SIZE = 32_000
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
FULL_VOCABULARIES = ("gpt2-124m-151936",)
"""Shapes with a text for each token; the tokenizers of all others have `VOCABULARY_SIZE`."""

INT4 = "-int4"
"""Suffix of the name of a shape with weights in 4 bits."""

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {  # only to test that a benchmark runs
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "gpt2-124m": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
    },
    "gpt2-124m-50257": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "gpt2-124m-151936": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 151_936,
    },
    "llama-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "vocab_size": 151_936,
        "rope_theta": 1_000_000.0,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "vocab_size": 151_936,
        "rope_theta": 1_000_000.0,
    },
    "gemma3-270m": {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "vocab_size": 151_936,
        "rope_theta": 1_000_000.0,
    },
}


def model_folder(name: str) -> Path:
    """Return the folder of one of SHAPES in bf16 or in `INT4`, written under the cache on first
    use.
    """
    folder = Path(os.environ.get("BENCHMARK_CACHE", Path.home() / ".cache" / "pipeline-benchmarks")) / name
    if not (folder / "tokenizer.json").exists():
        _write(name, folder)
    return folder


def token_bytes(name: str) -> list[bytes]:
    """Return the bytes of each token of one of SHAPES, none for special ones."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder(name) / "tokenizer.json"))
    byte_of = bytes_by_letter()
    texts = [b""] * settings_of(name)["vocab_size"]
    for text, token in tokenizer.get_vocab().items():
        if token not in tokenizer.get_added_tokens_decoder():
            texts[token] = bytes(byte_of[letter] for letter in text)
    return texts


def bytes_by_letter() -> dict[str, int]:
    """Return the byte of each letter of byte-level BPE (GPT-2).

    Printable bytes are their own letters; the others have letters from 256 on.
    """
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + index): byte for index, byte in enumerate(others)}


def gguf_file(name: str, kind: str) -> Path:
    """Return a GGUF file of the weights of a shape of GPT-2's family, written on first use.

    `kind` is one of `write_gguf`.
    """
    from benchmarks.gguf import write_gguf

    folder = model_folder(name)
    path = folder / f"model-{kind}.gguf"
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        write_gguf(folder, unfinished, kind)
        unfinished.rename(path)
    return path


def _write(name: str, folder: Path) -> None:
    if name.endswith(INT4):
        from benchmarks.quantizing import quantize_checkpoint

        quantize_checkpoint(model_folder(name.removesuffix(INT4)), folder)
        return
    write_checkpoint(settings_of(name), folder)
    _tokenizer(settings_of(name)["vocab_size"] if name in FULL_VOCABULARIES else VOCABULARY_SIZE).save_pretrained(
        folder
    )


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of transformers' configuration for one of SHAPES."""
    return {"vocab_size": VOCABULARY_SIZE, "bos_token_id": 0, "eos_token_id": 0, **SHAPES[name]}


def _tokenizer(size: int):  # type: ignore[no-untyped-def]
    """Return a BPE tokenizer trained on Python's standard library, which every machine has.

    If the text gives too few tokens, pairs of its words are added.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    files = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train(files, trainer)
    bpe = Tokenizer.from_str(filled_up(bpe.to_str(), size))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def filled_up(tokenizer: str, size: int) -> str:
    """Return a tokenizer in JSON form, filled up to `size` tokens with pairs of its words."""
    state = json.loads(tokenizer)
    vocabulary, merges = state["model"]["vocab"], state["model"]["merges"]
    words = [word for word in vocabulary if word.isascii() and word.isalpha() and 2 <= len(word) <= 6]
    for shift in range(1, len(words)):
        for first, second in zip(words, words[shift:], strict=False):
            if len(vocabulary) == size:
                return json.dumps(state)
            if first + second not in vocabulary:
                vocabulary[first + second] = len(vocabulary)
                merges.append([first, second])
    return json.dumps(state)
