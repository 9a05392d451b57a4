"""Implement GLM and GLM 4 (dense): rotation of the first half of each head in pairs side by side,
and in GLM 4 norms of each part's result.
"""

from __future__ import annotations

from dataclasses import replace

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, TensorNames, decoder_config

_DEFAULTS = {"num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5}
_NAMES = TensorNames(gate="mlp.gate_up_proj", up="mlp.gate_up_proj")
_GLM4_NAMES = replace(_NAMES, attention_result_norm="post_self_attn_layernorm", mlp_result_norm="post_mlp_layernorm")


def config(raw: Json) -> ModelConfig:
    return decoder_config({**_DEFAULTS, **raw}, head_dim=128, max_position_embeddings=131072)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    names = _GLM4_NAMES if config.architecture.startswith("Glm4") else _NAMES
    variant = DecoderVariant(names, qkv_bias=bool(raw.get("attention_bias", True)), interleaved=True)
    return RotaryDecoder(config, variant, weights, max_model_len)
