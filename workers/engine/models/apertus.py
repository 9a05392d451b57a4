"""Implement Apertus: Llama's shape with a norm over each query and key head, and a MLP without
gates, whose activation xIELU has numbers of its own in each layer.
"""

from __future__ import annotations

from dataclasses import replace

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, TensorNames, decoder_config

_DEFAULTS: Json = {"hidden_act": "xielu", "rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0}
_ROPE: Json = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_VARIANT = DecoderVariant(
    TensorNames(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm"), head_norm=True, gated=False
)


def config(raw: Json) -> ModelConfig:
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or _ROPE
    return decoder_config({**_DEFAULTS, **raw, "rope_scaling": scaling}, max_position_embeddings=65536)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    bias = bool(raw.get("attention_bias", False))
    return RotaryDecoder(config, replace(_VARIANT, qkv_bias=bias, output_bias=bias), weights, max_model_len)
