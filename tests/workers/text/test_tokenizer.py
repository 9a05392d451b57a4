"""Loading: what transformers reads from the same files, what is missing said in one sentence, and
no torch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.support.small_tokenizers import byte_fallback, byte_level, panicking, write_folder
from workers.text.errors import EncodingError, TokenizerError
from workers.text.tokenizer import _HUB_FILES, TextTokenizer

NAMED = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
TEXTS = ["The quick brown fox", "", "Naïve 🙂", "<|user|>hello<|end|>"]


@pytest.mark.parametrize(
    "config",
    [
        NAMED,
        {**NAMED, "add_bos_token": True},
        {**NAMED, "add_bos_token": True, "add_eos_token": True},
        {**NAMED, "add_bos_token": False},
        {"bos_token": {"__type": "AddedToken", "content": "<|begin|>", "special": True}, "add_bos_token": True},
        {**NAMED, "added_tokens_decoder": {"401": {"content": "<extra>", "special": True}}},
    ],
)
@pytest.mark.parametrize("processor", [True, False])
def test_encodes_as_transformers_does(tmp_path: Path, config: dict[str, Any], processor: bool) -> None:
    tokenizer = byte_level()
    if processor:
        begin = tokenizer.token_to_id("<|begin|>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
        )
    tokenizer.enable_truncation(3)
    folder = write_folder(tmp_path, tokenizer, config)
    ours = TextTokenizer.load(str(folder))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for special in (True, False):
        assert (
            ours.encode([*TEXTS, "a <extra> b"], special)
            == theirs([*TEXTS, "a <extra> b"], add_special_tokens=special)["input_ids"]
        )


def test_decodes_as_transformers_does(tmp_path: Path) -> None:
    for name, tokenizer in (("level", byte_level()), ("fallback", byte_fallback())):
        config = NAMED if name == "level" else {"bos_token": "<s>", "eos_token": "</s>"}
        folder = write_folder(tmp_path / name, tokenizer, config)
        ours, theirs = TextTokenizer.load(str(folder)), PreTrainedTokenizerFast.from_pretrained(folder)
        token_ids = ours.encode(["the fox 🙂 東京"], special_tokens=False)[0]
        assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True) == "the fox 🙂 東京"


def test_a_text_that_the_library_panics_at_is_an_error_of_its_own(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(str(write_folder(tmp_path, panicking())))
    with pytest.raises(EncodingError, match="cannot encode this text") as caught:
        tokenizer.encode(["x" * 60], special_tokens=False)
    assert "\n" not in str(caught.value)
    token_ids = tokenizer.encode(["aaa b"], special_tokens=False)[0]
    assert isinstance(tokenizer.decode(token_ids), str)


@pytest.mark.parametrize(
    ("word", "forms"), [("fox", ["fox", " fox"]), ("  fox", ["fox", " fox"]), (" ", [" ", " "]), ("\n", ["\n", " "])]
)
def test_words_are_written_at_the_start_and_after_a_space(tmp_path: Path, word: str, forms: list[str]) -> None:
    tokenizer = TextTokenizer.load(str(write_folder(tmp_path, byte_level())))
    expected = list(dict.fromkeys(tuple(ids) for ids in tokenizer.encode(forms, special_tokens=False)))
    assert [tuple(ids) for ids in tokenizer.encode_word(word)] == expected


@pytest.mark.proof
def test_an_older_vocabulary_is_converted(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.model.save(str(tmp_path))  # vocab.json and merges.txt
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    ours = TextTokenizer.load(str(tmp_path))
    assert ours.encode(["The quick brown fox"], special_tokens=False) == [tokenizer.encode("The quick brown fox").ids]
    assert ours.decode(ours.encode(["café 🙂"], special_tokens=False)[0]) == "café 🙂"


@pytest.mark.proof
def test_what_is_missing_is_said_in_one_sentence(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = write_folder(tmp_path / "broken", byte_level())
    (broken / "tokenizer.json").write_text("{")
    configured = write_folder(tmp_path / "configured", byte_level())
    (configured / "tokenizer_config.json").write_text("{")
    panicking_to_load = write_folder(tmp_path / "panicking", byte_level())
    saved = json.loads((panicking_to_load / "tokenizer.json").read_text())
    saved["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": None}
    (panicking_to_load / "tokenizer.json").write_text(json.dumps(saved))
    for folder, words in (
        (tmp_path / "nowhere", "does not exist"),
        (empty, "--tokenizer"),
        (broken, "cannot be read as a tokenizer"),
        (configured, "not valid JSON"),
        (panicking_to_load, "cannot be read as a tokenizer"),
    ):
        with pytest.raises(TokenizerError, match=words) as caught:
            TextTokenizer.load(str(folder))
        assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_told_from_one_that_cannot_be_converted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=rf"^{tmp_path} has no tokenizer: .* --tokenizer"):
        TextTokenizer.load(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model"])
def test_a_pointer_in_place_of_a_file_is_named(tmp_path: Path, name: str) -> None:
    """Of a template it would be the prompt."""
    if name != "tokenizer.model":
        write_folder(tmp_path, byte_level())
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988\n")
    expected = f"{tmp_path / name} is a Git LFS pointer, without the file's content: run `git lfs pull` in {tmp_path}."
    with pytest.raises(TokenizerError, match=f"^{re.escape(expected)}$"):
        TextTokenizer.load(str(tmp_path))


def test_loading_and_rendering_import_no_torch(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), template="{{ messages[0].content | tojson }}")
    script = (
        "import sys; from workers.text.tokenizer import TextTokenizer; t = TextTokenizer.load(sys.argv[1]);"
        "ids = t.encode([t.render([{'role': 'user', 'content': 'x'}])], False)[0];"
        "assert t.decode(ids) == '\"x\"'; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_vocabulary_has_the_bytes_of_special_tokens_that_are_shown(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(str(write_folder(tmp_path, byte_level(), NAMED)))
    (begin,), (end,) = tokenizer.encode(["<|begin|>", "<|end|>"], special_tokens=False)
    shown = tokenizer.vocabulary(["<|end|>", "no token of it"])
    assert (shown[begin], shown[end]) == (b"", b"<|end|>")
    assert tokenizer.vocabulary()[end] == b""


def test_of_a_repository_no_weights_are_fetched() -> None:
    needed = ["tokenizer.json", "1_Pooling/config.json", "0_Transformer/config.json", "0_Transformer/vocab.txt"]
    weights = ["model.safetensors", "0_Transformer/model.safetensors", "0_Transformer/pytorch_model.bin"]
    assert list(filter_repo_objects([*needed, *weights], allow_patterns=_HUB_FILES)) == needed
