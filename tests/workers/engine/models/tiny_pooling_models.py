"""Small random models that pool, with transformers' answers to compare with."""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor

torch.set_num_threads(1)

VOCAB = 160
_OF_THE_FOLDER = ("modules.json", "config_sentence_transformers.json")
TEXT_LENGTHS = (1, 150, 3, 97, 17, 40, 64, 2)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 200,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_DISTIL: dict[str, Any] = {
    "vocab_size": VOCAB, "dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 200,
}  # fmt: skip
_GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 200}
_ROBERTA = _SHAPE | {"pad_token_id": 1, "max_position_embeddings": 202, "type_vocab_size": 1}
_DECODER = _SHAPE | {"num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None}
_MODERN = _SHAPE | {"num_hidden_layers": 5, "local_attention": 24, "cls_token_id": 1, "sep_token_id": 1}
_ONE, _THREE = {"num_labels": 1}, {"num_labels": 3}


_T5 = {
    "vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 3, "num_heads": 4, "n_positions": 200,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class TinyPoolingModel:
    """How to make one: transformers' classes, what to set, and how its hidden states are pooled."""

    model_class: str
    config_class: str
    settings: dict[str, Any] = field(default_factory=dict)
    mode: str = "mean"  # of an embedding without a folder that says it
    normalize: bool = False
    second_text: bool = False
    activation: str = "softmax"


EMBEDDERS = {
    "bert": TinyPoolingModel("BertModel", "BertConfig", _SHAPE),
    "bert-masked": TinyPoolingModel("BertForMaskedLM", "BertConfig", _SHAPE | {"hidden_act": "relu"}),
    "distilbert": TinyPoolingModel("DistilBertModel", "DistilBertConfig", _DISTIL),
    "roberta": TinyPoolingModel("RobertaModel", "RobertaConfig", _ROBERTA),
    "xlm-roberta": TinyPoolingModel("XLMRobertaModel", "XLMRobertaConfig", _ROBERTA),
    "modernbert": TinyPoolingModel("ModernBertModel", "ModernBertConfig", _MODERN),
    "mpnet": TinyPoolingModel("MPNetModel", "MPNetConfig", _ROBERTA),
    "qwen3": TinyPoolingModel("Qwen3ForCausalLM", "Qwen3Config", _DECODER | {"head_dim": 32}, "last", True),
    "qwen2": TinyPoolingModel("Qwen2ForCausalLM", "Qwen2Config", _DECODER, "last", True),
    "llama": TinyPoolingModel("LlamaForCausalLM", "LlamaConfig", _DECODER, "last", True),
    "gpt2": TinyPoolingModel("GPT2LMHeadModel", "GPT2Config", _GPT2, "last", True),
    "mistral": TinyPoolingModel("MistralModel", "MistralConfig", _DECODER | {"sliding_window": 24}, "last", True),
    "embeddinggemma": TinyPoolingModel(
        "Gemma3TextModel",
        "Gemma3TextConfig",
        _DECODER
        | {
            "head_dim": 32,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "use_bidirectional_attention": True,
        },
    ),
}
CLASSIFIERS = {
    "bert-pair": TinyPoolingModel(
        "BertForSequenceClassification", "BertConfig", _SHAPE | _ONE, second_text=True, activation="sigmoid"
    ),
    "bert-classes": TinyPoolingModel("BertForSequenceClassification", "BertConfig", _SHAPE | _THREE),
    "distilbert-classes": TinyPoolingModel("DistilBertForSequenceClassification", "DistilBertConfig", _DISTIL | _THREE),
    "roberta-classes": TinyPoolingModel("RobertaForSequenceClassification", "RobertaConfig", _ROBERTA | _THREE),
    "xlm-roberta-score": TinyPoolingModel(
        "XLMRobertaForSequenceClassification", "XLMRobertaConfig", _ROBERTA | _ONE, activation="sigmoid"
    ),
    "mpnet-classes": TinyPoolingModel("MPNetForSequenceClassification", "MPNetConfig", _ROBERTA | _THREE),
    "modernbert-classes": TinyPoolingModel(
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        _MODERN | _THREE | {"classifier_pooling": "mean", "norm_bias": True, "mlp_bias": True, "attention_bias": True},
    ),
    "gpt-neox-classes": TinyPoolingModel("GPTNeoXForSequenceClassification", "GPTNeoXConfig", _SHAPE | _THREE),
    "phi3-classes": TinyPoolingModel("Phi3ForSequenceClassification", "Phi3Config", _DECODER | _THREE),
    "qwen3-classes": TinyPoolingModel(
        "Qwen3ForSequenceClassification", "Qwen3Config", _DECODER | _THREE | {"head_dim": 32}
    ),
}
PADDED = {
    "electra": TinyPoolingModel("ElectraForPreTraining", "ElectraConfig", _SHAPE | {"embedding_size": 32}),
    "albert": TinyPoolingModel("AlbertForMaskedLM", "AlbertConfig", _SHAPE | {"embedding_size": 32}),
    "deberta": TinyPoolingModel(
        "DebertaV2Model", "DebertaV2Config", _SHAPE | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    ),
    "camembert": TinyPoolingModel("CamembertModel", "CamembertConfig", _ROBERTA),
    "cwm": TinyPoolingModel(
        "CwmForCausalLM", "CwmConfig", _DECODER | {"head_dim": 16, "bos_token_id": 0}, "last", True
    ),
    "electra-pair": TinyPoolingModel(
        "ElectraForSequenceClassification", "ElectraConfig", _SHAPE | _ONE, second_text=True, activation="sigmoid"
    ),
    "t5": TinyPoolingModel("T5EncoderModel", "T5Config", _T5),
    "deberta-classes": TinyPoolingModel("DebertaV2ForSequenceClassification", "DebertaV2Config", _SHAPE | _THREE),
}
"""Which run by transformers' classes."""
_MODELS = EMBEDDERS | CLASSIFIERS | PADDED
_folders: list[TemporaryDirectory[str]] = []  # held so that they are removed at exit


def new_folder() -> Path:
    _folders.append(TemporaryDirectory(prefix="pooling-"))
    return Path(_folders[-1].name)


@cache
def make_pooling_model(name: str) -> transformers.PreTrainedModel:
    """The model in float32, the same every time."""
    tiny = _MODELS[name]
    torch.manual_seed(3)
    model = getattr(transformers, tiny.model_class)(getattr(transformers, tiny.config_class)(**tiny.settings))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.5 if "embed" in parameter_name else 0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.float().eval()


@cache
def make_wide_model(name: str) -> transformers.PreTrainedModel:
    """A model of usual proportions in float32, whose layers neither swell nor fade."""
    tiny = _MODELS[name]
    sizes = {"hidden_size": 128, "intermediate_size": 512, "dim": 128, "hidden_dim": 512, "n_embd": 128}
    known = {size: value for size, value in sizes.items() if size in tiny.settings}
    torch.manual_seed(4)
    model = getattr(transformers, tiny.model_class)(getattr(transformers, tiny.config_class)(**tiny.settings | known))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    return model.float().eval()


@cache
def pooling_folder(name: str) -> Path:
    """A checkpoint as transformers saves it."""
    return saved(make_pooling_model(name))


@cache
def wide_folder(name: str) -> Path:
    return saved(make_wide_model(name))


def saved(model: transformers.PreTrainedModel) -> Path:
    path = new_folder()
    model.save_pretrained(path)
    return path


@cache
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in TEXT_LENGTHS]


def second_text_of(name: str, text: list[int]) -> int:
    return len(text) // 2 if _MODELS[name].second_text else 0


def hidden_states(name: str) -> list[Tensor]:
    """What transformers computes of each text by itself, float32 [tokens, 64]."""
    return states_of(make_pooling_model(name))


@torch.inference_mode()
def states_of(model: transformers.PreTrainedModel) -> list[Tensor]:
    trunk = getattr(model, model.base_model_prefix, model)
    return [trunk(torch.tensor([text])).last_hidden_state[0] for text in texts()]


@torch.inference_mode()
def logits(name: str) -> list[Tensor]:
    """What transformers' classifier says of each text by itself, float32 [labels]."""
    model, found = make_pooling_model(name), []
    for text in texts():
        more, second = {}, second_text_of(name, text)
        if second:
            more = {"token_type_ids": (torch.arange(len(text)) >= second).long()[None]}
        found.append(model(torch.tensor([text]), **more).logits[0])
    return found


def pooled(hidden: Tensor, mode: str) -> Tensor:
    """One of sentence-transformers' ways of pooling."""
    places = torch.arange(1, len(hidden) + 1)[:, None]
    ways = {
        "cls": hidden[0],
        "max": hidden.max(0).values,
        "mean": hidden.mean(0),
        "mean_sqrt_len": hidden.sum(0) / len(hidden) ** 0.5,
        "weightedmean": (hidden * places).sum(0) / places.sum(),
        "last": hidden[-1],
    }
    return ways[mode]


def save_modules(path: Path, pooling: dict[str, Any], dense: torch.nn.Linear | None, normalize: bool) -> None:
    """Make of a checkpoint a folder as sentence-transformers saves it."""
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense is not None else []), *(["Normalize"] if normalize else [])]
    places = ["" if kind == "Transformer" else f"{index}_{kind}" for index, kind in enumerate(kinds)]
    modules = [
        {"idx": index, "name": str(index), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, place) in enumerate(zip(kinds, places, strict=True))
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if dense is not None:
        (path / "2_Dense").mkdir()
        settings = {"in_features": dense.in_features, "out_features": dense.out_features, "bias": True}
        settings["activation_function"] = "torch.nn.modules.activation.Tanh"
        (path / "2_Dense" / "config.json").write_text(json.dumps(settings))
        tensors = {f"linear.{name}": tensor.detach() for name, tensor in dense.named_parameters()}
        save_file(tensors, path / "2_Dense" / "model.safetensors")


def model_moved(path: Path) -> Path:
    """Move the model's own files into `0_Transformer`, and return the whole folder."""
    own = [file for file in path.iterdir() if file.is_file() and file.name not in _OF_THE_FOLDER]
    (path / "0_Transformer").mkdir()
    for file in own:
        file.rename(path / "0_Transformer" / file.name)
    modules = json.loads((path / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (path / "modules.json").write_text(json.dumps(modules))
    return path


def normalized(vector: Tensor) -> Tensor:
    return F.normalize(vector, dim=-1)
