"""Read a checkpoint's config.json into the engine's own types.

transformers' configuration classes are not used, since their import alone takes seconds.
transformers writes only values that differ from a family's defaults, so each family's file repeats
those defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from workers.engine.layers.rope_config import RopeConfig
from workers.engine.messages.cache_groups import CacheRule, LayerCache
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.pooling_config import PoolingConfig

if TYPE_CHECKING:  # the command line imports this module without torch
    from workers.engine.layers.base import AttentionShape
    from workers.engine.layers.query_temperature import QueryTemperature

Json = Mapping[str, Any]

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
# Other names. A text's positions are equal in all coordinates of "mrope".
_ROPE_ALIASES = {"mrope": "default", "su": "longrope"}
_SCALED_FROM_ORIGINAL = ("llama3", "yarn", "longrope")
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model: a list of layers, and what they share."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    layers: tuple[AttentionShape, ...]
    # The rotations of its layers; None for layers without positions beside others that have them
    ropes: tuple[RopeConfig | None, ...] = ()
    rotations: tuple[int, ...] = ()  # by layer, the index in `ropes`; empty if all have the first
    query_temperature: QueryTemperature | None = None
    embedding_factor: float = 1.0
    logit_factor: float = 1.0
    logit_cap: float | None = None  # cap * tanh(logit / cap)
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None  # its name in the checkpoint
    pooling: PoolingConfig | None = None  # for a model that does not generate

    @property
    def whole_prompts(self) -> bool:
        """Return whether a prompt must be computed in one step, without any cached part."""
        bidirectional = not all(layer.pattern.causal for layer in self.layers)
        return bidirectional or (self.pooling is not None and self.pooling.modes != ("last",))

    def within(self, length: int) -> ModelConfig:
        """Return the shape for contexts of up to `length` tokens, without windows as long."""
        return replace(self, layers=tuple(_within(layer, length) for layer in self.layers))

    def layer_caches(self, number_bytes: int) -> list[LayerCache | None]:
        """Return what each layer keeps, in numbers of so many bytes; None if it reads another's.

        A model that computes whole prompts in one step keeps nothing longer than that.
        """
        whole = self.whole_prompts
        return [None if layer.reads is not None else _layer_cache(layer, number_bytes, whole) for layer in self.layers]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the tasks that requests may ask for."""
        if self.pooling is None:
            return ("generate",)
        if self.pooling.labels:
            return ("classify", "score") if len(self.pooling.labels) == 1 else ("classify",)
        return ("embed", "token_embed") if self.whole_prompts and not self.pooling.dense else ("embed",)

    @property
    def embedding_size(self) -> int:
        """Return the size of an embedding, or 0 for a model that makes none."""
        if self.pooling is None or self.pooling.labels:
            return 0
        dense = self.pooling.dense
        return dense[-1].size_out if dense else len(self.pooling.modes) * self.hidden_size

    def matryoshka_sizes(self) -> list[int]:
        """Return the allowed sizes of embeddings, or [] if every size up to the largest is
        allowed.
        """
        if self.pooling is None or not self.embedding_size or self.pooling.any_size:
            return []
        return sorted({*self.pooling.sizes, self.embedding_size})

    @property
    def max_model_len(self) -> int:
        """Return the longest context in tokens that the model was made for."""
        return max((rope.longest for rope in self.ropes if rope is not None), default=self.max_position_embeddings)

    def prefix_cacheable(self, max_model_len: int) -> bool:
        """Return whether equal prefixes always have equal keys, so that requests may share cached
        blocks.
        """
        ropes = (rope for rope in self.ropes if rope is not None)
        return all(not rope.depends_on_length or max_model_len <= rope.unscaled_length for rope in ropes)

    def rotation(self, layer: int) -> int:
        """Return the index in `ropes` of a layer's rotation."""
        return self.rotations[layer] if self.rotations else 0


def _within(layer: AttentionShape, length: int) -> AttentionShape:
    pattern = layer.pattern
    reaches = (pattern.window or 0) >= length or (pattern.chunk or 0) >= length
    return replace(layer, pattern=replace(pattern, window=None, chunk=None)) if pattern.causal and reaches else layer


def _layer_cache(layer: AttentionShape, number_bytes: int, keeps_all: bool) -> LayerCache:
    rule = CacheRule() if keeps_all else CacheRule(layer.pattern.window, layer.pattern.chunk)
    return LayerCache(rule, 2 * layer.keys * number_bytes, (layer.kv_heads, layer.head_dim))


def shard_model(model: ModelConfig, size: int) -> ModelConfig:
    """Return the shape of one rank's part of `model`.

    If there are fewer key-value heads than ranks, several ranks have the same ones.

    Raises ModelLoadError if the heads cannot be divided into `size` equal parts.
    """
    check_ranks([(layer.heads, layer.kv_heads) for layer in model.layers], size)
    return replace(model, layers=tuple(_shard_layer(layer, size) for layer in model.layers))


def check_ranks(layers: Sequence[tuple[int, int]], size: int) -> None:
    """Raise ModelLoadError unless `size` ranks can share layers with these numbers of heads and
    key-value heads.
    """
    kinds = dict.fromkeys(layers)
    most = max(heads for heads, _ in kinds)
    fits = [ranks for ranks in range(1, most + 1) if all(_divides(ranks, *kind) for kind in kinds)]
    if size not in fits:
        named = " or ".join(f"{heads} attention heads and {kv_heads} key-value heads" for heads, kv_heads in kinds)
        raise ModelLoadError(
            f"{size} ranks cannot share the model's {named} equally; tensor parallel sizes that fit:"
            f" {', '.join(map(str, fits))}"
        )


def _shard_layer(layer: AttentionShape, size: int) -> AttentionShape:
    copies = max(1, size // layer.kv_heads)
    return replace(layer, heads=layer.heads // size, kv_heads=layer.kv_heads * copies // size, kv_copies=copies)


def rope_config(raw: Json, max_position_embeddings: int) -> RopeConfig:
    """Return the rotary settings of a config.json, in the form of transformers 5
    (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`).
    """
    scaling = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    kind = _ROPE_ALIASES.get(kind, kind)
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    if kind not in ROPE_TYPES:
        raise ModelLoadError(f"config.json asks for RoPE scaling {kind!r}; supported are {', '.join(ROPE_TYPES)}")
    share = float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0)
    if not 0 < share <= 1:
        raise ModelLoadError(f"config.json has a partial_rotary_factor of {share}; it must be above 0 and at most 1")
    if kind in _SCALED_FROM_ORIGINAL:
        if raw.get("original_max_position_embeddings"):
            scaling["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
        scaling.setdefault("original_max_position_embeddings", max_position_embeddings)
    _require_scaling(kind, scaling)
    return RopeConfig(theta, kind, scaling, max_position_embeddings, share)


def ropes_by_kind(
    raw: Json, max_position_embeddings: int, local_theta: float, global_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotations of layers with a window and of those without, in the form of
    transformers 5 (`rope_parameters` by type of layer) or 4 (`rope_scaling` of those without).

    The bases are defaults. Raises ModelLoadError.
    """
    local, full = rope_parameters_of(raw, (SLIDING, FULL))
    scalings = (
        {"rope_theta": local_theta, **local},
        {"rope_theta": global_theta, **(raw.get("rope_scaling") or {}), **full},
    )
    first, second = (rope_config({**raw, "rope_scaling": each}, max_position_embeddings) for each in scalings)
    return first, second


def rope_parameters_of(raw: Json, kinds: Sequence[str]) -> list[Json]:
    """Return the `rope_parameters` of each type of layer, {} for one that has none.

    Raises ModelLoadError if they are of no type of layer, which transformers 5.24 would ignore.
    """
    by_kind = raw.get("rope_parameters") or {}
    found = [by_kind.get(kind) or {} for kind in kinds]
    if not all(isinstance(each, Mapping) for each in found) or (by_kind and by_kind.keys().isdisjoint(kinds)):
        raise ModelLoadError(
            f"config.json has rope_parameters that are not by type of layer; give {' and '.join(kinds)} an object each"
        )
    return found


def rotations_by_kind(kinds: Sequence[str]) -> tuple[int, ...]:
    """Return the rotations of layers from `layer_kinds`: the first for those with a window, the
    second for the others.
    """
    return tuple(int(kind != SLIDING) for kind in kinds)


def _require_scaling(kind: str, scaling: Json) -> None:
    required = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "longrope": ("long_factor", "short_factor"),
    }.get(kind, ())
    missing = [name for name in required if scaling.get(name) is None]
    if missing:
        raise ModelLoadError(f"config.json asks for RoPE scaling {kind!r} but does not set {', '.join(missing)}")


def layer_windows(raw: Json, num_layers: int, default_window: int | None) -> tuple[int | None, ...]:
    """Return sliding windows by layer, for families in which `use_sliding_window` enables them
    (Qwen2, Qwen3).
    """
    window = sliding_window(raw, default_window) if raw.get("use_sliding_window", False) else None
    if window is None:
        return (None,) * num_layers
    first = int(raw.get("max_window_layers", 28))
    default = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return windows_by_kind(layer_kinds(raw, default), window)


def sliding_window(raw: Json, default: int | None = None) -> int | None:
    """Return the tokens that layers with a window see, their own included; None for all.

    Raises ModelLoadError.
    """
    return optional(raw, "sliding_window", default)


def layer_kinds(raw: Json, default: Sequence[str], known: Sequence[str] = (SLIDING, FULL)) -> Sequence[str]:
    """Return `layer_types`, one of `known` for each layer.

    Raises ModelLoadError.
    """
    kinds, count = raw.get("layer_types") or default, require(raw, "num_hidden_layers")
    if not isinstance(kinds, list):
        raise ModelLoadError(f"config.json has no usable 'layer_types' (found {kinds!r}); it must be a list")
    if len(kinds) != count:
        raise ModelLoadError(f"config.json names layer_types for {len(kinds)} layers, but num_hidden_layers is {count}")
    for kind in kinds:
        if kind not in known:
            raise ModelLoadError(
                f"config.json has a layer of type {kind!r}, and the engine's own code for {raw['architectures'][0]} has"
                f" {' and '.join(known)}; with model_impl transformers, transformers' class runs where it can"
            )
    return kinds


def repeated_kinds(raw: Json, pattern: int) -> Sequence[str]:
    """Return `layer_types`; by default every `pattern`-th layer has no window."""
    count = require(raw, "num_hidden_layers")
    return layer_kinds(raw, [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(count)])


def patterned_kinds(raw: Json, default: int) -> Sequence[str]:
    """Return `layer_types`; without any, every `sliding_window_pattern`-th layer has no window.

    Raises ModelLoadError.
    """
    given = bool(raw.get("layer_types"))
    return repeated_kinds(raw, default if given else require(raw, "sliding_window_pattern", default))


def windows_by_kind(kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """Return the windows of layers from `layer_kinds`."""
    return tuple(window if kind == SLIDING else None for kind in kinds)


def eos_token_ids(raw: Json, generation: Json) -> tuple[int, ...]:
    """Return the end-of-sequence ids: generation_config.json's if it has any, else
    config.json's.
    """
    value = generation.get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def require(raw: Json, name: str, default: int | None = None) -> int:
    """Return an integer of config.json.

    Raises ModelLoadError if it is absent and the family has no default.
    """
    value = raw.get(name, default)
    if type(value) is not int or value < 1:
        raise ModelLoadError(f"config.json has no usable {name!r} (found {value!r}); it must be a whole number above 0")
    return value


def optional(raw: Json, name: str, default: int | None = None) -> int | None:
    """Return an integer of config.json, or None for null. Raises ModelLoadError."""
    return None if raw.get(name, default) is None else require(raw, name, default)


def check_heads(heads: int, kv_heads: int) -> None:
    """Raise ModelLoadError unless the key-value heads divide the heads."""
    if heads % kv_heads:
        raise ModelLoadError(f"config.json has {heads} attention heads, which {kv_heads} key-value heads do not divide")


def _divides(ranks: int, heads: int, kv_heads: int) -> bool:
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
