"""Implement Jais 2: Llama's shape with layer norms, biases, and a MLP without gates, whose
activation is ReLU squared.
"""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, decoder_config

_DEFAULTS: Json = {"hidden_act": "relu2", "layer_norm_eps": 1e-5}


def config(raw: Json) -> ModelConfig:
    return decoder_config({**_DEFAULTS, **raw}, max_position_embeddings=8192, norm_eps="layer_norm_eps")


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    bias, mlp_bias = bool(raw.get("attention_bias", True)), bool(raw.get("mlp_bias", True))
    variant = DecoderVariant(qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias, layer_norm=True, gated=False)
    return RotaryDecoder(config, variant, weights, max_model_len)
