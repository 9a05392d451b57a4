"""Implement Cohere (Command R, Aya): attention and MLP read the same normed input, and heads are
rotated in pairs side by side.
"""

from __future__ import annotations

from dataclasses import replace

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, TensorNames, decoder_config

_DEFAULTS: Json = {"layer_norm_eps": 1e-5, "tie_word_embeddings": True}


def config(raw: Json) -> ModelConfig:
    return cohere_config({"rope_theta": 5e5, **raw})


def cohere_config(raw: Json, windows: tuple[int | None, ...] | None = None) -> ModelConfig:
    """Return what Cohere and Cohere 2 share."""
    raw = {**_DEFAULTS, **raw}
    config = decoder_config(raw, max_position_embeddings=8192, windows=windows, norm_eps="layer_norm_eps")
    scale = raw.get("logit_scale", 0.0625)
    return replace(config, logit_factor=1.0 if scale is None else float(scale))


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    bias = bool(raw.get("attention_bias", False))
    variant = DecoderVariant(
        TensorNames(mlp_norm=None),
        qkv_bias=bias,
        output_bias=bias,
        layer_norm=True,
        norm_bias=False,
        own_head_norms=bool(raw.get("use_qk_norm", False)),
        parallel=True,
        interleaved=True,
    )
    return RotaryDecoder(config, variant, weights, max_model_len)
