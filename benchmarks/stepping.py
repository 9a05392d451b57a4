"""Single steps of the model runner in this process, without scheduler and core: a decode step that
can be launched repeatedly.
"""

import numpy as np

from benchmarks.models import model_folder
from benchmarks.work import shape_of
from workers.engine.device.executor import Executor
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import SamplingParams
from workers.engine.messages.step import AddedRequest, NewBlocks, StepPlan

_OWN_TOKENS = (
    64 * 1024
)  # of context in all; rows beyond share blocks with others, which is too much memory for any cache all the same
_SPARE_TOKENS = 64  # of a row, since its last block may not be full


def make_executor(model: str, rows: int, context: int, device: str = "cpu") -> Executor:
    """Return an executor with a cache for `rows` requests of `context` tokens."""
    tokens = _own_rows(rows, context) * (context + _SPARE_TOKENS) + 2048
    return Executor(
        EngineConfig(
            model=str(model_folder(model)),
            max_model_len=context,
            max_num_seqs=rows,
            device=device,
            kv_cache_memory_bytes=tokens * shape_of(model).kv_bytes_per_token,
        )
    )


def decode_step(executor: Executor, rows: int, context: int, prompt: int | None = None) -> StepPlan:
    """Return the decode step of the last of `context` tokens for each of `rows` requests.

    A step that adds the requests runs first.
    """
    draw = np.random.default_rng(1)
    numbers = np.arange(rows, dtype=np.int32)
    ones = np.ones(rows, np.int32)
    step = StepPlan(1, [], [], numbers, ones * (context - 2), ones, ones)
    tokens = draw.integers(0, executor.vocab_size, (rows, context - 1)).tolist()
    added = [
        AddedRequest(row, tokens[row], prompt or context // 2, SamplingParams(1, temperature=0.0))
        for row in range(rows)
    ]
    per_row, own = -(-context // executor.config.block_size), _own_rows(rows, context)
    blocks = [
        NewBlocks(row, 0, list(range(1 + row % own * per_row, 1 + (row % own + 1) * per_row))) for row in range(rows)
    ]
    executor.retire(executor.launch(StepPlan(0, added, blocks, numbers, step.starts, step.counts, step.samples)))
    return step


def _own_rows(rows: int, context: int) -> int:
    return min(rows, max(1, _OWN_TOKENS // context))
