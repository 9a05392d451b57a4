"""Implement Granite: Llama's shape with multipliers of embeddings, attention scores, residual
additions and logits.
"""

from __future__ import annotations

from dataclasses import replace

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, TensorNames, decoder_config


def config(raw: Json) -> ModelConfig:
    model = decoder_config(raw, max_position_embeddings=2048)
    return multiplied(model, raw, raw.get("attention_multiplier", 1.0), 1 / float(raw.get("logits_scaling", 1.0)))


def build(
    raw: Json, config: ModelConfig, weights: Weights, max_model_len: int, names: TensorNames | None = None
) -> RotaryDecoder:
    bias, mlp_bias = bool(raw.get("attention_bias", False)), bool(raw.get("mlp_bias", False))
    factor = float(raw.get("residual_multiplier", 1.0))
    variant = DecoderVariant(names or TensorNames(), qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias, factor=factor)
    return RotaryDecoder(config, variant, weights, max_model_len)


def multiplied(model: ModelConfig, raw: Json, scale: float, logit_factor: float) -> ModelConfig:
    """Return the configuration with multipliers of embeddings, attention scores and logits."""
    return replace(
        model,
        layers=tuple(replace(layer, scale=float(scale)) for layer in model.layers),
        embedding_factor=float(raw.get("embedding_multiplier", 1.0)),
        logit_factor=float(logit_factor),
    )
