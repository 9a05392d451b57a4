"""Turns a step into tensors, runs the model on the paged cache, samples, and writes the sampled tokens where the next step reads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.attention import Attention, AttentionMetadata, CacheShape, RotaryHeads, make_attention
from workers.engine.config import EngineConfig
from workers.engine.models.base import DecoderModel
from workers.engine.sampling.logprobs import Logprobs, concatenated, token_logprobs
from workers.engine.sampling.rows import SampledRows
from workers.engine.sampling.sampler import Sampled, Sampler
from workers.engine.step import AddedRequest, NewBlocks, PromptScores, StepPlan, StepResult

_SCORED_LOGITS = 1 << 24  # of prompt tokens scored at once


@dataclass(slots=True)
class LaunchedStep:
    """A step on its way. All tensors are on the host; a GPU has written them once `done` has come to pass."""

    tokens: Tensor  # int32 [rows that sample]
    asking: NDArray[np.int64]  # which of them `logprobs` tells
    logprobs: Logprobs | None
    scores: list[Logprobs]  # of the plan's prompt scores, item by item
    done: torch.Event | None = None


@dataclass(slots=True)
class StepInputs:
    """T tokens of N rows."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    lengths: Tensor  # int64 [T], as DecoderModel.forward takes them
    metadata: AttentionMetadata


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

    State is kept by slot: tokens (prompt, output, and what launch sampled) on the device, block tables and sampling parameters on the host.
    """

    def __init__(self, config: EngineConfig, model: DecoderModel, num_blocks: int) -> None:
        assert config.max_num_seqs is not None
        assert config.max_model_len is not None
        assert config.block_size is not None
        self.model = model
        self.device = model.device
        self._block_size = config.block_size
        shape = CacheShape(num_blocks, config.block_size, model.config.num_kv_heads, model.config.head_dim)
        self.attention: Attention = make_attention(config.attention_backend, shape, model.config.num_heads, model.dtype, model.device)
        self.caches = self.attention.new_cache(model.config.num_layers)
        self.sampler = Sampler(config.max_num_seqs, model.config.vocab_size, model.config.eos_token_ids)
        columns = config.max_model_len
        self._tokens = torch.zeros((config.max_num_seqs, columns), dtype=torch.int32, device=self.device)
        self._block_tables = np.zeros((config.max_num_seqs, -(-columns // config.block_size)), np.int32)
        self._prompt_lengths = np.zeros(config.max_num_seqs, np.int64)
        self._scored_rows = max(1, _SCORED_LOGITS // model.config.vocab_size)
        self._scores_asked = np.zeros(config.max_num_seqs, np.int64)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Computes a step's tokens and samples; the sampled tokens are in the token table when the next launch reads it."""
        for request in plan.added:
            self._add(request)
        for new in plan.new_blocks:
            self._extend(new)
        inputs = self._inputs(plan)
        hidden = self.model.forward(inputs.input_ids, inputs.positions, inputs.lengths, StepAttention(self, inputs.metadata))
        sampled = self._sample(plan, inputs.metadata, hidden)
        return self._towards_host(sampled, [self._score(plan, scores, inputs.metadata, hidden) for scores in plan.prompt_scores])

    def retire(self, launched: LaunchedStep) -> StepResult:
        """What came of a step. Waits for the device."""
        if launched.done is not None:
            launched.done.synchronize()
        told = launched.logprobs.told() if launched.logprobs is not None else []
        return StepResult(
            launched.tokens.numpy(), dict(zip(launched.asking.tolist(), told, strict=True)), [scores.told() for scores in launched.scores]
        )

    def _add(self, request: AddedRequest) -> None:
        tokens = torch.tensor(request.token_ids, dtype=torch.int32)
        self._tokens[request.slot, : len(request.token_ids)] = tokens.to(self.device)
        self._block_tables[request.slot] = 0
        self._prompt_lengths[request.slot] = request.prompt_length
        self._scores_asked[request.slot] = request.sampling.prompt_logprobs
        self.sampler.set(request.slot, request.sampling)

    def _extend(self, new: NewBlocks) -> None:
        self._block_tables[new.slot, new.first : new.first + len(new.block_ids)] = new.block_ids

    def _inputs(self, plan: StepPlan) -> StepInputs:
        query_start = np.zeros(len(plan.counts) + 1, np.int32)
        np.cumsum(plan.counts, out=query_start[1:])
        rows = np.repeat(np.arange(len(plan.counts)), plan.counts)
        positions = (np.arange(query_start[-1]) - query_start[rows] + plan.starts[rows]).astype(np.int64)
        slots = plan.slots[rows]
        mapping = self._block_tables[slots, positions // self._block_size] * np.int64(self._block_size) + positions % self._block_size
        lengths = np.maximum(self._prompt_lengths[slots], positions + 1)
        host = torch.from_numpy(np.stack((slots.astype(np.int64), positions, lengths, mapping)))
        on_device = host.to(self.device)
        contexts = plan.starts + plan.counts
        longest = -(-int(contexts.max()) // self._block_size)
        metadata = AttentionMetadata(on_device[3], query_start, contexts, self._block_tables[:, :longest][plan.slots])
        return StepInputs(self._tokens[on_device[0], on_device[1]].long(), on_device[1], on_device[2], metadata)

    def _sample(self, plan: StepPlan, metadata: AttentionMetadata, hidden: Tensor) -> Sampled:
        sampling = np.nonzero(plan.samples)[0]
        if sampling.size == 0:
            return Sampled(torch.empty(0, dtype=torch.int64), np.empty(0, np.int64), None)
        slots, positions = plan.slots[sampling], metadata.context_lens[sampling].astype(np.int64)
        last = torch.from_numpy(metadata.query_start[sampling + 1].astype(np.int64) - 1).to(self.device)
        rows = SampledRows(slots, self._prompt_lengths[slots], positions, self._tokens)
        sampled = self.sampler.sample(self.model.logits(hidden[last]), rows)
        where = torch.from_numpy(np.stack((slots.astype(np.int64), positions))).to(self.device)
        self._tokens[where[0], where[1]] = sampled.tokens.int()
        return sampled

    def _score(self, plan: StepPlan, scores: PromptScores, metadata: AttentionMetadata, hidden: Tensor) -> Logprobs:
        """Prompt tokens by the hidden states before them, a few rows of logits at a time."""
        slot = plan.slots[scores.row]
        before = int(metadata.query_start[scores.row] - plan.starts[scores.row]) + scores.first - 1
        tokens = self._tokens[slot, scores.first : scores.last].long()
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
