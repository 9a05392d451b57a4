"""Implement the text model of Gemma 4 Unified: Gemma 4 without inputs by layer."""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models import gemma4
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import RotaryDecoder

_DEFAULTS: Json = {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262144, "sliding_window": 1024}


def config(raw: Json) -> ModelConfig:
    return gemma4.config({**_DEFAULTS, **raw})


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    return gemma4.build({**_DEFAULTS, **raw}, config, weights, max_model_len)
