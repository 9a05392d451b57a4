"""The Llama-shaped decoder that Llama, Mistral, Qwen2 and Qwen3 share: RMS norms, rotary positions, a gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.errors import ModelLoadError
from workers.engine.layers.activation import activation
from workers.engine.layers.linear import Linear, load_fused, load_linear
from workers.engine.layers.norm import RMSNorm
from workers.engine.layers.rotary import Rotary, rotate
from workers.engine.models.base import AttentionContext, DecoderModel, load_head
from workers.engine.models.config import Json, ModelConfig, require, rope_config
from workers.engine.weights import Weights


@dataclass(frozen=True, slots=True)
class Variant:
    """Where the families differ."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False  # RMS norm over each query and key head before rotation


class RotaryDecoder(DecoderModel):
    prefix = "model."

    def __init__(
        self, config: ModelConfig, variant: Variant, weights: Weights, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        super().__init__(config, dtype, device)
        assert config.rope is not None
        self.embedding = weights.take("*.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self.rotary = Rotary(config.rope, config.head_dim, max_model_len, dtype, device)
        self.layers = [DecoderLayer(config, variant, weights, layer) for layer in range(config.num_layers)]
        self.norm = RMSNorm(weights, "*.norm", config.hidden_size, config.norm_eps)
        self.lm_head = load_head(weights, config, self.embedding)

    def forward(self, input_ids: Tensor, positions: Tensor, lengths: Tensor, attend: AttentionContext) -> Tensor:
        hidden = self.embedding[input_ids]
        cos, sin = self.rotary.cos_sin(positions, lengths)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, attend)
        return self.norm(hidden)


class DecoderLayer:
    def __init__(self, config: ModelConfig, variant: Variant, weights: Weights, layer: int) -> None:
        name = f"*.layers.{layer}"
        self.index = layer
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projections = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        self.qkv = load_fused(weights, projections, config.hidden_size, [queries, keys, keys], variant.qkv_bias)
        self.output = load_linear(weights, f"{name}.self_attn.o_proj", queries, config.hidden_size, variant.output_bias)
        self.query_norm = self.key_norm = None
        if variant.head_norm:
            self.query_norm = RMSNorm(weights, f"{name}.self_attn.q_norm", self.head_dim, config.norm_eps)
            self.key_norm = RMSNorm(weights, f"{name}.self_attn.k_norm", self.head_dim, config.norm_eps)
        self.input_norm = RMSNorm(weights, f"{name}.input_layernorm", config.hidden_size, config.norm_eps)
        self.mlp_norm = RMSNorm(weights, f"{name}.post_attention_layernorm", config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config, variant, weights, f"{name}.mlp")

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: AttentionContext) -> Tensor:
        hidden = hidden + self._attention(self.input_norm(hidden), cos, sin, attend)
        return hidden + self.mlp(self.mlp_norm(hidden))

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor, attend: AttentionContext) -> Tensor:
        tokens, turned = x.shape[0], self.heads + self.kv_heads
        qkv = self.qkv(x).view(tokens, turned + self.kv_heads, self.head_dim)
        if self.query_norm is None or self.key_norm is None:
            q, k = rotate(qkv[:, :turned], cos, sin).tensor_split([self.heads], 1)
        else:
            q = rotate(self.query_norm(qkv[:, : self.heads]), cos, sin)
            k = rotate(self.key_norm(qkv[:, self.heads : turned]), cos, sin)
        return self.output(attend(self.index, q, k, qkv[:, turned:]).reshape(tokens, -1))


class GatedMLP:
    def __init__(self, config: ModelConfig, variant: Variant, weights: Weights, name: str) -> None:
        width = config.intermediate_size
        projections = [f"{name}.gate_proj", f"{name}.up_proj"]
        self.gate_up: Linear = load_fused(weights, projections, config.hidden_size, [width, width], variant.mlp_bias)
        self.down = load_linear(weights, f"{name}.down_proj", width, config.hidden_size, variant.mlp_bias)
        self.activation = activation(config.activation)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.activation(gate).mul_(up))


def decoder_config(
    raw: Json,
    *,
    num_kv_heads: int | None = None,
    max_position_embeddings: int,
    head_dim: int | None = None,
    windows: tuple[int | None, ...] | None = None,
) -> ModelConfig:
    """A config.json of this shape as a ModelConfig; the keywords are the family's defaults."""
    hidden, heads, layers = require(raw, "hidden_size"), require(raw, "num_attention_heads"), require(raw, "num_hidden_layers")
    positions = require(raw, "max_position_embeddings", max_position_embeddings)
    kv_heads = raw.get("num_key_value_heads", num_kv_heads) or heads
    if heads % kv_heads:
        raise ModelLoadError(f"config.json has {heads} attention heads, which {kv_heads} key-value heads do not divide")
    dim = raw.get("head_dim") or head_dim or hidden // heads
    return ModelConfig(
        architecture=str(raw["architectures"][0]),
        vocab_size=require(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=require(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=positions,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        activation=str(raw.get("hidden_act", "silu")),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        sliding_windows=windows or (None,) * layers,
        attention_scales=(dim**-0.5,) * layers,
        rope=rope_config(raw, positions),
    )
