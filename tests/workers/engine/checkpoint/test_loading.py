"""What loads, what is refused, and how the refusal reads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.workers.engine.loading import load_model
from tests.workers.engine.models.tiny_models import EACH_MODEL, MODELS, folder, make
from workers.engine.attention.base import AttentionMetadata, CacheShape
from workers.engine.attention.context import CachedLayer, StepAttention
from workers.engine.attention.reference import TorchAttention
from workers.engine.checkpoint.model_checkpoint import open_checkpoint
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.base import DecoderModel
from workers.engine.models.registry import FAMILIES

CPU = torch.device("cpu")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[str], Path]:
    """A tiny model's folder that the test may change."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder(name), tmp_path / name))

    return copy


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def logits(model: DecoderModel) -> Tensor:
    """Return the logits of a prompt of nine tokens."""
    ids, positions, layers = torch.arange(9), torch.arange(9), list[CachedLayer]()
    for shape in model.config.layers:
        cache = CacheShape(2, 16, shape.kv_heads, shape.head_dim)
        attention = TorchAttention(cache, shape.heads, model.dtype, CPU)
        pages = attention.new_cache(1)[0] if shape.reads is None else layers[shape.reads].cache
        layers.append(CachedLayer(attention, pages, shape))
    metadata = AttentionMetadata(16 + ids, np.array([0, 9]), np.array([9]), np.array([[1]]))
    attend = StepAttention(layers, [metadata])
    with torch.inference_mode():
        return model.logits(model.forward(ids, positions, positions + 1, attend))


@pytest.mark.parametrize("name", EACH_MODEL)
def test_sharded_files_load_the_same(name: str, tmp_path: Path) -> None:
    make(MODELS[name]).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(
        logits(load_model(str(tmp_path), "float32", CPU)), logits(load_model(str(folder(name)), "float32", CPU))
    )


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_bare_decoder_names_load(name: str, copy_of: Callable[[str], Path]) -> None:
    """The original GPT-2 checkpoints lack the decoder's prefix; theirs also carry attention masks
    as buffers.
    """
    path = copy_of(name)
    weights = load_file(path / "model.safetensors")
    bare = {key.removeprefix("transformer.").removeprefix("model."): tensor for key, tensor in weights.items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1)}, path / "model.safetensors")
    assert torch.equal(
        logits(load_model(str(path), "float32", CPU)), logits(load_model(str(folder(name)), "float32", CPU))
    )


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1.0), ("float16", 0.1)])
def test_half_precision(name: str, dtype: str, tolerance: float) -> None:
    model = load_model(str(folder(name)), dtype, CPU)
    assert model.dtype == getattr(torch, dtype)
    exact = logits(load_model(str(folder(name)), "float32", CPU))
    assert (logits(model) - exact).abs().max() < tolerance


def test_config_of_transformers_4(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("rope-llama3")
    parameters = json.loads((path / "config.json").read_text())["rope_parameters"]
    edit(
        path / "config.json",
        rope_parameters=None,
        dtype=None,
        head_dim=None,
        torch_dtype="float32",
        rope_theta=parameters.pop("rope_theta"),
        rope_scaling=parameters,
    )
    assert torch.equal(
        logits(load_model(str(path), "float32", CPU)), logits(load_model(str(folder("rope-llama3")), "float32", CPU))
    )


def test_end_tokens(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("llama")
    (path / "generation_config.json").unlink()
    assert open_checkpoint(str(path)).config.eos_token_ids == ()
    edit(path / "config.json", eos_token_id=7)
    assert open_checkpoint(str(path)).config.eos_token_ids == (7,)
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    assert open_checkpoint(str(path)).config.eos_token_ids == (5, 9)
    other = path / "other"
    with pytest.raises(ModelLoadError, match=r"other/generation_config\.json does not exist"):
        open_checkpoint(str(path), generation_config=str(other))
    other.mkdir()
    (other / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert open_checkpoint(str(path), generation_config=str(other)).config.eos_token_ids == (3,)


def refusal(path: Path | str) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(path), "float32", CPU)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_folder() -> None:
    assert refusal("/no/such/folder") == "the model folder /no/such/folder does not exist"


def test_file_instead_of_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert "is a file; give the folder" in refusal(tmp_path / "model.safetensors")


def test_folder_without_config(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"the model folder {tmp_path} has no config.json"


def test_folder_without_weights(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("llama")
    (path / "model.safetensors").unlink()
    assert refusal(path) == f"{path} holds no weights: there is no .safetensors file in it"


def test_pickled_weights_are_never_read(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("llama")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert "holds pickled weights only, which are never read" in refusal(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adapter_model.safetensors", "is an adapter of base/model (adapter_config.json), not a model: merge both"),
        (
            "model-q4.gguf",
            "is in the format GGUF, which is not read; give the folder of",
        ),
        ("tf_model.h5", "holds weights for TensorFlow only; give a version in safetensors"),
    ],
)
def test_other_weights_are_named(copy_of: Callable[[str], Path], name: str, said: str) -> None:
    """With a config.json beside them, and without."""
    path = copy_of("llama")
    (path / "model.safetensors").rename(path / name)
    if name.startswith("adapter"):
        (path / "adapter_config.json").write_text('{"base_model_name_or_path": "base/model"}')
    assert f"{path} {said}" in refusal(path)
    (path / "config.json").unlink()
    without = f"the model folder {path} has no config.json" if name == "tf_model.h5" else f"{path} {said}"
    assert without in refusal(path)


def test_an_adapter_beside_the_model_is_left_alone(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("llama")
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(b"not read")
    assert torch.equal(
        logits(load_model(str(path), "float32", CPU)), logits(load_model(str(folder("llama")), "float32", CPU))
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_a_pointer_in_place_of_a_file_is_named(copy_of: Callable[[str], Path], name: str) -> None:
    path = copy_of("llama")
    (path / name).write_text(POINTER)
    expected = f"{path / name} is a Git LFS pointer, without the file's content: run `git lfs pull` in {path}"
    assert refusal(path) == expected


def test_a_file_in_another_format_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert refusal(file) == (
        f"the model {file} is in the format GGUF, which is not read; give the folder of the model's safetensors version"
    )


def test_missing_shard(tmp_path: Path) -> None:
    make(MODELS["llama"]).save_pretrained(tmp_path, max_shard_size="60KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    assert "lacks 1 of the files that model.safetensors.index.json names" in refusal(tmp_path)


def test_torn_file(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("llama")
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "cannot be read as safetensors" in refusal(path)


def test_missing_tensor(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("llama")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors")
    assert "has no tensor 'model.layers.1.mlp.up_proj.weight'" in refusal(path)


def test_wrong_shape(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("llama")
    edit(path / "config.json", intermediate_size=100)
    assert "'model.layers.0.mlp.gate_proj.weight' has shape [96, 64], but config.json implies [100, 64]" in refusal(
        path
    )


def test_unknown_architecture(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("llama")
    edit(path / "config.json", architectures=["MambaForCausalLM"])
    supported = ", ".join(FAMILIES)
    why = "transformers' MambaForCausalLM cannot run on this engine: it keeps a state beside its keys and values"
    assert refusal(path) == f"the engine has no code of its own for MambaForCausalLM, and {why}; it has for {supported}"


@pytest.mark.parametrize("content", ["not json", "[]", ""])
def test_broken_config(content: str, copy_of: Callable[[str], Path]) -> None:
    path = copy_of("llama")
    (path / "config.json").write_text(content)
    assert "config.json" in refusal(path)


def test_quantized_checkpoint_of_an_unknown_method(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("llama")
    edit(path / "config.json", quantization_config={"quant_method": "hqq"})
    assert refusal(path) == (
        "config.json says that the model is quantized by hqq, which cannot be read; use the model's float16, bfloat16"
        " or float32 version, or one by compressed-tensors (int-, float-, naive- or pack-quantized), gptq, awq (gemm)"
        " or fp8"
    )


def test_layer_types_of_another_depth(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("qwen2-window")
    edit(path / "config.json", layer_types=["sliding_attention"])
    assert "layer_types for 1 layers, but num_hidden_layers is 3" in refusal(path)


def test_heads_that_do_not_divide(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("llama")
    edit(path / "config.json", num_key_value_heads=3)
    assert "has 4 attention heads, which 3 key-value heads do not divide" in refusal(path)


def test_consolidated_copy_is_left_alone(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("mistral")
    (path / "consolidated.safetensors").write_bytes(b"not read")
    assert torch.equal(
        logits(load_model(str(path), "float32", CPU)), logits(load_model(str(folder("mistral")), "float32", CPU))
    )


def test_unknown_activation(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("llama")
    edit(path / "config.json", hidden_act="snake")
    assert "activation 'snake'; supported are gelu" in refusal(path)


def test_unreachable_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    message = refusal("someone/some-model")
    assert "there is no folder someone/some-model, and the hub at http://127.0.0.1:9 cannot be reached" in message
