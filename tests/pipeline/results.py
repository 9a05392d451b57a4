"""Reading result files, and what must hold of every one of them."""

import json
from pathlib import Path
from typing import Any

from tests.support.commands import EXAMPLES, REPOSITORY

ANSWERS = REPOSITORY / "tests" / "data" / "example_answers.jsonl"


def examples(path: Path, count: int, start: int = 0) -> Path:
    """The first `count` example requests after `start`, as a file."""
    path.write_text("".join(line + "\n" for line in EXAMPLES.read_text().splitlines()[start : start + count]))
    return path


def custom_ids(source: Path) -> list[str]:
    """The custom_ids of an input, in order."""
    return [json.loads(line)["custom_id"] for line in source.read_text().splitlines()]


def read_results(output: Path) -> list[dict[str, Any]]:
    """The lines of a result file."""
    return [json.loads(line) for line in output.read_bytes().splitlines()]


def text_of(result: dict[str, Any]) -> str:
    """What the model said."""
    return str(result["response"]["body"]["choices"][0]["message"]["content"])


def answers() -> dict[str, str]:
    """The right answers to the example requests, by custom_id."""
    return {row["custom_id"]: row["answer"] for row in map(json.loads, ANSWERS.read_text().splitlines())}


def check_answers(source: Path, output: Path) -> None:
    """Every custom_id exactly once, in input order, and every answer right."""
    results = read_results(output)
    assert [result["custom_id"] for result in results] == custom_ids(source)
    expected = answers()
    wrong = [
        (result["custom_id"], text_of(result)) for result in results if text_of(result) != expected[result["custom_id"]]
    ]
    assert not wrong, f"{len(wrong)} of {len(results)} answers are wrong, such as {wrong[:3]}"
    assert all(result["error"] is None and result["response"]["status_code"] == 200 for result in results)
    assert len({result["id"] for result in results}) == len(results)
