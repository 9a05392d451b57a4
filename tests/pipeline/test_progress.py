"""What a person reads while a batch runs."""

import pytest

from pipeline.progress import BarProgress, Counts, PlainProgress, Rate, describe, duration


def test_a_line_says_done_running_waiting_rate_and_time_left() -> None:
    rate = Rate()
    rate.add(Counts(total=100, done=0, tokens=0), 0.0)
    last = Counts(total=100, done=20, failed=2, running=30, tokens=500)
    rate.add(last, 5.0)
    assert describe(last, rate) == "20 done, 2 of them failed, 30 running, 50 waiting, 100 tokens/s, 20 s left"


def test_the_rate_forgets_what_is_long_ago() -> None:
    rate = Rate()
    for second in range(60):
        rate.add(Counts(total=1000, done=second, tokens=0 if second < 40 else 10 * (second - 40)), float(second))
    assert rate.tokens_per_second == pytest.approx(10.0)


def test_a_note_stands_alone_while_nothing_runs() -> None:
    assert describe(Counts(note="checking the input"), Rate()) == "checking the input"
    assert describe(Counts(total=3, done=1, note="waiting for a worker"), Rate()) == "1 of 3 done; waiting for a worker"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3660, "1 h 1 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plain_lines_come_only_when_something_changed(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainProgress() as progress:
        for _ in range(5):
            progress.update(Counts(total=2, note="checking the input"))
        progress.say("said")
    assert capsys.readouterr().err.splitlines() == ["checking the input", "said"]


def test_the_bar_takes_any_counts(capsys: pytest.CaptureFixture[str]) -> None:
    with BarProgress() as progress:
        progress.update(Counts(note="checking the input"))
        progress.update(Counts(total=10, done=5, running=2, tokens=100))
        progress.say("[not markup]")
    assert "[not markup]" in capsys.readouterr().err
