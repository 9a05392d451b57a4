"""Implement Ministral 3: Mistral with queries that grow with their positions."""

from __future__ import annotations

from dataclasses import replace

from workers.engine.layers.query_temperature import QueryTemperature
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models import mistral
from workers.engine.models.config import Json, ModelConfig, require, rope_config, sliding_window
from workers.engine.models.decoder import decoder_config

_ROPE: Json = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def config(raw: Json) -> ModelConfig:
    raw = {"rms_norm_eps": 1e-5, **raw, "rope_parameters": raw.get("rope_parameters") or _ROPE}
    windows = (sliding_window(raw),) * require(raw, "num_hidden_layers")
    config = decoder_config(raw, num_kv_heads=8, head_dim=128, max_position_embeddings=262144, windows=windows)
    scaling = rope_config(raw, config.max_position_embeddings).scaling
    return replace(config, query_temperature=_query_temperature(scaling))


def _query_temperature(scaling: Json) -> QueryTemperature:
    beta = scaling.get("llama_4_scaling_beta")
    if not isinstance(beta, int | float):
        raise ModelLoadError(
            f"config.json has no usable 'llama_4_scaling_beta' in its RoPE settings (found {beta!r}); it must be a"
            " number, by which queries of Ministral 3 grow with their positions"
        )
    return QueryTemperature(float(beta), require(scaling, "original_max_position_embeddings"))


build = mistral.build
