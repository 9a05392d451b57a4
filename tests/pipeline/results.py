"""Reading result files, and what must hold of every one of them."""

import json
from pathlib import Path
from typing import Any

import jsonschema

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
    return str(message_of(result)["content"])


def message_of(result: dict[str, Any]) -> dict[str, Any]:
    """Its message, which may have calls of tools in place of a text."""
    message: dict[str, Any] = result["response"]["body"]["choices"][0]["message"]
    return message


def answers() -> dict[str, str]:
    """The right answers to the example requests, by custom_id."""
    return {row["custom_id"]: row["answer"] for row in map(json.loads, ANSWERS.read_text().splitlines())}


def check_answers(source: Path, output: Path) -> None:
    """Every custom_id exactly once, in input order, and every answer right."""
    results = read_results(output)
    assert [result["custom_id"] for result in results] == custom_ids(source)
    expected, bodies = answers(), [json.loads(line)["body"] for line in source.read_text().splitlines()]
    wrong = [
        (result["custom_id"], message_of(result))
        for body, result in zip(bodies, results, strict=True)
        if not _is_right(body, message_of(result), expected.get(result["custom_id"]))
    ]
    assert not wrong, f"{len(wrong)} of {len(results)} answers are wrong, such as {wrong[:3]}"
    assert all(result["error"] is None and result["response"]["status_code"] == 200 for result in results)
    assert len({result["id"] for result in results}) == len(results)


def _is_right(body: dict[str, Any], message: dict[str, Any], expected: str | None) -> bool:
    """Whether a message is the expected answer, or if none is, has the form that was asked for."""
    if expected is not None:
        return bool(message["content"] == expected)
    if "response_format" in body:
        text, schema = message["content"], body["response_format"]["json_schema"]["schema"]
    else:
        [called], [tool] = message["tool_calls"], body["tools"]
        text, schema = called["function"]["arguments"], tool["function"]["parameters"]
    return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))
