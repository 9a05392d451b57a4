"""Implement Gemma 1: norms multiply by 1 + weight, and embeddings by the root of their size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workers.engine.layers.weights import Weights
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import Json, ModelConfig, sliding_window, windows_by_kind
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, TensorNames, decoder_config

_DEFAULTS: Json = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def config(raw: Json) -> ModelConfig:
    refuse_both_sides(raw)
    activation = str(raw.get("hidden_act") or "gelu")
    if activation == "gelu":  # the first checkpoints mean the approximation
        activation = "gelu_pytorch_tanh"
    return gemma_config({**raw, "hidden_activation": activation}, 16, 8192, scalar=raw.get("head_dim", 256))


def gemma_config(
    raw: Json, kv_heads: int, positions: int, kinds: Sequence[str] | None = None, scalar: float | None = None
) -> ModelConfig:
    """Return what all of them share. Scores are multiplied by `scalar` ** -0.5."""
    raw = {**_DEFAULTS, **raw}
    windows = None if kinds is None else windows_by_kind(kinds, sliding_window(raw, 4096))
    config = decoder_config(
        {**raw, "hidden_act": raw["hidden_activation"]},
        num_kv_heads=kv_heads,
        max_position_embeddings=positions,
        windows=windows,
    )
    scale = float(raw.get("query_pre_attn_scalar", 256) if scalar is None else scalar) ** -0.5
    layers = tuple(replace(layer, scale=scale) for layer in config.layers)
    return replace(config, layers=layers, embedding_factor=config.hidden_size**0.5)


def refuse_both_sides(raw: Json) -> None:
    if raw.get("use_bidirectional_attention"):
        raise ModelLoadError(
            f"config.json sets use_bidirectional_attention, which {raw['architectures'][0]} supports only by"
            " transformers' class; set model_impl transformers"
        )


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    return RotaryDecoder(config, gemma_variant(raw, TensorNames()), weights, max_model_len)


def gemma_variant(raw: Json, names: TensorNames, head_norm: bool = False) -> DecoderVariant:
    bias = bool(raw.get("attention_bias", False))
    return DecoderVariant(
        names, qkv_bias=bias, output_bias=bias, head_norm=head_norm, norm_offset=1.0, rounded_factor=True
    )
