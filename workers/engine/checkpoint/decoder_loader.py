"""Load models that generate.

Weights are read from safetensors only, and code from the checkpoint is never run.
"""

from __future__ import annotations

import logging
import re

import torch

from workers.engine.checkpoint.model_build import build_model, open_weights
from workers.engine.checkpoint.model_checkpoint import ModelCheckpoint
from workers.engine.checkpoint.tensor_files import weight_files
from workers.engine.layers.base import Ops
from workers.engine.layers.parallel import Parallel
from workers.engine.layers.weights import Weights
from workers.engine.models.base import DecoderModel
from workers.engine.models.registry import Family

logger = logging.getLogger(__name__)

_MTP = re.compile(r"(^|\.)mtp[._]")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Buffers in old checkpoints, which follow from the configuration, and the constants of xIELU
_DERIVED = (
    *(".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    *(".act_fn.beta", ".act_fn.eps"),
)


def load_weights(
    checkpoint: ModelCheckpoint,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    ops: Ops | None = None,
    parallel: Parallel | None = None,
) -> DecoderModel:
    """Read the tensors and build the model for contexts of up to `max_model_len` tokens (default:
    the model's own).

    `ops` does the arithmetic of its layers (default: plain torch). A rank of several in `parallel`
    passes the result of `shard_checkpoint`.
    """
    config = checkpoint.config
    if not isinstance(checkpoint.family, Family):
        weight_files(checkpoint.folder)
        from workers.engine.models.transformers_model import TransformersClass
        from workers.engine.models.transformers_parity import load_checked

        assert isinstance(checkpoint.family, TransformersClass)
        length = max_model_len or config.max_model_len
        return load_checked(checkpoint.family, checkpoint.folder, config, Weights({}, dtype, device, ops=ops), length)
    weights = open_weights(checkpoint, dtype, device, ops, parallel)
    model = build_model(checkpoint, weights, max_model_len or config.max_model_len)
    assert isinstance(model, DecoderModel)
    _log_unused(weights, checkpoint)
    return model


def _log_unused(weights: Weights, checkpoint: ModelCheckpoint) -> None:
    config = checkpoint.config
    derived = (*_DERIVED, "lm_head.weight") if config.tie_word_embeddings else _DERIVED
    reading = [index for index, layer in enumerate(config.layers) if layer.reads is not None]
    unread = tuple(f"layers.{index}.self_attn.{part}_" for index in reading for part in ("k", "v"))
    unused = [
        name
        for name in weights.unused()
        if not name.endswith(derived) and not any(part in name for part in unread)  # of layers that read another's keys
    ]
    heads = [name for name in unused if _predicts_several(name, len(config.layers))]
    others = [name for name in unused if name not in heads]
    if heads:
        logger.info("%d tensors of heads for several tokens in %s are left unread", len(heads), checkpoint.folder)
    if others:
        logger.warning(
            "%s does not use %d tensors of %s, the first is %s",
            config.architecture,
            len(others),
            checkpoint.folder,
            others[0],
        )


def _predicts_several(name: str, layers: int) -> bool:
    """Return whether a tensor belongs to a head for several tokens: it is named MTP, or its layer
    comes after the model's last one.
    """
    layer = _LAYER.search(name)
    return _MTP.search(name) is not None or (layer is not None and int(layer[1]) >= layers)
