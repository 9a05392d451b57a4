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


def poisoned_environment(*poisons: Poison, hold: Path | None = None) -> dict[str, str]:
    """What a worker's environment needs beside the usual for these words to do harm.

    `hold` is the file that holds requests.
    """
    tokenizer = TextTokenizer.load(DEMO_MODEL)
    words = tokenizer.encode([poison.word and f" {poison.word}" for poison in poisons], special_tokens=False)
    found = [
        {"token_ids": ids, "harm": poison.harm, "from": poison.start}
        for poison, ids in zip(poisons, words, strict=True)
    ]
    path = os.pathsep.join([str(_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "POISONS": json.dumps(found), "HOLD_FILE": str(hold or "")}


@contextlib.contextmanager
def held(file: Path) -> Iterator[None]:
    """No step with a request that is to be held ends before this does."""
    file.touch()
    try:
        yield
    finally:
        file.unlink()
