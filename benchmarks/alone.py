"""One request alone on the engine, as a live call may be: milliseconds to its first token and for each token after it, and tokens/s.

    python -m benchmarks.alone

144 tokens in and 80 out, as llama.cpp's figure has it that is quoted beside it: gpt2-124m's shape in bf16, on a machine of the same kind.
"""

import asyncio
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.driving import running_engine
from benchmarks.models import SHAPES, model_folder
from benchmarks.report import arguments, write_report
from workers.engine.async_engine import AsyncEngine
from workers.engine.messages import SamplingParams

PROMPT, OUTPUT = 144, 80  # tokens
LLAMA_CPP = {"gpt2-124m": {"bf16": 159.0, "q8_0": 208.0}}  # tokens/s of one row, on a machine of the same kind


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m")
    parser.add_argument("--requests", type=int, default=7, help="one after the other; the median counts")
    args = parser.parse_args()
    model_folder(args.model)
    write_report(f"alone-{args.model}", asyncio.run(measure(args.model, args.requests, args.seed)), args.out, args.seed)


async def measure(model: str, requests: int, seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    async with running_engine(model) as engine:
        prompts = draw.integers(0, engine.info.vocab_size, (requests, PROMPT)).tolist()
        runs = [await _one(engine, prompt) for prompt in prompts]
    first, each = (statistics.median(run[part] for run in runs) for part in (0, 1))
    figures: dict[str, Any] = {
        "first_token_ms": round(1e3 * first, 2),
        "ms_per_token": round(1e3 * each, 3),
        "ms_per_token_runs": [round(1e3 * run[1], 3) for run in runs],
        "tokens_per_second": round(1 / each, 1),
    }
    if model in LLAMA_CPP:
        figures["llama_cpp_tokens_per_second"] = LLAMA_CPP[model]
        figures["ratio"] = round(1 / each / LLAMA_CPP[model]["bf16"], 3)
    return figures


async def _one(engine: AsyncEngine, prompt: list[int]) -> tuple[float, float]:
    """Seconds to the first token, and between two tokens on average."""
    arrivals = [time.perf_counter()]
    sampling = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    async for delta in engine.generate(prompt, sampling, live=True):
        arrivals += [time.perf_counter()] * len(delta.token_ids)
    return arrivals[1] - arrivals[0], (arrivals[-1] - arrivals[1]) / (OUTPUT - 1)


if __name__ == "__main__":
    main()
