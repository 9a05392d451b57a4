"""`make bench`: start-up, the engine alone, the stages of sampling and `run-batch` as a whole process, one after the other."""

import subprocess
import sys

BENCHMARKS = (
    ["benchmarks.start_up"],
    ["benchmarks.engine", "--kind", "random", "--requests", "64"],
    ["benchmarks.engine", "--kind", "shared", "--requests", "256"],
    ["benchmarks.sampling"],
    ["benchmarks.run_batch", "--kind", "shared", "--requests", "128"],
)


def main() -> None:
    for module, *arguments in BENCHMARKS:
        print(" ".join([module, *arguments]), flush=True)
        subprocess.run([sys.executable, "-m", module, *arguments], check=True)


if __name__ == "__main__":
    main()
