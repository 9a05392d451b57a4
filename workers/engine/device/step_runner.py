"""The common part of all runners: the layers' attention, the pages of the cache, and the tables for
the inputs of steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.engine.attention.base import Attention, CacheShape
from workers.engine.attention.context import CachedLayer, Interruption, StepAttention, keeping_layer
from workers.engine.backends.base import Backend
from workers.engine.cuda.staging import ResultCopies
from workers.engine.device.cache_plan import cache_groups
from workers.engine.inputs.base import StepInputs
from workers.engine.layers.base import AttentionShape
from workers.engine.messages.cache_groups import CacheGroups
from workers.engine.messages.resolved_config import ResolvedConfig
from workers.engine.models.base import DecoderModel
from workers.engine.models.pooling import PoolingModel


class StepRunner:
    """Base of the runners. `interruption` abandons a step; it is None on a GPU.

    `pages` has a tensor for each layer of a page, and each layer a view of one of them.
    """

    def __init__(
        self, config: ResolvedConfig, backend: Backend, model: DecoderModel | PoolingModel, num_pages: int
    ) -> None:
        self.device = model.device
        cache_dtype: torch.dtype = getattr(torch, config.cache_dtype)
        self.cache_groups = groups = cache_groups(model.config, cache_dtype, config.block_size)
        shapes = _cache_shapes(model.config.layers, groups, cache_dtype, num_pages)
        attentions = _attentions(model.config.layers, shapes, backend, model.dtype, self.device)
        widest = max(groups.groups, key=lambda group: group.token_bytes * group.block_size)
        self.pages = attentions[widest.layers[0]].new_cache(groups.layers_per_page)
        self.layers = _cached_layers(model.config.layers, groups, attentions, self.pages)
        self.inputs = backend.inputs(config.max_num_seqs, config.max_model_len, groups, self.device)
        self.interruption = Interruption() if self.device.type == "cpu" else None
        self._copies = ResultCopies(self.device)

    def _attend(self, inputs: StepInputs, bias: Tensor | None = None, needed: Tensor | None = None) -> StepAttention:
        """Return a step's attention; `bias` and `needed` are those of `StepAttention`."""
        return StepAttention(self.layers, inputs.metadata, self.interruption, bias, needed)


def _cache_shapes(
    layers: Sequence[AttentionShape], groups: CacheGroups, dtype: torch.dtype, num_pages: int
) -> list[CacheShape]:
    """Return each layer's cache, all with pages of the same size."""
    sizes = {layer: group.block_size for group in groups.groups for layer in group.layers}
    page_keys = groups.layer_bytes // (2 * dtype.itemsize)
    return [
        CacheShape(num_pages, sizes[keeping_layer(layers, index)], layer.kv_heads, layer.head_dim, dtype, page_keys)
        for index, layer in enumerate(layers)
    ]


def _attentions(
    layers: Sequence[AttentionShape],
    shapes: Sequence[CacheShape],
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Attention]:
    """Return each layer's attention, one for all layers with the same heads and cache."""
    kinds = [(shape, layer.heads) for shape, layer in zip(shapes, layers, strict=True)]
    made = {kind: backend.attention(*kind, dtype, device) for kind in dict.fromkeys(kinds)}
    return [made[kind] for kind in kinds]


def _cached_layers(
    layers: Sequence[AttentionShape], groups: CacheGroups, attentions: Sequence[Attention], pages: Sequence[Tensor]
) -> list[CachedLayer]:
    places = groups.places()
    cached = []
    for index, (layer, attention) in enumerate(zip(layers, attentions, strict=True)):
        column, page = places[keeping_layer(layers, index)]
        cached.append(CachedLayer(attention, attention.view(pages[page]), layer, column))
    return cached
