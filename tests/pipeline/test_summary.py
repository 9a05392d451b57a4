"""What is printed of results stays in its line, whatever they hold."""

import json
from pathlib import Path

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


def test_numbers_are_shown_as_they_are(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    bodies = [{"data": [{"index": 0, "embedding": [0.5, 1]}]}, {"results": [{"index": 1}]}]
    rows = [{"custom_id": "a", "response": {"body": body}, "error": None} for body in bodies]
    output.write_text("\n".join(map(json.dumps, rows)))
    assert first_answers(output) == ['  a: [{"index": 0, "embedding": [0.5, 1]}]', '  a: [{"index": 1}]']


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
