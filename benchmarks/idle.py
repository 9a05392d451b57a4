"""The processor time of all processes of an idle `pipeline serve`.

    python -m benchmarks.idle

The measurement begins some seconds after the start of the server.
"""

import signal
import sys
import time

from benchmarks.models import SHAPES
from benchmarks.report import arguments, write_report
from benchmarks.servers import running_pipeline

_SETTLING_SECONDS = 5.0  # after the start


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the exit stops the server
    with running_pipeline(args.model) as server:
        time.sleep(_SETTLING_SECONDS)
        began, used = time.perf_counter(), server.cpu_seconds()
        time.sleep(args.seconds)
        cores = (server.cpu_seconds() - used) / (time.perf_counter() - began)
    write_report(f"idle-{args.model}", {"seconds": args.seconds, "cores": round(cores, 5)}, args.out)


if __name__ == "__main__":
    main()
