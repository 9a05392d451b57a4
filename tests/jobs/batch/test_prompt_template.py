"""Templates name columns and nothing else."""

import pytest

from jobs.batch.prompt_template import parse_template


@pytest.mark.parametrize(
    ("template", "pieces"),
    [
        ("{text}", [("", "text"), ("", None)]),
        ("Summarize: {text}", [("Summarize: ", "text"), ("", None)]),
        ("{a}{b c} to {ä}.", [("", "a"), ("", "b c"), (" to ", "ä"), (".", None)]),
        ('{{"text": "{text}"}}', [('{"text": "', "text"), ('"}', None)]),
        ("{{{a}}}", [("{", "a"), ("}", None)]),
        ("line\n{a}\n", [("line\n", "a"), ("\n", None)]),
    ],
)
def test_columns_are_in_braces_and_braces_are_doubled(template: str, pieces: list[tuple[str, str | None]]) -> None:
    assert parse_template(template) == pieces


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("", "the template names no column"),
        ("no {{column}}", "the template names no column"),
        ("a {text", "a single '{' at 3; write {{ for one"),
        ("a} {text}", "a single '}' at 2; write }} for one"),
        ("{text}}", "a single '}' at 7"),
        ("{}", "has {} at 1; only the name of a column"),
        ("{0.__class__}", r"has {0.__class__} at 1"),
        ("{row[text]}", r"has {row\[text\]} at 1"),
        ("{text!r}", "has {text!r} at 1"),
        ("{price:.2f}", "has {price:.2f} at 1"),
    ],
)
def test_what_is_not_a_plain_name_is_refused_with_its_place(template: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_template(template)
