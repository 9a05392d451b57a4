"""The engine alone: output tokens/s over a workload, every request submitted at once, and the share
of the machine's matrix peak.

    python -m benchmarks.engine --model gpt2-124m --kind random --requests 64
    PEERS=~/peers python -m benchmarks.engine --kind shared --requests 256 --against vllm

Each turn is a fresh engine, so that nothing of the workload is in its prefix cache. With `--against
vllm` vLLM's offline engine takes turns with it on the same token ids, in a process that stays; its
prefix cache is emptied before each of its turns.
"""

import asyncio
import statistics
import time
from contextlib import ExitStack
from typing import Any

from benchmarks.driving import engine_dtype, run_pass, running_engine, workload
from benchmarks.models import SHAPES, model_folder
from benchmarks.peak import matrix_peak
from benchmarks.peers import Vllm, peer_dtype, peer_versions, running_vllm
from benchmarks.report import arguments, by_turns, write_report
from benchmarks.work import shape_of, share_of
from workers.engine.messages.core import EngineRequest


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m")
    parser.add_argument(
        "--kind",
        choices=("random", "shared"),
        default="random",
        help="prompts with nothing or a system prompt in common",
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--against", choices=("vllm",), help="the engine to take turns with")
    args = parser.parse_args()
    name = f"engine-{args.model}-{args.kind}-{args.requests}"
    versions = peer_versions(args.against)
    model_folder(args.model)
    requests = workload(args.model, args.kind, args.requests, args.seed)
    with ExitStack() as stack:
        peer = stack.enter_context(running_vllm(args.model)) if args.against else None
        figures = measure(args.model, requests, args.turns, peer)
    write_report(f"{name}-vllm" if peer else name, figures, args.out, args.seed, **versions)


def measure(model: str, requests: list[EngineRequest], turns: int, peer: Vllm | None = None) -> dict[str, Any]:
    """Measure turns of the engine, each followed by a turn of the peer and by the matrix peak.

    The peak is measured again since it varies with other load on the host.
    """
    if peer is not None:
        peer.run_pass(requests)  # warms it up
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    shares, peaks = [], []
    for _ in range(turns):
        peak = matrix_peak(0.3)
        ours.append(_one_turn(model, requests, peer))
        peaks.append(max(peak, matrix_peak(0.3)))
        shares.append(share_of(ours[-1], peaks[-1], model))
        if peer is not None:
            theirs.append(peer.run_pass(requests))
            assert theirs[-1]["output_tokens"] == ours[-1]["output_tokens"]
    figures = {
        "dtype": engine_dtype(),
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "output_tokens": ours[0]["output_tokens"],
        "engine": summary(ours) | {"start_up_seconds": ours[0]["start_up_seconds"], "turns": ours},
        "matrix_peak_gflops": round(statistics.median(peaks) / 1e9, 1),
        "peak_share": round(statistics.median(shares), 3),
        "bound_tokens_per_second": round(_bound(model, ours[0], statistics.median(peaks)), 1),
    }
    if peer is not None:
        figures["vllm"] = summary(theirs) | {"dtype": peer_dtype(), "start_up_seconds": peer.start_up_seconds}
        figures |= by_turns([our["seconds"] for our in ours], [one["seconds"] for one in theirs])
    return figures


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [turn["seconds"] for turn in turns]
    rate = turns[0]["output_tokens"] / statistics.median(seconds)
    return {"seconds": [round(value, 2) for value in seconds], "output_tokens_per_second": round(rate, 1)}


def _one_turn(model: str, requests: list[EngineRequest], peer: Vllm | None) -> dict[str, Any]:
    async def turn() -> dict[str, Any]:
        began = time.perf_counter()
        async with running_engine(model) as engine:
            start_up = time.perf_counter() - began
            used = peer.cpu_seconds() if peer is not None else 0.0
            figures = (await run_pass(engine, requests)).figures() | {"start_up_seconds": round(start_up, 2)}
        if peer is not None:
            figures["peer_rests_at"] = round(
                (peer.cpu_seconds() - used) / figures["seconds"], 3
            )  # cores that the peer used meanwhile
        return figures

    return asyncio.run(turn())


def _bound(model: str, figures: dict[str, Any], peak: float) -> float:
    """Return output tokens/s if only the matrix products took time, at the peak."""
    return (
        figures["output_tokens"]
        * peak
        / shape_of(model).operations(figures["computed_tokens"], figures["output_tokens"])
    )


if __name__ == "__main__":
    main()
