"""tools/terminal_picture.py draws what a terminal shows at the end of a run."""

from xml.etree import ElementTree

from tools.terminal_picture import picture, screen

OUTPUT = (
    "starting a worker\r\n\x1b[?25l\x1b[38;5;197m━━\x1b[0m 107 done\r\x1b[2K\x1b[38;5;70m━━━━\x1b[0m 302 done\r\n"
    "\x1b[?25hresults: <out>\r\n"
)


def test_a_line_that_is_drawn_again_shows_its_last_state() -> None:
    assert screen(OUTPUT) == ["starting a worker", "\x1b[38;5;70m━━━━\x1b[0m 302 done", "results: <out>"]
    assert screen("one\r\ntwo\r\x1b[2K\x1b[1A\x1b[2Kthree\r\n") == ["three"]


def test_the_picture_is_an_svg_of_the_last_screen() -> None:
    drawn = picture("pipeline run-batch in.jsonl", OUTPUT)
    text = "".join(ElementTree.fromstring(drawn).itertext()).replace("\xa0", " ")
    for line in ("$ pipeline run-batch in.jsonl", "starting a worker", "302 done", "results: <out>"):
        assert line in text
    assert "107 done" not in text
    assert "url(http" not in drawn
