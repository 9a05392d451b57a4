"""Text prompts with an exact number of tokens, and requests with them."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.models import model_folder


@cache
def words(model: str) -> list[str]:
    """Return the words of the model's vocabulary that are one token after a space."""
    vocabulary = json.loads((model_folder(model) / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(token[1:] for token in vocabulary if token[0] == "Ġ" and token[1:].isascii() and token[1:].isalpha())


def prompt(draw: random.Random, model: str, tokens: int) -> str:
    """Return random words; each is one token."""
    return "".join(f" {word}" for word in draw.choices(words(model), k=tokens))


def body(draw: random.Random, model: str, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Return the body of a greedy completion that does not end before its last token."""
    return {
        "model": model,
        "prompt": prompt(draw, model, prompt_tokens),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def streamed(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with streaming and usage at the end."""
    return body | {"stream": True, "stream_options": {"include_usage": True}}


def write_batch(path: Path, lines: int, model: str, seed: int, prompt_tokens: int, output: tuple[int, int]) -> Path:
    """Write a batch file of prompts with nothing in common and random output lengths."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for line in range(lines):
            asked = body(draw, model, prompt_tokens, draw.randint(*output))
            request = {"custom_id": f"line-{line}", "method": "POST", "url": "/v1/completions", "body": asked}
            file.write(json.dumps(request) + "\n")
    return path
