"""`make bench`, and with `--full` `make bench-full`: every row in a process of its own, then the
pages that quote them.

    python -m benchmarks
    PEERS=~/peers python -m benchmarks --full --only engine run_batch

A row that fails is named at the end, and the others run. Where llama.cpp is missing, its row is
left out.
"""

import subprocess
import sys

from benchmarks import pages
from benchmarks.peers import NoPeer, llama_cpp_folder, vllm_folder
from benchmarks.report import RESULTS, arguments
from benchmarks.rows import FULL, QUICK


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--full", action="store_true", help="also by turns with vLLM's CPU build, from the folder PEERS"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=sorted({row[0] for row in QUICK + FULL}), help="these rows alone"
    )
    args = parser.parse_args()
    rows = [row for row in (FULL if args.full else QUICK) if args.only is None or row[0] in args.only]
    if any("vllm" in row for row in rows):
        try:
            vllm_folder()
        except NoPeer as error:
            print(error, file=sys.stderr)
            return 2
    if any("llama.cpp" in row for row in rows):
        try:
            llama_cpp_folder()
        except NoPeer as error:
            print(f"{error} (its row is left out)", file=sys.stderr)
            rows = [row for row in rows if "llama.cpp" not in row]
    failed = []
    for module, *words in rows:
        print(" ".join([module, *words]), flush=True)
        command = [
            sys.executable,
            "-m",
            f"benchmarks.{module}",
            *words,
            "--out",
            str(args.out),
            "--seed",
            str(args.seed),
        ]
        if subprocess.run(command).returncode:
            failed.append(" ".join([module, *words]))
    if args.out == RESULTS:
        pages.write()
    for row in failed:
        print(f"failed: {row}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
