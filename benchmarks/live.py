"""Live calls as a user of `pipeline serve` sees them: beside a batch of long prompts, and many at
once.

    python -m benchmarks.live
    PEERS=~/peers python -m benchmarks.live --against vllm

The first has two parts, on one server:

- beside: live streams that arrive at random, alone and beside a batch of 900-token prompts
- streams: 64 streams at once, by turns with the engine alone on the same prompts

With `--against vllm`, `vllm bench serve` drives this server and `vllm serve` by turns.
"""

import signal
import sys
from typing import Any

from benchmarks import live_beside, live_peer, live_streams
from benchmarks.models import SHAPES, model_folder
from benchmarks.peers import peer_versions
from benchmarks.report import arguments, write_report
from benchmarks.servers import Server, running_pipeline

PARTS = ("beside", "streams")


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which stops the servers
    versions = peer_versions(args.against)
    model_folder(args.model)
    if args.against:
        figures = live_peer.measure(args.model, args.concurrency, args.requests, args.turns, args.seed)
        write_report(f"live-{args.model}-vllm", figures, args.out, args.seed, **versions)
        return
    with running_pipeline(args.model) as server:
        figures = {part: _MEASURE[part](server, args) for part in args.only}
    parts = "" if args.only == list(PARTS) else "".join(f"-{part}" for part in args.only)
    write_report(f"live-{args.model}{parts}", figures, args.out, args.seed)


def _arguments() -> Any:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m")
    parser.add_argument("--against", choices=("vllm",), help="the server to take turns with, in place of the parts")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), help="these alone, in a file of their own"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="seconds of each phase, as a share of the full time")
    parser.add_argument("--every", type=float, default=1.5, help="mean seconds between live calls beside the batch")
    parser.add_argument("--lines", type=int, default=1000, help="of the batch, which is to outlast its phases")
    parser.add_argument("--concurrency", type=int, default=64, help="streams at once")
    parser.add_argument("--requests", type=int, default=128, help="of a turn with that many streams at once")
    parser.add_argument("--turns", type=int, default=3)
    return parser.parse_args()


def _beside(server: Server, args: Any) -> dict[str, Any]:
    phases = live_beside.Phases().scaled(args.scale)
    return live_beside.measure(server, phases, args.every, args.lines, args.seed)


def _streams(server: Server, args: Any) -> dict[str, Any]:
    return live_streams.measure(server, args.concurrency, args.requests, args.turns, args.seed)


_MEASURE = {"beside": _beside, "streams": _streams}


if __name__ == "__main__":
    main()
