"""Turns a step into tensors, runs the model on the paged cache, samples, and writes the sampled tokens where the next step reads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.attention import Attention, AttentionMetadata, CacheShape, RotaryHeads, make_attention
from workers.engine.config import EngineConfig
from workers.engine.inputs import HostInputs, Inputs, StepInputs
from workers.engine.models.base import DecoderModel
from workers.engine.sampling.logprobs import Logprobs, concatenated, token_logprobs
from workers.engine.sampling.rows import SampledRows
from workers.engine.sampling.sampler import Sampled, Sampler
from workers.engine.step import PromptScores, StepPlan, StepResult

_SCORED_LOGITS = 1 << 24  # of prompt tokens scored at once


@dataclass(slots=True)
class LaunchedStep:
    """A step on its way. All tensors are on the host; a GPU has written them once `done` has come to pass."""

    tokens: Tensor  # int32 [rows that sample]
    asking: NDArray[np.int64]  # which of them `logprobs` tells
    logprobs: Logprobs | None
    scores: list[Logprobs]  # of the plan's prompt scores, item by item
    done: torch.Event | None = None


class StepAttention:
    """A step's attention as the model's layers call it."""

    def __init__(self, runner: ModelRunner, metadata: AttentionMetadata) -> None:
        self._attention, self._caches, self._metadata = runner.attention, runner.caches, metadata
        self._scales, self._windows = runner.model.config.attention_scales, runner.model.config.sliding_windows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attention.forward(q, k, v, self._caches[layer], self._metadata, self._scales[layer], self._windows[layer])

    def rotary(self, layer: int, qkv: Tensor, rotary: RotaryHeads) -> Tensor:
        return self._attention.forward_rotary(qkv, rotary, self._caches[layer], self._metadata, self._scales[layer], self._windows[layer])


class ModelRunner:
    """Runs steps in order. `launch` needs no token of an earlier step on the host; `retire` hands a step's tokens over.

    State is kept by slot: what makes up a step's inputs in `inputs`, sampling parameters in `sampler`.
    """

    def __init__(self, config: EngineConfig, model: DecoderModel, num_blocks: int) -> None:
        assert config.max_num_seqs is not None
        assert config.max_model_len is not None
        assert config.block_size is not None
        self.model = model
        self.device = model.device
        shape = CacheShape(num_blocks, config.block_size, model.config.num_kv_heads, model.config.head_dim)
        self.attention: Attention = make_attention(config.attention_backend, shape, model.config.num_heads, model.dtype, model.device)
        self.caches = self.attention.new_cache(model.config.num_layers)
        self.sampler = Sampler(config.max_num_seqs, model.config.vocab_size, model.config.eos_token_ids)
        self.inputs: Inputs = HostInputs(config.max_num_seqs, config.max_model_len, config.block_size, self.device)
        self._scored_rows = max(1, _SCORED_LOGITS // model.config.vocab_size)
        self._scores_asked = np.zeros(config.max_num_seqs, np.int64)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Computes a step's tokens and samples; the sampled tokens are in the token table when the next launch reads it."""
        for request in plan.added:
            self._scores_asked[request.slot] = request.sampling.prompt_logprobs
            self.sampler.set(request.slot, request.sampling)
        inputs = self.inputs.take(plan)
        hidden = self.model.forward(inputs.input_ids, inputs.positions, inputs.lengths, StepAttention(self, inputs.metadata))
        sampled = self._sample(plan, inputs, hidden)
        return self._towards_host(sampled, [self._score(plan, scores, inputs, hidden) for scores in plan.prompt_scores])

    def retire(self, launched: LaunchedStep) -> StepResult:
        """What came of a step. Waits for the device."""
        if launched.done is not None:
            launched.done.synchronize()
        told = launched.logprobs.told() if launched.logprobs is not None else []
        return StepResult(
            launched.tokens.numpy(), dict(zip(launched.asking.tolist(), told, strict=True)), [scores.told() for scores in launched.scores]
        )

    def _sample(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor) -> Sampled:
        if not plan.samples.any():
            return Sampled(torch.empty(0, dtype=torch.int64), np.empty(0, np.int64), None)
        slots, lengths = plan.slots[plan.samples], (plan.starts + plan.counts)[plan.samples].astype(np.int64)
        rows = SampledRows(slots, self.inputs.prompt_lengths[slots], lengths, self.inputs.tokens)
        sampled = self.sampler.sample(self.model.logits(hidden[inputs.last]), rows)
        self.inputs.tokens[inputs.slots, inputs.ends] = sampled.tokens.int()
        return sampled

    def _score(self, plan: StepPlan, scores: PromptScores, inputs: StepInputs, hidden: Tensor) -> Logprobs:
        """Prompt tokens by the hidden states before them, a few rows of logits at a time."""
        slot = plan.slots[scores.row]
        before = int(inputs.query_start[scores.row] - plan.starts[scores.row]) + scores.first - 1
        tokens = self.inputs.tokens[slot, scores.first : scores.last].long()
        parts = []
        for first in range(0, len(tokens), self._scored_rows):
            part = tokens[first : first + self._scored_rows]
            logits = self.model.logits(hidden[before + first : before + first + len(part)])
            parts.append(token_logprobs(logits, part, np.full(len(part), self._scores_asked[slot])))
        return concatenated(parts)

    def _towards_host(self, sampled: Sampled, scores: list[Logprobs]) -> LaunchedStep:
        """Starts the way to the host behind the step itself, so that reading it does not wait for a step launched later."""
        launched = LaunchedStep(_host_copy(sampled.tokens.int()), sampled.asking, sampled.logprobs, scores)
        for logprobs in scores if sampled.logprobs is None else [sampled.logprobs, *scores]:
            logprobs.token_ids, logprobs.logprobs, logprobs.ranks = map(_host_copy, (logprobs.token_ids, logprobs.logprobs, logprobs.ranks))
        if self.device.type == "cuda":
            launched.done = torch.Event(self.device)
            launched.done.record(torch.cuda.current_stream(self.device))
        return launched


def _host_copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
