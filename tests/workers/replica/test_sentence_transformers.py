"""Numbers of texts against those of sentence-transformers itself: its prompts, its ways of pooling
and its cross-encoders, of each family, from the text to the numbers.
"""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from jobs.protocol.pooling_parameters import EMBEDDINGS, SCORE
from tests.support.small_tokenizers import bert, write_folder
from tests.workers.engine.models.tiny_pooling_models import EMBEDDERS, model_moved, pooling_folder, save_modules
from tests.workers.engine.places import CPU
from tests.workers.engine.pooling import run_pooling, start
from tests.workers.replica.test_pooling import claim_of
from workers.engine.core import EngineCore
from workers.engine.messages.core import EngineRequest, PoolingParams, SamplingParams
from workers.replica.pooling_preparation import PoolingPreparation
from workers.text.inputs import EncodedInput
from workers.text.sentence_files import SentenceFiles
from workers.text.tokenizer import TextTokenizer

pytestmark = pytest.mark.proof

TEXTS = ["The quick brown fox", "the lazy dog", "jumps over the quick brown dog " * 6, "fox"]
# transformers gives models of the other one, Qwen2, a tokenizer of its own whatever the folder says
FAMILIES = sorted(EMBEDDERS.keys() - {"qwen2"})
MODES = ["mean", "cls", "max", "weightedmean", "lasttoken", "mean_sqrt_len_tokens"]


def sentence_transformer(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer  # whose import takes seconds

    return SentenceTransformer(str(folder), device="cpu")


def folder_of(
    name: str, path: Path, mode: str, dense: torch.nn.Linear | None = None, normalize: bool = False, **pooling: Any
) -> Path:
    """A tiny model as sentence-transformers saves one, with a tokenizer and a prompt."""
    with_tokenizer(name, path)
    save_modules(path, {"word_embedding_dimension": 64, "pooling_mode": mode, **pooling}, dense, normalize)
    config = {"prompts": {"query": "the dog ", "document": ""}, "default_prompt_name": None}
    (path / "config_sentence_transformers.json").write_text(json.dumps(config))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32, "do_lower_case": False}))
    return path


def with_tokenizer(name: str, path: Path) -> Path:
    copytree(pooling_folder(name), path)
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    kind = {"tokenizer_class": "BertTokenizer"} if name.startswith("bert") else {}
    return write_folder(path, bert(), special | kind)


def numbers(folder: Path, url: str, **body: Any) -> list[Tensor]:
    """What the product makes of a call's inputs."""
    core = start(folder, CPU, dtype="float32")
    tokenizer = TextTokenizer.load(str(folder))
    preparation = PoolingPreparation(tokenizer, ["m"], core.ready, SentenceFiles.read(folder))
    [found], errors = preparation.prepare([claim_of(url, **body)])
    assert errors == []
    return run_inputs(core, found.inputs, found.pooling)


def run_inputs(core: EngineCore, inputs: list[EncodedInput], params: PoolingParams) -> list[Tensor]:
    requests = [
        EngineRequest(
            number,
            one.token_ids,
            [],
            SamplingParams(0),
            pooling=msgspec.structs.replace(params, unpooled=one.unpooled),
            second_text=one.second_text,
        )
        for number, one in enumerate(inputs)
    ]
    return run_pooling(core, requests)


def assert_equal(got: list[Tensor], expected: Tensor) -> None:
    torch.testing.assert_close(torch.stack(got), expected.view(len(got), -1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_of_each_family(name: str, tmp_path: Path) -> None:
    causal = EMBEDDERS[name].mode == "last"
    folder = folder_of(name, tmp_path / "model", "lasttoken" if causal else "mean", normalize=True)
    expected = sentence_transformer(folder).encode(TEXTS, convert_to_tensor=True)
    assert_equal(numbers(folder, EMBEDDINGS, input=TEXTS, truncate_prompt_tokens=-1), expected)


@pytest.mark.parametrize("mode", MODES)
def test_ways_of_pooling_with_a_prompt_and_a_projection(mode: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    folder = folder_of("bert", tmp_path / "model", mode, torch.nn.Linear(64, 24), include_prompt=mode == "cls")
    expected = sentence_transformer(folder).encode(TEXTS, prompt_name="query", convert_to_tensor=True)
    got = numbers(folder, EMBEDDINGS, input=TEXTS, prompt_name="query", truncate_prompt_tokens=-1)
    assert_equal(got, expected)


def test_a_folder_with_the_model_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """As sentence-transformers saved them before version 2."""
    folder = model_moved(folder_of("bert", tmp_path / "model", "mean"))
    expected = sentence_transformer(folder).encode(TEXTS, prompt_name="query", convert_to_tensor=True)
    assert_equal(numbers(folder, EMBEDDINGS, input=TEXTS, prompt_name="query", truncate_prompt_tokens=-1), expected)


@pytest.mark.parametrize("name", ["bert-pair", "xlm-roberta-score"])
def test_scores_of_cross_encoders(name: str, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    folder = with_tokenizer(name, tmp_path / "model")
    pairs = [(TEXTS[0], text) for text in TEXTS]
    expected = CrossEncoder(str(folder), device="cpu").predict(pairs, convert_to_tensor=True)
    assert_equal(numbers(folder, SCORE, text_1=TEXTS[0], text_2=TEXTS), expected)
