"""From claims to what the engine takes, and what the caller hears where that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from jobs.requests import Claim, Request, RequestKey
from workers.preparation import Limits, Preparation
from workers.settings import DEMO_MODEL
from workers.text.tokenizer import TextTokenizer


def claim(line: int, **body: Any) -> Claim:
    raw = json.dumps({"model": "m", **body}).encode()
    return Claim(RequestKey("batch_a", line), 1, Request("/v1/completions", "m", raw, seed=line), None, 1, False)


def word_level(folder: Path, eos: str | None = None) -> TextTokenizer:
    """Without a token for unknown words, at which the library raises a plain Exception."""
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "end": 2}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos} if eos else {}))
    return TextTokenizer.load(str(folder))


def test_an_error_that_nobody_foresaw_ends_its_own_request_alone(tmp_path: Path) -> None:
    preparation = Preparation(word_level(tmp_path), ["m"], Limits(100, 3))
    claims = [claim(0, prompt="one two"), claim(1, prompt="one three"), claim(2, prompt="two"), claim(3, prompt="\ud800")]
    prepared, errors = preparation.prepare(claims)
    assert [item.claim.key.line for item in prepared] == [0, 2]
    assert [[prompt.token_ids for prompt in item.prompts] for item in prepared] == [[[0, 1]], [[1]]]
    assert {item.key.line: item.result.status for item in errors} == {1: 500, 3: 400}
    error = next(json.loads(item.result.body)["error"] for item in errors if item.key.line == 1)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "UNK" in error["message"]


def test_the_tokenizers_own_end_ends_an_answer(tmp_path: Path) -> None:
    preparation = Preparation(word_level(tmp_path, eos="end"), ["m"], Limits(100, 3))
    ends_at_two = {"prompt": "one", "stop_token_ids": [1]}
    claims = [claim(0, prompt="one"), claim(1, **ends_at_two), claim(2, **ends_at_two, ignore_eos=True)]
    prepared, errors = preparation.prepare(claims)
    assert errors == []
    assert [item.prompts[0].sampling.stop_token_ids for item in prepared] == [(2,), (1, 2), (1,)]
    assert [item.call.stop_token_ids for item in prepared] == [[], [1], [1]]


def test_a_seed_of_the_request_goes_before_the_stored_one() -> None:
    preparation = Preparation(TextTokenizer.load(DEMO_MODEL), ["m"], Limits(100, 1000))
    prepared, _ = preparation.prepare([claim(7, prompt="x"), claim(7, prompt="x", seed=3), claim(7, prompt="x", seed=-1)])
    assert [item.prompts[0].sampling.seed for item in prepared] == [7, 3, 2**64 - 1]
