"""Implement Hunyuan (dense): Llama's shape with a norm over each query and key head after the
rotation, whose base may grow by a fixed `alpha`.
"""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, TensorNames, decoder_config

_DEFAULTS: Json = {"rms_norm_eps": 1e-5}
_NAMES = TensorNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")


def config(raw: Json) -> ModelConfig:
    return decoder_config({**_DEFAULTS, **raw, **_rope(raw)}, max_position_embeddings=2048)


def _rope(raw: Json) -> Json:
    """Return the rotary settings; a "dynamic" kind with `alpha` does not depend on lengths."""
    scaling = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    kind, alpha = scaling.get("rope_type", scaling.get("type")), scaling.get("alpha")
    if kind != "dynamic" or not alpha:
        return {}
    dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    return {"rope_scaling": {"rope_type": "default", "rope_theta": theta * alpha ** (dim / (dim - 2))}}


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    bias = bool(raw.get("attention_bias", False))
    variant = DecoderVariant(_NAMES, qkv_bias=bias, output_bias=bias, head_norm=True, norm_after_rotation=True)
    return RotaryDecoder(config, variant, weights, max_model_len)
