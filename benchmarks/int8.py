"""`--quantization int8` against weights in 16 bits: output tokens/s over 64 random prompts by
turns, and the divergence of its next tokens from float32.

    python -m benchmarks.int8
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from benchmarks.divergence import divergence_in_int8
from benchmarks.driving import engine_dtype, run_pass, running_engine, workload
from benchmarks.engine import summary
from benchmarks.models import SHAPES, model_folder
from benchmarks.report import arguments, by_turns, write_report
from workers.engine.messages.core import EngineRequest

_INT8, _REQUESTS = "int8", 64
Turn = Callable[[], Coroutine[Any, Any, dict[str, Any]]]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--divergence-of", choices=SHAPES, default="llama-135m", help="the shape that is compared")
    args = parser.parse_args()
    model_folder(args.model)
    requests = workload(args.model, "random", _REQUESTS, args.seed)
    quantized, plain = (partial(turn, args.model, requests, quantization=flag) for flag in (_INT8, None))
    figures = {"dtype": engine_dtype()} | measure("int8", quantized, plain, args.turns)
    figures["against_float32"] = divergence_in_int8(args.divergence_of, args.seed)
    write_report(f"int8-{args.model}", figures, args.out, args.seed)


def measure(name: str, in_few_bits: Turn, in_16_bits: Turn, turns: int) -> dict[str, Any]:
    """Return the figures of both, measured by turns, the first under `name`."""
    quantized, plain = [], []
    for _ in range(turns):
        quantized.append(asyncio.run(in_few_bits()))
        plain.append(asyncio.run(in_16_bits()))
    figures = {name: summary(quantized), "engine": summary(plain)}
    return figures | by_turns([one["seconds"] for one in quantized], [one["seconds"] for one in plain])


async def turn(model: str, requests: list[EngineRequest], **settings: Any) -> dict[str, Any]:
    """Return the figures of one pass of all requests through a new engine."""
    async with running_engine(model, **settings) as engine:
        return (await run_pass(engine, requests)).figures()


if __name__ == "__main__":
    main()
