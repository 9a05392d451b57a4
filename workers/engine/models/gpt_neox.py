"""Implement GPT-NeoX (Pythia): layer norms, partial rotation, a MLP without gates, and by default
attention and MLP in parallel.
"""

from __future__ import annotations

from workers.engine.layers.heads import by_head
from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, TensorNames, decoder_config


def config(raw: Json) -> ModelConfig:
    defaults = {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rope_theta": raw.get("rotary_emb_base"),
        "partial_rotary_factor": raw.get("rotary_pct", 0.25),
    }
    full_heads = {"num_key_value_heads": None, "head_dim": None}
    return decoder_config({**defaults, **raw, **full_heads}, max_position_embeddings=2048, norm_eps="layer_norm_eps")


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    fused = "attention.query_key_value"
    names = TensorNames(
        embedding="*.embed_in",
        norm="*.final_layer_norm",
        head="embed_out" if "embed_out.weight" in weights else "lm_head",
        queries=fused,
        keys=fused,
        values=fused,
        output="attention.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )
    bias = bool(raw.get("attention_bias", True))
    variant = DecoderVariant(
        names,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        layer_norm=True,
        gated=False,
        parallel=bool(raw.get("use_parallel_residual", True)),
        places=by_head,
    )
    return RotaryDecoder(config, variant, weights, max_model_len)
