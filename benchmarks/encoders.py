"""Random-weight embedding models of real shapes as folders of sentence-transformers, with a
WordPiece tokenizer, written once and kept; and texts of known lengths for them.
"""

import json
import os
import random
import sysconfig
from pathlib import Path
from typing import Any

from benchmarks.weights import write_checkpoint

ENCODERS: dict[str, dict[str, Any]] = {
    "minilm-l6": {
        "model_type": "bert",
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
    },
    "bge-base": {
        "model_type": "bert",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
    },
    "tiny-32": {
        "model_type": "bert",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
    },
    "tiny-384": {
        "model_type": "bert",
        "hidden_size": 384,
        "intermediate_size": 384,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "max_position_embeddings": 512,
    },
}
"""Pooling is the mean of the tokens, for bge-base the first token; all are normalized."""
CONTEXT = 512  # tokens, of all of them

_CROSS_ENCODER = "-cross"  # the same with a head of one label
_VOCABULARY_SIZE = 30_522
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def encoder_folder(name: str) -> Path:
    """Return the folder of one of ENCODERS, or of its cross-encoder (`minilm-l6-cross`), in bf16,
    written under the cache on first use.
    """
    folder = Path(os.environ.get("BENCHMARK_CACHE", Path.home() / ".cache" / "pipeline-benchmarks")) / name
    if not (folder / "tokenizer.json").exists():
        _write(name, folder)
    return folder


def model_flags(folder: Path, model: str) -> list[str]:
    """Return the flags of a model, which `pipeline run-batch` and `vllm run-batch` share."""
    options = {"model": folder, "served-model-name": model, "max-model-len": CONTEXT}
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def texts(count: int, seed: int, tokens: tuple[int, int] = (16, 256)) -> list[str]:
    """Return texts of random words; each has a random length within `tokens`.

    The length includes special tokens.
    """
    rng = random.Random(seed)
    vocabulary = json.loads((encoder_folder("minilm-l6") / "tokenizer.json").read_text())["model"]["vocab"]
    words = [word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2]
    return [" ".join(rng.choices(words, k=rng.randint(*tokens) - 2)) for _ in range(count)]


def _write(name: str, folder: Path) -> None:
    shape = name.removesuffix(_CROSS_ENCODER)
    cross = name != shape
    settings = {"vocab_size": _VOCABULARY_SIZE, "pad_token_id": 0, **ENCODERS[shape]}
    if cross:
        settings["num_labels"] = 1
    write_checkpoint(settings, folder, auto_class="AutoModelForSequenceClassification" if cross else "AutoModel")
    if not cross:
        _write_modules(folder, settings["hidden_size"], by_mean=shape != "bge-base")
    _tokenizer(settings["max_position_embeddings"]).save_pretrained(folder)


def _write_modules(folder: Path, size: int, by_mean: bool) -> None:
    """Write the files that make the folder a sentence-transformers model."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    pooling = {
        "word_embedding_dimension": size,
        "pooling_mode_cls_token": not by_mean,
        "pooling_mode_mean_tokens": by_mean,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    for path, _ in kinds[1:]:
        (folder / path).mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))


def _tokenizer(longest: int):  # type: ignore[no-untyped-def]
    """Return a WordPiece tokenizer like BERT's, trained on Python's standard library."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizerFast

    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.glob("**/*.py") if "site-packages" not in path.parts)
    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(
        (path.read_text(errors="replace") for path in files),
        vocab_size=_VOCABULARY_SIZE,
        special_tokens=list(_SPECIAL_TOKENS),
        show_progress=False,
        min_frequency=1,
    )
    return BertTokenizerFast(tokenizer_object=trained._tokenizer, model_max_length=longest)
