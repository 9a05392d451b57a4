"""Small random models that give numbers for texts, with their tokenizers, as folders."""

import json
from pathlib import Path

import torch
import transformers
from torch import Tensor

from tests.support.small_tokenizers import bert, write_folder

LONGEST = 32
SIZE = 16


def save_embedder(folder: Path) -> transformers.BertModel:
    """Write a folder of sentence-transformers: mean pooling, then length 1, with a prompt."""
    model = transformers.BertModel(_config())
    _save(model, folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": SIZE, "pooling_mode_mean_tokens": True}
    for name, content in {
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": {"max_seq_length": LONGEST, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {"query": "the dog: ", "document": ""}},
    }.items():
        (folder / name).write_text(json.dumps(content))
    return model.eval()


def save_cross_encoder(folder: Path) -> transformers.BertForSequenceClassification:
    """Write the folder of a model with one label."""
    model = transformers.BertForSequenceClassification(_config(num_labels=1))
    _save(model, folder)
    return model.eval()


@torch.inference_mode()
def embedding(model: transformers.BertModel, token_ids: list[int]) -> Tensor:
    """What the embedder's folder says of some tokens."""
    hidden = model(torch.tensor([token_ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(hidden.mean(0), dim=0)


@torch.inference_mode()
def score(model: transformers.BertForSequenceClassification, token_ids: list[int], second_text: int) -> float:
    """What the cross-encoder says of a pair."""
    types = (torch.arange(len(token_ids)) >= second_text).long()[None]
    return torch.sigmoid(model(torch.tensor([token_ids]), token_type_ids=types).logits[0, 0]).item()


def _config(**more: int) -> transformers.BertConfig:
    torch.manual_seed(3)
    return transformers.BertConfig(
        vocab_size=bert().get_vocab_size(),
        hidden_size=SIZE,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        **more,
    )


def _save(model: transformers.PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    write_folder(folder, bert(), {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"})
