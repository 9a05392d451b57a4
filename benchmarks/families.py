"""A family by the engine's own code against transformers' class with the same weights: output
tokens/s over 64 random prompts, by turns.

    python -m benchmarks.families --model gemma3-270m
"""

import asyncio
from functools import partial

from benchmarks.driving import engine_dtype, workload
from benchmarks.int8 import measure, turn
from benchmarks.models import SHAPES, model_folder
from benchmarks.report import arguments, write_report

_REQUESTS = 64


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="gemma3-270m")
    parser.add_argument("--turns", type=int, default=10)
    args = parser.parse_args()
    model_folder(args.model)
    requests = workload(args.model, "random", _REQUESTS, args.seed)
    own, theirs = (partial(turn, args.model, requests, model_impl=code) for code in ("own", "transformers"))
    for warm_up in (own, theirs):
        asyncio.run(warm_up())
    figures = {"dtype": engine_dtype()} | measure("own", own, theirs, args.turns)
    figures["transformers"] = figures.pop("engine")
    write_report(f"family-{args.model}", figures, args.out, args.seed)


if __name__ == "__main__":
    main()
