"""Implement Ministral 3: Mistral with queries that grow with their positions."""

from __future__ import annotations

from dataclasses import replace

from workers.engine.layers.query_temperature import QueryTemperature
from workers.engine.models import mistral
from workers.engine.models.config import Json, ModelConfig, require, sliding_window
from workers.engine.models.decoder import decoder_config

_DEFAULTS: Json = {
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def config(raw: Json) -> ModelConfig:
    raw = {**_DEFAULTS, **raw}
    windows = (sliding_window(raw),) * require(raw, "num_hidden_layers")
    config = decoder_config(raw, num_kv_heads=8, head_dim=128, max_position_embeddings=262144, windows=windows)
    scaling = raw["rope_parameters"]
    length = scaling.get("original_max_position_embeddings", config.max_position_embeddings)
    return replace(config, query_temperature=QueryTemperature(float(scaling["llama_4_scaling_beta"]), int(length)))


build = mistral.build
