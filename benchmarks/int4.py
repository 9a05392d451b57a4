"""A checkpoint of 4 bits against the same one in 16 bits: output tokens/s of one request and over
64 random prompts by turns, and how far its next tokens are from those in float32.

    python -m benchmarks.int4
"""

import asyncio
from typing import Any

from benchmarks.divergence import divergence_in_int4
from benchmarks.driving import engine_dtype, run_pass, running_engine, workload
from benchmarks.engine import summary
from benchmarks.models import INT4, model_folder
from benchmarks.report import arguments, by_turns, write_report
from workers.engine.messages.core import EngineRequest

_REQUESTS = 64
_SHAPES = ("tiny", "llama-135m", "qwen2.5-0.5b", "qwen3-0.6b")  # of families that have such checkpoints


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=_SHAPES, default="llama-135m")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    requests = workload(args.model, "random", _REQUESTS, args.seed)
    figures = {
        "dtype": engine_dtype(),
        "together": measure(args.model, requests, args.turns),
        "alone": measure(args.model, requests[:1], args.turns),
        "against_float32": divergence_in_int4(args.model, args.seed),
    }
    write_report(f"int4-{args.model}", figures, args.out, args.seed)


def measure(model: str, requests: list[EngineRequest], turns: int) -> dict[str, Any]:
    model_folder(model + INT4)
    quantized, plain = [], []
    for _ in range(turns):
        quantized.append(asyncio.run(_turn(model + INT4, requests)))
        plain.append(asyncio.run(_turn(model, requests)))
    figures = {"int4": summary(quantized), "engine": summary(plain)}
    return figures | by_turns([one["seconds"] for one in quantized], [one["seconds"] for one in plain])


async def _turn(model: str, requests: list[EngineRequest]) -> dict[str, Any]:
    async with running_engine(model) as engine:
        return (await run_pass(engine, requests)).figures()


if __name__ == "__main__":
    main()
