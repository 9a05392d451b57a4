"""Implement HyperCLOVA X: Granite with norms of each part's result, logits that are multiplied, and
attention scores of the usual scale unless another is set.
"""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models import granite
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import RotaryDecoder, TensorNames, decoder_config


def config(raw: Json) -> ModelConfig:
    model = decoder_config(raw, max_position_embeddings=2048)
    scale = raw.get("attention_multiplier") or model.layers[0].scale
    return granite.multiplied(model, raw, scale, raw.get("logits_scaling", 1.0))


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    names = TensorNames()
    if raw.get("use_post_norm", True):
        names = TensorNames(attention_result_norm="post_norm1", mlp_result_norm="post_norm2")
    return granite.build(raw, config, weights, max_model_len, names)
