"""Random weights in the place of a checkpoint's tensors (`--load-format dummy`)."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.engine import driving
from tests.workers.engine.checkpoint.quantizing import write
from tests.workers.engine.checkpoint.test_quantized_checkpoint import CASES
from tests.workers.engine.models.tiny_models import EACH_MODEL, MODELS, VOCAB, folder
from tests.workers.engine.models.tiny_pooling_models import CLASSIFIERS, EMBEDDERS, pooling_folder
from workers.engine.checkpoint.model_checkpoint import open_checkpoint
from workers.engine.checkpoint.weight_size import weight_bytes
from workers.engine.core import EngineCore
from workers.engine.device.executor import Executor
from workers.engine.layers.parallel import Parallel
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, SamplingParams
from workers.engine.messages.errors import ModelLoadError

FOLDERS = {**dict.fromkeys(MODELS, folder), **dict.fromkeys([*EMBEDDERS, *CLASSIFIERS], pooling_folder)}
INTEGERS = {"integers": True, "float8": True}


def without_weights(path: Path, to: Path) -> Path:
    return Path(shutil.copytree(path, to, ignore=shutil.ignore_patterns("*.safetensors")))


def sizes(checkpoint: Path, **settings: Any) -> list[int]:
    """Return the bytes of its weights, and of random ones from its config.json."""
    found = (open_checkpoint(str(checkpoint), load_format=load_format) for load_format in ("auto", "dummy"))
    return [weight_bytes(each, torch.bfloat16, **settings) for each in found]


@pytest.mark.parametrize("name", [*EACH_MODEL, *EMBEDDERS, *CLASSIFIERS])
def test_they_are_as_many_as_the_checkpoints(name: str) -> None:
    size, random = sizes(FOLDERS[name](name))
    assert random == size


@pytest.mark.parametrize("name", CASES)
def test_they_are_in_the_checkpoints_format(name: str, tmp_path: Path) -> None:
    quantized, plain = write(CASES[name], tmp_path)
    size, random = sizes(quantized, **INTEGERS)
    assert random == size <= sizes(plain)[0]


def answers(model: Path, **settings: Any) -> list[list[int]]:
    """Return the greedy answers of random weights to a few prompts."""
    config = EngineConfig(
        model=str(model), load_format="dummy", device="cpu", threads=1, **{"dtype": "bfloat16", **settings}
    )
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    requests = [EngineRequest(index, [index, 7, 5 * index], [], sampling) for index in range(4)]
    found = driving.run(EngineCore(Executor(config)), requests).answers
    assert [found[index].error for index in range(4)] == [""] * 4
    return [found[index].tokens for index in range(4)]


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma4", "gptq-4-32"])
def test_greedy_answers_vary_and_are_the_same_again(name: str, tmp_path: Path) -> None:
    source = write(CASES[name], tmp_path / "whole")[0] if name in CASES else folder(name)
    model = without_weights(source, tmp_path / "model")
    first = answers(model)
    assert first == answers(model)
    assert len(set(map(tuple, first))) == 4
    assert len(set().union(*first)) > 10


def test_ranks_have_parts_of_the_same_numbers() -> None:
    checkpoint = open_checkpoint(str(folder("llama")), load_format="dummy")
    one, two = (weight_bytes(checkpoint, torch.float32, parallel=Parallel(0, size)) for size in (1, 2))
    assert one / 2 < two < one
    assert two > VOCAB * 64 * 4


def test_a_class_of_transformers_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"--load-format dummy needs code of the engine's own, and Llama"):
        open_checkpoint(str(folder("llama")), "transformers", load_format="dummy")
