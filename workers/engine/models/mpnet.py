"""Implement MPNet: BERT with an attention bias by the distance of a key from its query."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig, require
from workers.engine.models.encoder import BERT_NAMES, PostNormEncoder, encoder_config

_FIRST_POSITION = 2  # regardless of config.json's padding
_REACH = 128  # larger distances have the same bias
_NAMES = replace(
    BERT_NAMES,
    queries="attention.attn.q",
    keys="attention.attn.k",
    values="attention.attn.v",
    output="attention.attn.o",
    attention_norm="attention.LayerNorm",
)


def config(raw: Json) -> ModelConfig:
    positions = require(raw, "max_position_embeddings", 512) - _FIRST_POSITION
    return encoder_config({"vocab_size": 30527, **raw}, positions)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> PostNormEncoder:
    encoder = PostNormEncoder(config, _NAMES, weights, _FIRST_POSITION)
    buckets = require(raw, "relative_attention_num_buckets", 32)
    table = weights.take("*.encoder.relative_attention_bias.weight", (buckets, config.layers[0].heads))
    rows = _bucket(torch.arange(-_REACH, _REACH + 1), buckets).to(weights.device)
    encoder.position_bias = table[rows].t().float().contiguous()
    return encoder


def _bucket(distances: Tensor, buckets: int) -> Tensor:
    """Return the rows of T5's table (Raffel et al., 2020) for keys at these distances behind their
    query.

    Half of the rows are for either side; in each half, one half is for single distances and one for
    growing ranges.
    """
    side = buckets // 2
    single = side // 2
    away = distances.abs()
    grown = torch.log(away.clamp(min=1).float() / single) / math.log(_REACH / single) * (side - single)
    bucket = torch.where(away < single, away, (single + grown.long()).clamp(max=side - 1))
    return bucket + side * (distances > 0)
