"""What is printed of results stays in its line, whatever they hold."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from pipeline.summary import first_answers


def result(custom_id: str, text: str) -> str:
    return json.dumps({"custom_id": custom_id, "response": {"body": {"choices": [{"text": text}]}}, "error": None})


def test_first_answers_are_short_lines_without_what_a_terminal_obeys(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    rows = [
        result("a\n\x1b[2J", "one\ttwo\r\n three\x00"),
        result("c" * 1000, "d" * 1_000_000),
        result("é 🙂", ""),
        result("fourth", ""),
    ]
    output.write_text("\n".join(rows))
    found = first_answers(output)
    assert found == ["  a [2J: one two three", f"  {'c' * 99}…: {'d' * 99}…", "  é 🙂: "]


def test_calls_of_tools_stand_for_an_answer_without_content(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    calls = [
        {"function": {"name": "weather", "arguments": '{"place": "Bonn"}'}},
        {"function": {"name": "time", "arguments": "{}"}},
    ]
    messages = [{"content": None, "tool_calls": calls}, {"content": None}, {"content": "Yes."}]
    rows = [{"custom_id": "a", "response": {"body": {"choices": [{"message": message}]}}} for message in messages]
    output.write_text("\n".join(map(json.dumps, rows)))
    assert first_answers(output) == ['  a: weather {"place": "Bonn"} time {}', "  a: ", "  a: Yes."]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}]}, "[0.5, -1.0]"),
        ({"data": [{"object": "embedding", "index": 0, "embedding": "AAAAPw=="}]}, '"AAAAPw=="'),
        ({"data": [{"object": "score", "score": 0.5}, {"object": "score", "score": 0.25}]}, "[0.5, 0.25]"),
        ({"results": [{"index": 0, "relevance_score": 0.75}]}, "0.75"),
        ({"data": [{"index": 0, "label": None, "probs": [0.5, 0.5]}]}, "[0.5, 0.5]"),
        ({"data": [{"index": 0, "object": "pooling", "data": [0.5]}]}, "[0.5]"),
    ],
)
def test_numbers_are_shown_as_they_are(body: dict[str, Any], expected: str, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text(json.dumps({"custom_id": "a", "response": {"body": body}, "error": None}))
    assert first_answers(output) == [f"  a: {expected}"]


def test_numbers_in_columns_are_shown(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    columns = {"custom_id": ["a", "b"], "text": [None, None], "error_message": [None, "too long"]}
    parquet.write_table(pyarrow.table(columns | {"embedding": [[0.5, 1.0], None]}), output)
    assert first_answers(output) == ["  a: [0.5, 1.0]", "  b: error: too long"]
