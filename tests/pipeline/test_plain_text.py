"""Text of others cannot control a terminal."""

import pytest

from pipeline.plain_text import plain


@pytest.mark.parametrize("text", ["", "Qwen/Qwen3-8B", "größer 模型 🙂", "[red]x[/red]"])
def test_printable_text_stays(text: str) -> None:
    assert plain(text) == text


@pytest.mark.parametrize("control", ["\x1b", "\x07", "\r", "\n", "\t", "\x9b", "\u202e", "\u2028", "\u200b", "\ud800"])
def test_what_a_terminal_may_act_on_is_replaced(control: str) -> None:
    assert plain(f"a{control}[2Jb") == "a\ufffd[2Jb"
