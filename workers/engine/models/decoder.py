"""The Llama-shaped decoder that Llama, Mistral, Qwen2 and Qwen3 share: RMS norms, rotary positions, a gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from workers.engine.attention import RotaryHeads
from workers.engine.errors import ModelLoadError
from workers.engine.layers.linear import load_fused, load_gated, load_row_parallel
from workers.engine.layers.norm import RMSNorm
from workers.engine.layers.rotary import Rotary
from workers.engine.models.base import AttentionContext, DecoderModel, load_tables
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

    def __init__(self, config: ModelConfig, variant: Variant, weights: Weights, max_model_len: int) -> None:
        super().__init__(config, weights)
        assert config.rope is not None
        self.embedding, self.lm_head = load_tables(weights, config, "*.embed_tokens.weight")
        self.rotary = Rotary(config.rope, config.head_dim, max_model_len, weights.dtype, weights.device)
        self.layers = [DecoderLayer(config, variant, weights, layer) for layer in range(config.num_layers)]
        self.norm = RMSNorm(weights, "*.norm", config.hidden_size, config.norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, lengths: Tensor, attend: AttentionContext) -> Tensor:
        hidden = self.embedding.rows(input_ids)
        cos, sin = self.rotary.cos_sin(positions, lengths)
        residual: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, cos, sin, attend)
        return hidden if residual is None else self.norm.add(hidden, residual)[0]


class DecoderLayer:
    def __init__(self, config: ModelConfig, variant: Variant, weights: Weights, layer: int) -> None:
        name = f"*.layers.{layer}"
        self.index = layer
        self.head_dim = config.head_dim
        queries = weights.parallel.shard(config.num_heads * config.head_dim)
        keys = weights.parallel.shard(config.num_kv_heads * config.head_dim, config.kv_copies)
        projections = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        self.qkv = load_fused(weights, projections, config.hidden_size, [queries, keys, keys], variant.qkv_bias)
        self.output = load_row_parallel(weights, f"{name}.self_attn.o_proj", queries, config.hidden_size, variant.output_bias)
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if variant.head_norm:
            self.query_norm = RMSNorm(weights, f"{name}.self_attn.q_norm", self.head_dim, config.norm_eps)
            self.key_norm = RMSNorm(weights, f"{name}.self_attn.k_norm", self.head_dim, config.norm_eps)
        self.input_norm = RMSNorm(weights, f"{name}.input_layernorm", config.hidden_size, config.norm_eps)
        self.mlp_norm = RMSNorm(weights, f"{name}.post_attention_layernorm", config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config, variant, weights, f"{name}.mlp")

    def __call__(
        self, hidden: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, attend: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """The layer's own output, and the residual stream before it; the stream into the layer is `hidden` plus `residual`, if any."""
        x, residual = (self.input_norm(hidden), hidden) if residual is None else self.input_norm.add(hidden, residual)
        x, residual = self.mlp_norm.add(self._attention(x, cos, sin, attend), residual)
        return self.mlp(x), residual

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor, attend: AttentionContext) -> Tensor:
        tokens = x.shape[0]
        qkv = self.qkv(x).view(tokens, -1, self.head_dim)
        attended = attend.rotary(self.index, qkv, RotaryHeads(cos, sin, self.query_norm, self.key_norm))
        return self.output(attended.reshape(tokens, -1))


class GatedMLP:
    def __init__(self, config: ModelConfig, variant: Variant, weights: Weights, name: str) -> None:
        width = weights.parallel.part(config.intermediate_size)
        self.gate_up = load_gated(
            weights, f"{name}.gate_proj", f"{name}.up_proj", config.hidden_size, width, variant.mlp_bias, config.activation
        )
        self.down = load_row_parallel(weights, f"{name}.down_proj", width, config.hidden_size, variant.mlp_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))


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
