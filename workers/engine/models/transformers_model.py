"""Run any decoder of transformers that supports other attention functions on the paged cache.

The class is checked before any weight is read: it is built without memory and run on two tokens,
which shows how each layer calls its attention; anything that the engine's attention does not
support is refused. transformers reads the weights, since it supports the checkpoint layouts; from
safetensors only. Importing this module takes seconds.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from workers.engine.cuda.out_of_memory import is_out_of_memory, one_line
from workers.engine.layers.base import AttentionContext, AttentionPattern, AttentionShape
from workers.engine.layers.int8_ops import Int8Ops
from workers.engine.layers.rope_config import RopeConfig
from workers.engine.layers.weights import Weights
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.base import DecoderModel
from workers.engine.models.config import ROPE_TYPES, Json, ModelConfig
from workers.engine.models.transformers_attention import PAGED, WATCHED, LayerCall
from workers.engine.models.transformers_source import CLOSED, REMOTE_CODE, STATEFUL, refusal, unknown_class

logger = logging.getLogger(__name__)

_ROUTERS = ("gate", "router")  # names of projections that choose experts

# transformers' messages during loading are replaced by single sentences of this file.
_transformers_log: Any = transformers.logging
_transformers_log.set_verbosity_error()
_transformers_log.disable_progress_bar()

# transformers has types for half of its classes; its objects are untyped here.
Pretrained = Any
Settings = Any


@dataclass(frozen=True, slots=True)
class TransformersClass:
    """A class of transformers that can run here, with its configuration and the path of its body,
    the module that returns hidden states.
    """

    model_class: Pretrained
    settings: Settings
    body: str
    config: ModelConfig


class TransformersModel(DecoderModel):
    def __init__(
        self, module: Pretrained, body: str, config: ModelConfig, weights: Weights, max_model_len: int
    ) -> None:
        super().__init__(config, weights)
        self.module = module
        self._lengths = _Lengths()
        _rotate_by_token(module, self._lengths, max_model_len)
        self._body = module.get_submodule(body)
        self._head = _with_replaced(module, body.split("."), _Given())

    def forward(self, input_ids: Tensor, positions: Tensor, lengths: Tensor, attend: AttentionContext) -> Tensor:
        self._lengths.now = lengths
        outputs = self._body(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, attend=attend)
        hidden: Tensor = outputs.last_hidden_state
        return hidden[0]

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).float()

    def own_logits(self, input_ids: Tensor, attention: str, **arguments: Any) -> Tensor:
        """Return logits [T, vocab] of one prompt by the class's whole forward, with one of
        transformers' attention functions.
        """
        positions = torch.arange(len(input_ids), device=input_ids.device)
        self._lengths.now = positions + 1
        self.module.set_attn_implementation(attention)
        try:
            outputs = self.module(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **arguments)
        finally:
            self.module.set_attn_implementation(PAGED)
        logits: Tensor = outputs.logits
        return logits[0].float()


def find_class(folder: Path, raw: Json) -> TransformersClass:
    """Return transformers' class for a checkpoint's architecture.

    Raises ModelLoadError with the reason if it cannot run here.
    """
    name, settings = str(raw["architectures"][0]), read_settings(folder, raw)
    model_class = _decoder_class(name, settings)
    skeleton = _skeleton(model_class, settings)
    calls, body = _watched(name, skeleton)
    return TransformersClass(model_class, settings, body, _model_config(name, settings, skeleton, calls))


def read_settings(folder: Path, raw: Json) -> Settings:
    """Return a folder's configuration as read by transformers. Raises ModelLoadError."""
    name = str(raw["architectures"][0])
    if raw.get("auto_map") and raw.get("model_type") not in CONFIG_MAPPING_NAMES:
        raise refusal(name, REMOTE_CODE)
    with refused_as(f"transformers {transformers.__version__} cannot read {folder}/config.json"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _decoder_class(name: str, settings: Settings) -> Pretrained:
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise refusal(name, unknown_class())
    found = getattr(transformers, name)
    if getattr(settings, "is_encoder_decoder", False):
        raise refusal(name, "it has an encoder")
    if settings.get_text_config() is not settings:
        raise refusal(name, "it takes more than text")
    if found._is_stateful:
        raise refusal(name, STATEFUL)
    if not found._supports_attention_backend:
        raise refusal(name, CLOSED)
    return found


@contextmanager
def refused_as(sentence: str) -> Iterator[None]:
    """Convert any error of a class of transformers to a ModelLoadError, except out-of-memory
    errors.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ModelLoadError) or is_out_of_memory(error):
            raise
        raise ModelLoadError(f"{sentence} ({one_line(error)})") from error


def _skeleton(model_class: Pretrained, settings: Settings) -> Pretrained:
    """Return the model without memory for its weights."""
    settings = copy.deepcopy(settings)
    settings._attn_implementation = WATCHED
    settings._experts_implementation = "batched_mm"  # the only one in transformers whose shapes depend on no value
    name = model_class.__name__
    with (
        refused_as(f"transformers' {name} cannot be built as config.json says"),
        torch.device("meta"),
        torch.inference_mode(),
    ):
        model = model_class._from_config(settings, attn_implementation=WATCHED).eval()
        _rotate_by_token(model, _Lengths(), 1)
    return model


def _watched(name: str, skeleton: Pretrained) -> tuple[list[LayerCall], str]:
    """Return how the class calls its attention on two tokens, and the first module that its forward
    calls: the body, everything but the head.
    """
    calls: list[LayerCall] = []
    entered: list[str] = []
    for path, module in skeleton.named_modules():
        if path:
            module.register_forward_pre_hook(lambda *_, path=path: entered.append(path), prepend=True)
    ids = torch.zeros((1, 2), dtype=torch.int64, device="meta")
    with (
        refused_as(str(refusal(name, "two tokens fail without a cache and the values of its weights"))),
        torch.inference_mode(),
    ):
        skeleton(input_ids=ids, position_ids=ids, use_cache=False, attend=calls)
    if not entered or not calls:
        raise refusal(name, "its layers do not call the attention function that they were given")
    return calls, entered[0]


def _model_config(name: str, settings: Settings, skeleton: Pretrained, calls: list[LayerCall]) -> ModelConfig:
    _check_calls(name, settings, calls)
    positions = getattr(settings, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise refusal(name, "its config.json has no max_position_embeddings")
    head = skeleton.get_output_embeddings()
    by_layer = sorted(calls, key=lambda call: call.layer or 0)
    return ModelConfig(
        architecture=name,
        vocab_size=int(head.weight.shape[0]),
        hidden_size=int(head.weight.shape[1]),
        intermediate_size=0,
        max_position_embeddings=positions,
        norm_eps=0.0,
        activation="",
        tie_word_embeddings=bool(getattr(settings, "tie_word_embeddings", False)),
        layers=tuple(_layer_shape(call, positions) for call in by_layer),
        ropes=(_rope(name, settings, positions),),
    )


def _layer_shape(call: LayerCall, positions: int) -> AttentionShape:
    scale = call.scale if call.scale is not None else call.head_dim**-0.5
    window = call.window if call.window and call.window < positions else None
    pattern = AttentionPattern(window=window)
    return AttentionShape(call.heads, call.kv_heads, call.head_dim, scale, pattern, soft_cap=call.soft_cap)


def _check_calls(name: str, settings: Settings, calls: list[LayerCall]) -> None:
    for call in calls:
        if call.objection is not None:
            raise refusal(
                name, f"layer {call.layer} asks for {call.objection}, which the engine's attention does not support"
            )
    layers = sorted(-1 if call.layer is None else call.layer for call in calls)
    expected = int(getattr(settings, "num_hidden_layers", len(calls)))
    if layers != list(range(expected)):
        raise refusal(
            name, f"{len(set(layers))} of its {expected} layers attend, in {len(calls)} calls; each must do so once"
        )
    if len({(call.heads, call.kv_heads, call.head_dim) for call in calls}) > 1:
        raise refusal(name, "its layers differ in the number or size of their heads")
    if calls[0].heads % calls[0].kv_heads:
        raise refusal(
            name, f"it has {calls[0].heads} attention heads, which {calls[0].kv_heads} key-value heads do not divide"
        )


def _rope(name: str, settings: Settings, positions: int) -> RopeConfig | None:
    """Return the rotary settings that determine `max_model_len` and prefix caching.

    Dynamic ones are limited to the length at which they start to grow.
    """
    found = getattr(settings, "rope_parameters", None) or {}
    kinds = {value.get("rope_type") for value in found.values() if isinstance(value, dict)} or {found.get("rope_type")}
    if found.get("rope_type") not in ROPE_TYPES:
        if kinds & {"dynamic", "longrope"}:
            raise refusal(
                name, "positions that depend on the length are supported only where they are the same in all layers"
            )
        return None
    if found["rope_type"] == "dynamic":
        return None
    scaling = dict(found)
    if found["rope_type"] in ("longrope", "yarn", "llama3"):
        original = found.get("original_max_position_embeddings") or getattr(
            settings, "original_max_position_embeddings", None
        )
        scaling["original_max_position_embeddings"] = original or positions
    return RopeConfig(float(found.get("rope_theta") or 10_000.0), str(found["rope_type"]), scaling, positions)


def read_weights(
    model_class: Pretrained,
    settings: Settings,
    folder: Path,
    weights: Weights,
    **arguments: Any,
) -> tuple[Pretrained, list[str]]:
    """Return the class's module with its weights, and the names of the tensors that it does not
    use.

    Only the dtype, the device and the operations of `weights` are used. Raises ModelLoadError.
    """
    with refused_as(f"{folder} cannot be read as {model_class.__name__}"):
        module, report = model_class.from_pretrained(
            folder,
            config=settings,
            dtype=weights.dtype,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # refused below by name
            output_loading_info=True,
            **arguments,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"the checkpoint has no tensor {missing[0]!r}; check that it is complete and matches config.json"
        )
    for name, stored, implied in sorted(report["mismatched_keys"]):
        raise ModelLoadError(f"tensor {name!r} has shape {list(stored)}, but config.json implies {list(implied)}")
    placed = _placed(module.eval().requires_grad_(False), weights.device)
    if isinstance(weights.ops, Int8Ops):
        _quantize(placed, weights.ops)
    return placed, sorted(report["unexpected_keys"])


def _placed(module: Pretrained, device: torch.device) -> Pretrained:
    """Return the module on the device.

    On the CPU its weights are copied out of the files, since a file replaced under a memory map
    would kill the process.
    """
    if device.type == "cpu":
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
    return module.to(device)


def _quantize(module: Pretrained, ops: Int8Ops) -> None:
    """Replace plain projections by quantized ones; other products, as in experts, stay
    unchanged.
    """
    whole = sum(parameter.numel() for parameter in module.parameters())
    found = {id(one): one for one in _linears(module)}
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if id(child) in found:
                setattr(parent, name, _Projection(found[id(child)], ops))
    quantized = sum(one.weight.numel() for one in found.values())
    if quantized < whole / 2:
        logger.warning(
            "--quantization int8: %d of the %d weights of transformers' %s are stored in int8, the others in %s",
            *(quantized, whole, type(module).__name__, str(module.dtype).removeprefix("torch.")),
        )


def _linears(module: nn.Module) -> Iterator[nn.Linear]:
    """Yield plain projections, except those whose outputs choose experts."""
    for name, child in module.named_children():
        if type(child) is nn.Linear and name not in _ROUTERS:
            yield child
        yield from _linears(child)


class _Projection(nn.Module):
    def __init__(self, plain: nn.Linear, ops: Int8Ops) -> None:
        super().__init__()
        self._run = ops.linear(plain.weight, plain.bias)
        self.weight = torch.empty_like(plain.weight, device="meta")  # for classes that read its dtype

    def forward(self, x: Tensor) -> Tensor:
        return self._run(x)


class _Given(nn.Module):
    """Replaces a body: returns its input as the hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BaseModelOutputWithPast:
        return _HiddenStates(last_hidden_state=inputs_embeds)


class _HiddenStates(BaseModelOutputWithPast):
    """Hidden states only; other outputs of some bodies (a router's logits) are None."""

    def __getattr__(self, name: str) -> None:
        return None


def _with_replaced(module: nn.Module, path: list[str], replacement: nn.Module) -> nn.Module:
    """Return the module with the same parameters and another submodule at `path`; the original is
    unchanged.
    """
    if not path:
        return replacement
    changed = copy.copy(module)
    changed._modules = dict(module._modules)
    changed._modules[path[0]] = _with_replaced(module.get_submodule(path[0]), path[1:], replacement)
    return changed


class _Lengths:
    """Each token's length in the running step, int64 [T]; see `DecoderModel.forward`."""

    now: Tensor


def _rotate_by_token(model: Pretrained, lengths: _Lengths, max_model_len: int) -> None:
    """Compute rotary positions from each token's own length instead of the longest request of a
    step.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind not in ("dynamic", "longrope"):
            continue
        plain = inspect.unwrap(type(module).forward)
        original = 0 if kind == "dynamic" else int(module.config.rope_parameters["original_max_position_embeddings"])
        if kind == "dynamic" or max_model_len <= original:
            module.forward = MethodType(plain, module)
            continue
        long = copy.copy(module)
        long._buffers = dict(module._buffers)
        long._buffers["inv_freq"], _ = ROPE_INIT_FUNCTIONS[kind](
            module.config, module.inv_freq.device, seq_len=original + 1
        )
        module.forward = partial(_rotations, partial(plain, module), partial(plain, long), lengths, original)


def _rotations(
    short: Callable[..., tuple[Tensor, Tensor]],
    long: Callable[..., tuple[Tensor, Tensor]],
    lengths: _Lengths,
    original: int,
    x: Tensor,
    position_ids: Tensor,
) -> tuple[Tensor, Tensor]:
    beyond = (lengths.now > original)[None, :, None]
    (cos, sin), (long_cos, long_sin) = short(x, position_ids), long(x, position_ids)
    return torch.where(beyond, long_cos, cos), torch.where(beyond, long_sin, sin)
