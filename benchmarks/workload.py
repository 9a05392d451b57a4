"""Batch files with a fixed seed: chat lines with one system prompt, or completions with nothing in
common.
"""

import json
import random
import re
import sysconfig
from pathlib import Path

SYSTEM_PROMPT = (
    "You sort fragments of technical writing for a library. Read what the user sends, choose the one shelf that suits"
    " it (files, text, network, numbers, time, processes, containers, tests, security, other) and reply with the"
    " shelf's name and a single sentence that gives your reason. Do not answer questions, do not translate, do not add"
    " a greeting. " * 3
)


def write_workload(
    path: Path, kind: str, requests: int, model: str, seed: int = 1, tokens: tuple[int, int] = (16, 96)
) -> Path:
    """Write `requests` lines that ignore end-of-text, so that all runs make the same tokens.

    kind: "shared" (chat, one system prompt) or "random" (completions of random words).
    """
    rng = random.Random(seed)
    passages = _passages()
    rng.shuffle(passages)
    words = sorted({word for passage in passages for word in passage.split() if word.isalpha()})
    with path.open("w") as file:
        for index in range(requests):
            body: dict[str, object] = {
                "model": model,
                "max_tokens": rng.randint(*tokens),
                "temperature": 0,
                "ignore_eos": True,
            }
            if kind == "shared":
                url = "/v1/chat/completions"
                body["messages"] = [
                    {"role": "system", "content": SYSTEM_PROMPT},
                    {"role": "user", "content": passages[index % len(passages)]},
                ]
            else:
                url = "/v1/completions"
                body["prompt"] = " ".join(rng.choices(words, k=rng.randint(24, 160)))
            file.write(json.dumps({"custom_id": f"{kind}-{index}", "method": "POST", "url": url, "body": body}) + "\n")
    return path


def _passages() -> list[str]:
    """Return comments and docstrings of the standard library, 80 to 900 characters each."""
    found: set[str] = set()
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for passage in re.findall(r'"""(.{80,900}?)"""', source.read_text(errors="replace"), flags=re.DOTALL):
            found.add(" ".join(passage.split()))
    return sorted(found)
