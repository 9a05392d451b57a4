"""Implement StableLM 1.x and 2: layer norms, partial rotation, and optionally attention and MLP in
parallel after one norm.
"""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, TensorNames, decoder_config

_DEFAULTS = {"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25}


def config(raw: Json) -> ModelConfig:
    return decoder_config(
        {**_DEFAULTS, **raw, "head_dim": None}, max_position_embeddings=4096, norm_eps="layer_norm_eps"
    )


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    parallel = bool(raw.get("use_parallel_residual", False))
    variant = DecoderVariant(
        TensorNames(
            query_norm="self_attn.q_layernorm.norms.{}",
            key_norm="self_attn.k_layernorm.norms.{}",
            mlp_norm=None if parallel else "post_attention_layernorm",
        ),
        qkv_bias=bool(raw.get("use_qkv_bias", False)),
        own_head_norms=bool(raw.get("qk_layernorm", False)),
        layer_norm=True,
        parallel=parallel,
    )
    return RotaryDecoder(config, variant, weights, max_model_len)
