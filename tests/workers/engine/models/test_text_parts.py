"""Checkpoints that hold more than a text model: its text is the same, and the rest stays unread."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.engine.loading import load_model
from tests.workers.engine.models.test_parity import VARIANTS, answers, assert_same, start
from tests.workers.engine.models.tiny_models import WITH_IMAGES, folder, reference
from tests.workers.engine.places import CPU
from workers.engine.checkpoint.model_checkpoint import open_checkpoint
from workers.engine.checkpoint.readers import weight_readers
from workers.engine.messages.errors import ModelLoadError

NAMES = [pytest.param(name, marks=() if name == "gemma3-images" else pytest.mark.proof) for name in WITH_IMAGES]


@pytest.mark.parametrize("name", NAMES)
def test_text_is_the_same_and_one_line_names_what_is_unread(name: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = reference(name)
    caplog.set_level("INFO", "workers.engine")
    core, sampler = start(name, VARIANTS["cached-preempted-ahead"], CPU)
    assert_same(expected, answers(core, expected), sampler)
    unread = [record.getMessage() for record in caplog.records if "unread" in record.getMessage()]
    assert len(unread) == 1
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_tensors_are_found_by_their_names_in_transformers_4(tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder("gemma3-images"), tmp_path / "model"))
    now = sorted(weight_readers(open_checkpoint(str(path))))
    weights = {_old_name(name): tensor for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert any(name.startswith("language_model.model.layers.") for name in weights)
    assert sorted(weight_readers(open_checkpoint(str(path)))) == now


def _old_name(name: str) -> str:
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    return name.replace("model.language_model.", "language_model.model.").removeprefix("model.")


def test_text_with_experts_is_refused_by_name(tmp_path: Path) -> None:
    config = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": {"model_type": "llama4_text", "num_local_experts": 16},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="'llama4_text', with experts, and cannot run"):
        open_checkpoint(str(tmp_path))


def test_heads_for_several_tokens_are_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = Path(shutil.copytree(folder("llama"), tmp_path / "model"))
    weights = load_file(path / "model.safetensors")
    weights |= {"mtp.fc.weight": weights["model.norm.weight"].clone()}
    weights |= {"model.layers.3.eh_proj.weight": weights["model.norm.weight"].clone()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    caplog.set_level("INFO", "workers.engine")
    load_model(str(path), "float32", torch.device("cpu"))
    messages = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    assert messages == [f"2 tensors of heads for several tokens in {path} are left unread"]
