"""Run the proofs of what changed since all proofs passed: `python -m tests.touched_proofs`.

The change is all since the commit BASE of the environment, else since that of the newest row of
"Full proofs" in `docs/reliability.md` that is an ancestor. `tests/proofs.toml` says which proofs it
touches. They run in the order of that table until ten minutes are used; the rest is listed.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.commands import REPOSITORY
from tests.support.proof_table import ProofTable, read_table

SECONDS = 600
NO_TESTS = 5  # pytest's exit code where every file is skipped as a whole
WORKERS = 4  # most proofs wait for processes that they started
FULL_PROOFS = REPOSITORY / "docs" / "reliability.md"


def main() -> int:
    table = read_table()
    base = os.environ.get("BASE") or newest_full_proof(FULL_PROOFS.read_text())
    changed = changed_files(base) if base else set(names_of("ls-files"))
    print(f"Files that changed since {base}: {len(changed)}" if base else NO_BASE)
    core = list(table.core) if table.touches_core(changed) else []
    touched = table.touched(changed)
    with TemporaryDirectory() as folder:
        status, not_run = run(core, touched, Path(folder) / "not_run")
    report(table, core, touched, not_run)
    return status


NO_BASE = 'No commit of "Full proofs" is in this clone (`git fetch --unshallow` gets it): all files count as changed.'


def newest_full_proof(page: str) -> str | None:
    """Return the commit of the table's newest row that is an ancestor of the checkout's."""
    rows = re.findall(r"^\| ([0-9a-f]{8,40}) \|", page.partition("## Full proofs")[2], re.MULTILINE)
    return next((commit for commit in reversed(rows) if is_ancestor(commit)), None)


def is_ancestor(commit: str) -> bool:
    return git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0


def changed_files(base: str) -> set[str]:
    """Return the files that differ from those of the commit, new ones included."""
    if git("cat-file", "-e", f"{base}^{{commit}}").returncode:
        sys.exit(f"BASE names {base}, which is no commit of this clone; name one that `git log` shows.")
    return {
        *names_of("diff", "--name-only", "--no-renames", base),
        *names_of("ls-files", "--others", "--exclude-standard"),
    }


def names_of(*arguments: str) -> list[str]:
    """Return the file names that a command of git prints."""
    done = git(*arguments, "-z")
    if done.returncode:
        sys.exit(f"The change cannot be seen, since git fails: {done.stderr.strip()}. `make proof` runs all proofs.")
    return done.stdout.split("\0")[:-1]


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True)


def run(core: list[str], touched: list[str], not_run: Path) -> tuple[int, list[str]]:
    """Run the core, then the rest while there is time; return a status and the files left out."""
    deadline = time.time() + SECONDS
    status = pytest(core, os.environ.copy()) if core else 0
    if touched:
        limited = os.environ | {"PROOF_DEADLINE": str(deadline), "NOT_RUN_PROOFS": str(not_run)}
        status |= pytest([*touched, *(f"--deselect={test}" for test in core)], limited)
    left_out = set(not_run.read_text().splitlines()) if not_run.exists() else set()
    return status, [file for file in touched if file in left_out]


def pytest(arguments: list[str], environment: dict[str, str]) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "proof", "-n", str(WORKERS)]
    command += ["--dist", "loadfile", "--no-loadscope-reorder", *arguments]
    status = subprocess.run(command, cwd=REPOSITORY, env=environment | {"OMP_NUM_THREADS": "1"}).returncode
    return 0 if status == NO_TESTS else status


def report(table: ProofTable, core: list[str], touched: list[str], not_run: list[str]) -> None:
    """Say what was run, and each file of proofs that the change touches and that was not."""
    print(f"Proofs of the core: {len(core)} ids" if core else "Proofs of the core: not touched")
    print(f"Files of proofs: {len(touched) - len(not_run)} run of {len(touched)} touched, {len(table.seconds)} in all")
    print(f"Touched and not run to their end, for want of time: {len(not_run)}")
    for file in not_run:
        print(f"  {file}")


if __name__ == "__main__":
    sys.exit(main())
