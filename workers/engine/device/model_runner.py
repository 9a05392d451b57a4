"""Run the steps of a model that generates.

A step becomes tensors; the model runs on the paged cache; the sampled tokens are written to the
token table, from which the next step reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.backends.base import Backend
from workers.engine.cuda.graphs import CudaRecorder, DecodeGraphs, GraphVariant, Work
from workers.engine.cuda.staging import to_device
from workers.engine.device.step_runner import StepRunner
from workers.engine.inputs.base import StepInputs
from workers.engine.messages.resolved_config import ResolvedConfig
from workers.engine.messages.step import MakeMasks, PromptScores, StepPlan, StepResult, TokenMasks
from workers.engine.models.base import DecoderModel
from workers.engine.profiling import span
from workers.engine.sampling.logprobs import Logprobs, concatenated, token_logprobs
from workers.engine.sampling.rows import SampledRows
from workers.engine.sampling.sampler import Sampled, Sampler

_SCORED_LOGITS = 1 << 24  # most logits of prompt tokens scored at once


@dataclass(slots=True)
class PooledRows:
    """Results of some of a step's pooling requests: `counts[i]` rows for its i-th place."""

    places: list[int]
    counts: list[int]
    values: Tensor  # float32 [sum of counts, size]


@dataclass(slots=True)
class LaunchedStep:
    """A step in flight.

    All tensors are on the host; a GPU has written them once the event `done` is complete.
    """

    tokens: Tensor  # int32 [R], the sampled tokens
    asking: NDArray[np.int64]  # the samples that `logprobs` covers
    logprobs: Logprobs | None
    scores: list[Logprobs]  # of the plan's prompt scores, item by item
    pooled: list[PooledRows] = field(default_factory=list)
    done: torch.cuda.Event | None = None
    launched: float = field(default_factory=time.perf_counter)  # time of the launch; on a CPU also the end of the step

    def seconds_since(self, began: float) -> float:
        """Return the seconds from `began`, a time of `time.perf_counter()`, to the end of this
        step, which has just been retired.
        """
        return (self.launched if self.done is None else time.perf_counter()) - began

    def seconds_after(self, earlier: LaunchedStep) -> float:
        """Return the seconds between the ends of two retired steps."""
        if self.done is not None and earlier.done is not None:
            return float(earlier.done.elapsed_time(self.done)) / 1000
        return self.launched - earlier.launched


class ModelRunner(StepRunner):
    """Runs steps in order.

    `launch` needs no token of an earlier step on the host; `retire` returns a step's tokens.

    State is stored by slot: tokens and blocks in `inputs`, sampling parameters in `sampler`. With
    `graphs`, steps with one token per row are padded and replayed; all other steps, and all steps
    without `graphs`, run kernel by kernel.
    """

    def __init__(self, config: ResolvedConfig, backend: Backend, model: DecoderModel, num_pages: int) -> None:
        super().__init__(config, backend, model, num_pages)
        self._backend, self.model = backend, model
        self.num_slots, self._max_model_len = config.max_num_seqs, config.max_model_len
        vocab = model.config.vocab_size
        draw = backend.draw(self.num_slots, vocab, self.device)
        self.sampler = Sampler(self.num_slots, vocab, draw, model.config.eos_token_ids)
        self.graphs: DecodeGraphs | None = None
        if self.device.type == "cuda" and not config.enforce_eager and model.recordable:
            self.use_graphs(CudaRecorder(), forgiving=config.tensor_parallel_size == 1)
        self._scored_rows = max(1, _SCORED_LOGITS // vocab)
        self._scores_asked = np.zeros(self.num_slots, np.int64)

    def use_graphs(self, record: Callable[[Work], Work], forgiving: bool = True) -> None:
        """Pad and record steps with one token per row, if the backend can."""
        if self._backend.records:
            self.graphs = DecodeGraphs(self.decode, self.num_slots, record, forgiving)
            self._hidden = torch.empty(
                (self.num_slots, self.model.config.hidden_size), dtype=self.model.dtype, device=self.device
            )

    @torch.inference_mode()
    def prepare(self) -> None:
        """Record the largest step with one token per row; none of its rows is a request's."""
        if self.graphs is not None:
            self.stage_padding()
            self.graphs.prepare(GraphVariant.TOKENS)

    def stage_padding(self) -> None:
        """Stage a step without rows, so that all padded rows are padding."""
        nothing = np.zeros(0, np.int32)
        self.inputs.stage(StepPlan(0, [], [], nothing, nothing, nothing, nothing), self.num_slots)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, masks: MakeMasks | None = None) -> LaunchedStep:
        """Compute a step; the next launch finds its samples in the token table.

        `masks` may retire the previous step. Raises StepAbandoned if `interruption` is set before
        the last layer begins.
        """
        self._copies.make_room()
        for request in plan.added:
            self._scores_asked[request.slot] = request.sampling.prompt_logprobs
            self.sampler.set(request.slot, request.sampling)
        self.sampler.upload()
        if self.graphs is None or not _decodes(plan):
            return self._launch_eagerly(plan, masks)
        return self._launch_graph(plan, self.graphs, masks)

    def retire(self, launched: LaunchedStep) -> StepResult:
        """Wait for the device and return the result of a step."""
        if launched.done is not None:
            launched.done.synchronize()
        logprobs = launched.logprobs.to_host() if launched.logprobs is not None else []
        return StepResult(
            launched.tokens.numpy(),
            dict(zip(launched.asking.tolist(), logprobs, strict=True)),
            [scores.to_host() for scores in launched.scores],
        )

    def decode(self, variant: GraphVariant, rows: int) -> None:
        """Run the device's part of a staged step with one token per row, padded to `rows` rows.

        It depends on nothing on the host except the two arguments.
        """
        inputs = self.inputs.build(rows, rows, 1, self._max_model_len, rows)
        hidden = self._forward(inputs)
        if variant is not GraphVariant.TOKENS:
            self._hidden[:rows].copy_(hidden)
        if variant is not GraphVariant.HIDDEN:
            self._draw(inputs, hidden)

    def _launch_graph(self, plan: StepPlan, graphs: DecodeGraphs, masks: MakeMasks | None) -> LaunchedStep:
        rows = len(plan.slots)
        with span("inputs"):
            self.inputs.stage(plan, self.num_slots)
        staged = self._staged(plan)
        variant = _variant(len(staged), rows)
        with span("forward"):
            graphs.run(variant, rows)
        if variant is GraphVariant.TOKENS:
            return self._towards_host(rows, None, [])
        made = None if masks is None else masks()
        with span("sample"):
            if variant is GraphVariant.HIDDEN:
                sampled = self._sample(plan, self._hidden[:rows], made)
            else:
                sampled = self._sample_some(plan, staged, self._hidden[:rows], made)
            return self._towards_host(rows, sampled, [])

    def _launch_eagerly(self, plan: StepPlan, masks: MakeMasks | None) -> LaunchedStep:
        with span("inputs"):
            inputs = self.inputs.take(plan)
        with span("forward"):
            hidden = self._forward(inputs, None if plan.prompt_scores else inputs.last)
        number, sampled = len(inputs.last), None
        made = None if masks is None else masks()
        with span("sample"):
            if number:
                sampled = self._sample_or_draw(plan, inputs, hidden[inputs.last], made)
        return self._towards_host(number, sampled, [self._score(plan, scores, hidden) for scores in plan.prompt_scores])

    def _forward(self, inputs: StepInputs, needed: Tensor | None = None) -> Tensor:
        """Return hidden states; only those of the tokens `needed` are used (None: all)."""
        attend = self._attend(inputs, needed=needed)
        return self.model.forward(inputs.input_ids, inputs.positions, inputs.lengths, attend)

    def _staged(self, plan: StepPlan) -> NDArray[np.int64]:
        """Return the indices of the step's samples that need more than a draw, in rising order."""
        staged = self.sampler.needs_stages(plan.slots[plan.sampled()[0]])
        staged[plan.guided] = True
        return np.flatnonzero(staged)

    def _sample_or_draw(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, masks: TokenMasks | None
    ) -> Sampled | None:
        """Sample after the tokens with hidden states [R, hidden], by stages only where that is
        needed and the draw is on the device.
        """
        staged = self._staged(plan) if self._backend.records else np.arange(len(hidden))
        variant = _variant(len(staged), len(hidden))
        if variant is GraphVariant.HIDDEN:
            return self._sample(plan, hidden, masks)
        self._draw(inputs, hidden)
        return self._sample_some(plan, staged, hidden, masks) if len(staged) else None

    def _draw(self, inputs: StepInputs, hidden: Tensor) -> None:
        """Sample rows that need only a draw; entirely on the device."""
        logits = self.model.head(hidden)
        self.inputs.store(self.sampler.draw_static(logits, inputs.slots, inputs.ends, inputs.prompt_lengths))

    def _sample(self, plan: StepPlan, hidden: Tensor, masks: TokenMasks | None) -> Sampled:
        """Sample by stages after the tokens with hidden states [R, hidden]."""
        sampled = self._stages(plan, np.arange(len(hidden)), hidden, masks)
        self.inputs.store(sampled.tokens)
        return sampled

    def _sample_some(
        self, plan: StepPlan, samples: NDArray[np.int64], hidden: Tensor, masks: TokenMasks | None
    ) -> Sampled:
        """Sample the rows `samples` of hidden states [R, hidden] by stages, in place of what was
        drawn for them.
        """
        if masks is not None:
            masks = TokenMasks(np.searchsorted(samples, masks.rows), masks.masks)
        sampled = self._stages(plan, samples, hidden[to_device(samples, self.device)], masks)
        self.inputs.store_rows(plan, samples, sampled.tokens)
        return Sampled(sampled.tokens, samples[sampled.asking], sampled.logprobs)

    def _stages(self, plan: StepPlan, samples: NDArray[np.int64], hidden: Tensor, masks: TokenMasks | None) -> Sampled:
        sampled_rows, later = (part[samples] for part in plan.sampled())
        slots, lengths = plan.slots[sampled_rows], (plan.starts + plan.counts)[sampled_rows] - later
        rows = SampledRows(slots, self.inputs.prompt_lengths[slots], lengths, self.inputs.tokens)
        return self.sampler.sample(self.model.logits(hidden), rows, masks)

    def _score(self, plan: StepPlan, scores: PromptScores, hidden: Tensor) -> Logprobs:
        """Score prompt tokens by the hidden states before them, a few rows at a time."""
        slot = int(plan.slots[scores.row])
        before = int(plan.counts[: scores.row].sum() - plan.starts[scores.row]) + scores.first - 1
        tokens = self.inputs.tokens[slot, scores.first : scores.last].long()
        parts = []
        for first in range(0, len(tokens), self._scored_rows):
            part = tokens[first : first + self._scored_rows]
            logits = self.model.logits(hidden[before + first : before + first + len(part)])
            parts.append(token_logprobs(logits, part, np.full(len(part), self._scores_asked[slot])))
        return concatenated(parts)

    def _towards_host(self, number: int, sampled: Sampled | None, scores: list[Logprobs]) -> LaunchedStep:
        """Start the copies to the host right after the step, so that reading them does not wait for
        a later step.
        """
        copied = [*([sampled.logprobs] if sampled is not None and sampled.logprobs is not None else []), *scores]
        parts = [part for logprobs in copied for part in (logprobs.token_ids, logprobs.logprobs, logprobs.ranks)]
        copies, done = self._copies.start([self.inputs.result(number), *parts])
        for index, logprobs in enumerate(copied):
            logprobs.token_ids, logprobs.logprobs, logprobs.ranks = copies[1 + 3 * index : 4 + 3 * index]
        if sampled is None:
            return LaunchedStep(copies[0], np.empty(0, np.int64), None, scores, done=done)
        return LaunchedStep(copies[0], sampled.asking, sampled.logprobs, scores, done=done)


def _variant(staged: int, samples: int) -> GraphVariant:
    """Return how a step ends of whose samples so many need stages.

    Where they are many, a second pass through the output projection costs more than it saves.
    """
    if not staged:
        return GraphVariant.TOKENS
    return GraphVariant.BOTH if 2 * staged <= samples else GraphVariant.HIDDEN


def _decodes(plan: StepPlan) -> bool:
    """Return whether each row of the step has one token and samples after it.

    Such a step has no prompt scores, which are for a prompt's tokens before its last.
    """
    return bool(plan.samples.all()) and int(plan.counts.sum()) == len(plan.counts) and not plan.prompt_scores
