"""Requests that do harm to the engine core that runs them. Nothing in the product knows of this: see `poisoned/sitecustomize.py`.

The least harm is to be slow. A request that takes half a minute is still running when a test has something done to its worker, however
busy the machine is.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from workers.settings import DEMO_MODEL
from workers.text.tokenizer import TextTokenizer

_FOLDER = Path(__file__).parent / "poisoned"


@dataclass(frozen=True)
class Poison:
    """A request whose prompt holds " `word`" does this harm from its token `start` on.

    It is one of segfault, exception, memory, hang, exit, slow (50 ms a step) and crawl (2 s a step).
    Without a word every request does.
    """

    word: str
    harm: str
    start: int = 0


def poisoned_environment(*poisons: Poison) -> dict[str, str]:
    """What a worker's environment needs beside the usual for these words to do harm."""
    tokenizer = TextTokenizer.load(DEMO_MODEL)
    words = tokenizer.encode([poison.word and f" {poison.word}" for poison in poisons], special_tokens=False)
    found = [{"token_ids": ids, "harm": poison.harm, "from": poison.start} for poison, ids in zip(poisons, words, strict=True)]
    path = os.pathsep.join([str(_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "POISONS": json.dumps(found)}
