"""Implement Seed-OSS: Llama's shape with a separate head size and a bias on queries, keys and
values.
"""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, decoder_config


def config(raw: Json) -> ModelConfig:
    defaults = {"num_key_value_heads": 8, "head_dim": 128}
    return decoder_config({**defaults, **raw}, max_position_embeddings=524288)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    variant = DecoderVariant(
        qkv_bias=bool(raw.get("attention_bias", True)),
        output_bias=bool(raw.get("attention_out_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )
    return RotaryDecoder(config, variant, weights, max_model_len)
