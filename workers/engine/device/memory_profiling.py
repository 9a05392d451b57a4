"""The memory profiling run: the largest possible step, run before the KV cache is allocated."""

from __future__ import annotations

import numpy as np
import torch

from workers.engine.backends.base import Backend
from workers.engine.cuda.graphs import GraphVariant
from workers.engine.device.model_runner import ModelRunner
from workers.engine.device.pooling_runner import make_runner
from workers.engine.messages.core import EVERY_FEATURE
from workers.engine.messages.resolved_config import ResolvedConfig
from workers.engine.messages.step import AddedRequest, PromptScores, StepPlan
from workers.engine.models.base import DecoderModel
from workers.engine.models.pooling import PoolingModel

_ONE_PAGE = 1
# A margin for fragmentation of the graphs' pool, and for the graphs themselves
_GRAPH_ROUNDING = 1.25


def profile_memory(config: ResolvedConfig, backend: Backend, model: DecoderModel | PoolingModel) -> int:
    """Run the largest step and the largest decode step; return the bytes of CUDA graphs.

    The cache has only the null page. Afterwards torch still holds the memory of the steps, so that
    the caller can measure it.
    """
    runner = make_runner(config, backend, model, _ONE_PAGE)
    graphs = _decode_bytes(runner) if isinstance(runner, ModelRunner) and runner.graphs is not None else 0
    runner.retire(runner.launch(largest_step(config)))
    return graphs


def largest_step(config: ResolvedConfig) -> StepPlan:
    """Return a step with a full token budget and all rows, each using every sampling feature."""
    rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    each, more = divmod(config.max_num_batched_tokens, rows)
    counts = np.minimum(each + (np.arange(rows) < more), config.max_model_len - 1).astype(np.int32)
    added = [AddedRequest(row, [0] * count, count, EVERY_FEATURE) for row, count in enumerate(counts.tolist())]
    scores = [PromptScores(0, 1, int(counts[0]))] if counts[0] > 1 else []
    slots, starts, samples = np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32), np.ones(rows, np.int32)
    return StepPlan(0, added, [], slots, starts, counts, samples, scores)


@torch.inference_mode()
def _decode_bytes(runner: ModelRunner) -> int:
    """Return the peak memory of the largest decode step: the size of the graphs' shared pool."""
    runner.stage_padding()
    torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_allocated(runner.device)
    runner.decode(GraphVariant.TOKENS, runner.num_slots)
    torch.cuda.synchronize(runner.device)
    return int(_GRAPH_ROUNDING * (torch.cuda.max_memory_allocated(runner.device) - before))
