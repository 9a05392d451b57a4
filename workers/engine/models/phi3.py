"""Implement Phi 3 and 4: Llama's shape with fused projections and partly rotated heads."""

from __future__ import annotations

from workers.engine.layers.heads import side_by_side
from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig, require, sliding_window
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, TensorNames, decoder_config

_DEFAULTS: Json = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
_QKV, _GATES = "self_attn.qkv_proj", "mlp.gate_up_proj"
_VARIANT = DecoderVariant(
    TensorNames(queries=_QKV, keys=_QKV, values=_QKV, gate=_GATES, up=_GATES), places=side_by_side
)


def config(raw: Json) -> ModelConfig:
    raw = {**_DEFAULTS, **raw, "rope_scaling": _scaling(raw)}
    windows = (sliding_window(raw),) * require(raw, "num_hidden_layers")
    return decoder_config(raw, max_position_embeddings=4096, windows=windows)


def _scaling(raw: Json) -> Json:
    """Return the RoPE scaling; checkpoints call "yarn" what is LongRoPE."""
    scaling = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if scaling.get("rope_type", scaling.get("type")) == "yarn":
        scaling["rope_type"] = "longrope"
    return scaling


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    return RotaryDecoder(config, _VARIANT, weights, max_model_len)
