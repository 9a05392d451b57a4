"""Implement StarCoder 2: layer norms, biases, and an MLP without gates."""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig, require, sliding_window
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, TensorNames, decoder_config

_DEFAULTS: Json = {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "tie_word_embeddings": True}
_NAMES = TensorNames(up="mlp.c_fc", down="mlp.c_proj")


def config(raw: Json) -> ModelConfig:
    raw = {**_DEFAULTS, **raw}
    windows = (sliding_window(raw),) * require(raw, "num_hidden_layers")
    return decoder_config(raw, num_kv_heads=2, max_position_embeddings=4096, windows=windows, norm_eps="norm_epsilon")


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    bias = bool(raw.get("use_bias", True))
    variant = DecoderVariant(_NAMES, qkv_bias=bias, output_bias=bias, mlp_bias=bias, layer_norm=True, gated=False)
    return RotaryDecoder(config, variant, weights, max_model_len)
