"""Requests that do harm to the engine core that runs them.

Nothing in the product knows of this: see `poisoned/sitecustomize.py`.

The least harm is to be slow. A request that takes half a minute is still running when a test has
something done to its worker, however busy the machine is. One that is held goes on when the test
lets it.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from workers.settings import DEMO_MODEL
from workers.text.tokenizer import TextTokenizer

_FOLDER = Path(__file__).parent / "poisoned"


@dataclass(frozen=True)
class Poison:
    """A request whose prompt holds " `word`" does this harm from its token `start` on.

    It is one of segfault, exception, memory, hang, exit, slow (50 ms a step), crawl (2 s a step)
    and hold (as long as a file is there). Without a word every request does.
    """

    word: str
    harm: str
    start: int = 0


class NotedStep(NamedTuple):
    """A step that an engine core has handed out: when, on the machine's monotonic clock, its
    process id, the requests that got a token or ended, and those of them that were aborted.
    """

    at: float
    core_pid: int
    request_ids: list[int]
    aborted: list[int]


def noted_steps(file: Path) -> list[NotedStep]:
    """Return the steps that cores have noted in `file` so far."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [NotedStep(*json.loads(line)) for line in lines if line.endswith("\n")]


def poisoned_environment(
    *poisons: Poison, hold: Path | None = None, notes: Path | None = None, path: str | None = None
) -> dict[str, str]:
    """Return the variables with which these words do harm to a worker.

    `hold` is the file that holds requests, `notes` one for the steps, as `noted_steps` reads it,
    `path` the worker's PYTHONPATH if it is not that of this process.
    """
    tokenizer = TextTokenizer.load(DEMO_MODEL)
    words = tokenizer.encode([poison.word and f" {poison.word}" for poison in poisons], special_tokens=False)
    found = [
        {"token_ids": ids, "harm": poison.harm, "from": poison.start}
        for poison, ids in zip(poisons, words, strict=True)
    ]
    path = os.pathsep.join([str(_FOLDER), *filter(None, [path or os.environ.get("PYTHONPATH")])])
    files = {"HOLD_FILE": str(hold or ""), "STEP_NOTES": str(notes or "")}
    return {"PYTHONPATH": path, "POISONS": json.dumps(found), **files}


@contextlib.contextmanager
def held(file: Path) -> Iterator[None]:
    """No step with a request that is to be held ends before this does."""
    file.touch()
    try:
        yield
    finally:
        file.unlink()
