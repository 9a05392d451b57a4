"""The cost of each stage of sampling in a decode step of 64 requests that all use it: milliseconds,
and per cent of the step.

    OMP_NUM_THREADS=2 python -m benchmarks.sampling

The step and its sampling without and with the stage take turns, so that other load on the machine
affects all of them. The figures are medians, in wall time and in processor time; other processes
hardly affect the latter. Random weights make nearly flat distributions, the worst case for the draw
and for top-p.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.models import SHAPES
from benchmarks.report import arguments, write_report
from benchmarks.stepping import decode_step, make_executor
from workers.engine.device.model_runner import ModelRunner
from workers.engine.messages.core import SamplingParams
from workers.engine.messages.step import StepPlan
from workers.engine.sampling.rows import SampledRows

ROWS = 64
PROMPT, CONTEXT = 128, 256  # tokens
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.0}
# Each stage, and what it is compared to: the limits need a temperature, all else works on greedy
# rows too.
STAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": (GREEDY, {"temperature": 1.0}),
    "min_p": (DRAWN, {"min_p": 0.05}),
    "top_k": (DRAWN, {"top_k": 50}),
    "large top_k": (DRAWN, {"top_k": 40_000}),
    "top_p": (DRAWN, {"top_p": 0.9}),
    "logit_bias": (GREEDY, {"logit_bias": tuple((token, 0.01) for token in range(300))}),
    "min_tokens": (GREEDY, {"min_tokens": 4096, "stop_token_ids": (1, 2, 3, 4)}),
    "bad_words": (GREEDY, {"bad_words": tuple((token, token + 1, token + 2) for token in range(100))}),
    "penalties": (GREEDY, {"repetition_penalty": 1.01, "presence_penalty": 0.01, "frequency_penalty": 0.01}),
    "logprobs": (GREEDY, {"logprobs": 20}),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m-50257")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=list(STAGES))
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    executor = make_executor(args.model, ROWS, CONTEXT, args.device)
    step = decode_step(executor, ROWS, CONTEXT, PROMPT)
    figures = {name: _compare(executor.runner, step, *STAGES[name], args.pairs) for name in args.stages}
    setting = {"rows": ROWS, "context": CONTEXT, "threads": torch.get_num_threads()}
    write_report(f"sampling-{args.model}-{ROWS}", setting | figures, args.out)


def _compare(
    runner: ModelRunner, step: StepPlan, without: dict[str, Any], stage: dict[str, Any], pairs: int
) -> dict[str, Any]:
    """Compare the sampler with the stage to the sampler without it, over a step without it.

    A step's own time varies by more than a stage.
    """
    vocab, prompts = runner.model.config.vocab_size, np.full(ROWS, PROMPT, np.int64)
    tokens = torch.randint(0, vocab, (ROWS, CONTEXT), dtype=torch.int32, device=runner.device)
    rows = SampledRows(step.slots, prompts, np.full(ROWS, CONTEXT, np.int64), tokens)
    hidden = torch.randn(ROWS, runner.model.config.hidden_size, dtype=runner.model.dtype, device=runner.device)
    with torch.inference_mode():
        logits = runner.model.logits(hidden)
    turns = []
    for _ in range(pairs + 1):
        _ask(runner, without)
        turn = [
            _seconds(lambda: runner.retire(runner.launch(step))),
            _seconds(lambda: _sample(runner, logits.clone(), rows)),
        ]
        _ask(runner, without | stage)
        turn.append(_seconds(lambda: _sample(runner, logits.clone(), rows)))
        turns.append(turn)
    figures = {}
    for number, clock in enumerate(("wall", "processor")):
        whole, off, on = (
            statistics.median(turn[part][number] for turn in turns[1:]) for part in range(3)
        )  # the first turn warms up
        added = on - off
        figures[clock] = {
            "step_ms": round(1e3 * whole, 1),
            "stage_ms": round(1e3 * added, 1),
            "per_cent": round(100 * added / whole, 1),
        }
    return figures


def _ask(runner: ModelRunner, asked: dict[str, Any]) -> None:
    for slot in range(ROWS):
        runner.sampler.set(slot, SamplingParams(max_tokens=8192, seed=slot, **asked))
    runner.sampler.upload()


@torch.inference_mode()
def _sample(runner: ModelRunner, logits: Tensor, rows: SampledRows) -> None:
    sampled = runner.sampler.sample(logits, rows)
    sampled.tokens.tolist()
    if sampled.logprobs is not None:
        sampled.logprobs.to_host()


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return wall seconds, and processor seconds of all threads."""
    began = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began[0], time.process_time() - began[1]


if __name__ == "__main__":
    main()
