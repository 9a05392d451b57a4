"""One request alone on the engine, as a live call may be: milliseconds to its first token and for
each token after it, and tokens/s.

    python -m benchmarks.alone
    PEERS=~/peers python -m benchmarks.alone --against llama.cpp

144 tokens in and 80 out, as in the quoted figure of llama.cpp, which was measured for gpt2-124m's
shape in bf16 on a machine with AVX512-BF16. With `--against llama.cpp`, llama.cpp takes turns with
the engine on the same prompts, in place of that figure, since a machine's memory bandwidth changes
by the hour. With `--quantization int8` llama.cpp has the weights in Q8_0.
"""

import asyncio
import statistics
import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.driving import engine_dtype, running_engine
from benchmarks.models import SHAPES, model_folder
from benchmarks.peers import LlamaCpp, gguf_dtype, peer_versions, running_llama_cpp
from benchmarks.processor import AVX512_BF16, this_processor
from benchmarks.report import arguments, by_turns, write_report
from workers.engine.client.async_engine import AsyncEngine
from workers.engine.messages.core import EngineRequest, SamplingParams

PROMPT, OUTPUT = 144, 80  # tokens
# Tokens/s of one row, measured elsewhere
LLAMA_CPP = {("gpt2-124m", AVX512_BF16): {"bf16": 159.0, "q8_0": 208.0}}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m")
    parser.add_argument("--requests", type=int, default=7, help="one after the other; the median counts")
    parser.add_argument(
        "--against", choices=("llama.cpp",), help="the program to take turns with, for shapes of GPT-2's family"
    )
    parser.add_argument("--quantization", choices=("int8",), help="the engine's flag")
    args = parser.parse_args()
    if args.against and SHAPES[args.model]["model_type"] != "gpt2":
        parser.error("--against llama.cpp takes shapes of GPT-2's family alone")
    versions = peer_versions(args.against)
    model_folder(args.model)
    with ExitStack() as stack:
        kind = "q8_0" if args.quantization else gguf_dtype()
        peer = stack.enter_context(running_llama_cpp(args.model, kind)) if args.against else None
        figures = asyncio.run(measure(args.model, args.requests, args.seed, args.quantization, peer))
    if peer is not None:
        figures["llama_cpp"]["dtype"] = kind
    name = f"alone-{args.model}" + (f"-{args.quantization}" if args.quantization else "")
    write_report(f"{name}-llama-cpp" if args.against else name, figures, args.out, args.seed, **versions)


async def measure(
    model: str, requests: int, seed: int, quantization: str | None = None, peer: LlamaCpp | None = None
) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    ours, theirs = [], []
    async with running_engine(model, quantization=quantization) as engine:
        prompts = draw.integers(0, engine.info.vocab_size, (requests, PROMPT)).tolist()
        if peer is not None:
            peer.run_one(prompts[0], OUTPUT)  # warms it up
        for prompt in prompts:
            ours.append(await _one(engine, prompt))
            if peer is not None:
                theirs.append(_times(peer.run_one(prompt, OUTPUT)["arrivals"]))
    figures = {"dtype": engine_dtype(), "quantization": quantization, **_summary(ours)}
    elsewhere = (model, this_processor().instructions)
    if theirs:
        figures |= {"llama_cpp": _summary(theirs)}
        figures |= by_turns([our[1] for our in ours], [their[1] for their in theirs])
    elif elsewhere in LLAMA_CPP and quantization is None:
        figures["llama_cpp_tokens_per_second"] = LLAMA_CPP[elsewhere]
        figures["ratio"] = round(figures["tokens_per_second"] / LLAMA_CPP[elsewhere]["bf16"], 3)
    return figures


def _summary(runs: list[tuple[float, float]]) -> dict[str, Any]:
    first, each = (statistics.median(run[part] for run in runs) for part in (0, 1))
    return {
        "first_token_ms": round(1e3 * first, 2),
        "ms_per_token": round(1e3 * each, 3),
        "ms_per_token_runs": [round(1e3 * run[1], 3) for run in runs],
        "tokens_per_second": round(1 / each, 1),
    }


async def _one(engine: AsyncEngine, prompt: list[int]) -> tuple[float, float]:
    arrivals = [time.perf_counter()]
    sampling = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    engine.add([EngineRequest(0, prompt, [], sampling, live=True)])
    async for output in engine.steps():
        arrivals += [time.perf_counter()] * len(output.token_ids)
        if any(output.finish):
            break
    return _times(arrivals)


def _times(arrivals: list[float]) -> tuple[float, float]:
    """Return the seconds to the first token, and the mean seconds between two tokens."""
    return arrivals[1] - arrivals[0], (arrivals[-1] - arrivals[1]) / (OUTPUT - 1)


if __name__ == "__main__":
    main()
