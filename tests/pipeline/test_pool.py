"""The pool of checked questions through the whole system: every answer right means every one."""

import gzip
import json
import os
import random
from pathlib import Path

import pytest

from tests.pipeline.results import read_results, text_of
from tests.support.commands import run_pipeline

POOL = Path(__file__).parents[1] / "data" / "pool.jsonl.gz"


@pytest.mark.proof
def test_a_sample_of_the_pool_is_answered_right(tmp_path: Path) -> None:
    seed = int(os.environ.get("POOL_SEED", 1))
    print(f"seed {seed} (set POOL_SEED to draw others)")
    questions = random.Random(seed).sample(pool(), 200)
    assert answers_of(questions, tmp_path) == right_answers(questions)


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_weights_in_int8_answer_the_pool_right(tmp_path: Path) -> None:
    questions = pool()
    answers, right = answers_of(questions, tmp_path, "--quantization", "int8"), right_answers(questions)
    assert sum(answers[name] == answer for name, answer in right.items()) >= 0.97 * len(right)


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_the_whole_pool_is_answered_right(tmp_path: Path) -> None:
    questions = pool()
    assert answers_of(questions, tmp_path) == right_answers(questions)


def pool() -> list[dict[str, object]]:
    with gzip.open(POOL, "rt") as file:
        return [json.loads(line) for line in file]


def right_answers(questions: list[dict[str, object]]) -> dict[object, object]:
    """By custom_id."""
    return {question["id"]: question["answer"] for question in questions}


def answers_of(questions: list[dict[str, object]], folder: Path, *flags: str) -> dict[object, object]:
    """What run-batch answers, by custom_id."""
    source, output = folder / "requests.jsonl", folder / "results.jsonl"
    with source.open("w") as file:
        for question in questions:
            body = {
                "model": "demo",
                "messages": question["messages"],
                "max_tokens": question["max_tokens"],
                "temperature": 0,
            }
            line = {"custom_id": question["id"], "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    done = run_pipeline("run-batch", source, "-o", output, *flags, timeout=800)
    assert done.returncode == 0, done.stderr
    return {row["custom_id"]: text_of(row) for row in read_results(output)}
