"""A checkpoint of 4 bits against the same one in 16 bits: output tokens/s of one request and over
64 random prompts by turns, and the divergence of its next tokens from float32.

    python -m benchmarks.int4
"""

from functools import partial
from typing import Any

from benchmarks.divergence import divergence_in_int4
from benchmarks.driving import engine_dtype, workload
from benchmarks.int8 import measure, turn
from benchmarks.models import INT4, model_folder
from benchmarks.report import arguments, write_report
from workers.engine.messages.core import EngineRequest

_REQUESTS = 64
_SHAPES = ("tiny", "llama-135m", "qwen2.5-0.5b", "qwen3-0.6b")  # of families that have such checkpoints


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=_SHAPES, default="llama-135m")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    model_folder(args.model + INT4)
    requests = workload(args.model, "random", _REQUESTS, args.seed)
    figures = {
        "dtype": engine_dtype(),
        "together": _measure(args.model, requests, args.turns),
        "alone": _measure(args.model, requests[:1], args.turns),
        "against_float32": divergence_in_int4(args.model, args.seed),
    }
    write_report(f"int4-{args.model}", figures, args.out, args.seed)


def _measure(model: str, requests: list[EngineRequest], turns: int) -> dict[str, Any]:
    return measure("int4", partial(turn, model + INT4, requests), partial(turn, model, requests), turns)


if __name__ == "__main__":
    main()
