"""Stop strings end the text wherever they are cut, and hold back no more than could still become
one.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.text.stop_strings import StopStrings


def run(stops: list[str], parts: list[str], include: bool = False) -> tuple[str, str | None]:
    watcher = StopStrings(stops, include)
    text = ""
    for part in parts:
        text += watcher.feed(part)
        if watcher.matched is not None:
            return text, watcher.matched
    return text + watcher.finish(), None


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    _, start, stop = min(ends)
    return text[:start], stop


@pytest.mark.parametrize(
    ("stops", "parts", "text", "matched"),
    [
        (["\n\n"], ["one\n", "\ntwo"], "one", "\n\n"),
        (["END"], ["a E", "N", "D b"], "a ", "END"),
        (["END"], ["a E", "N", "X b"], "a ENX b", None),
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["abc", "b"], ["abc"], "a", "b"),
        (["c", "bc"], ["ab", "c"], "a", "bc"),
        (["🙂"], ["x", "🙂", "y"], "x", "🙂"),
        ([""], ["never"], "never", None),
        ([], ["never"], "never", None),
    ],
)
def test_examples(stops: list[str], parts: list[str], text: str, matched: str | None) -> None:
    assert run(stops, parts) == (text, matched)


@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    parts=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_the_cut_does_not_matter(stops: list[str], parts: list[str]) -> None:
    whole = "".join(parts)
    text, stop = expected(stops, whole)
    assert run(stops, parts) == run(stops, list(whole)) == run(stops, [whole]) == (text, stop)
    assert run(stops, parts, include=True) == (text + (stop or ""), stop)


@given(stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), text=st.text("abc", max_size=30))
def test_only_what_could_still_match_is_held_back(stops: list[str], text: str) -> None:
    watcher = StopStrings(stops)
    released = ""
    for index, character in enumerate(text):
        released += watcher.feed(character)
        if watcher.matched is not None:
            return
        held = text[len(released) : index + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert len(held) < max(map(len, stops))


def test_nothing_follows_a_match() -> None:
    watcher = StopStrings(["x"])
    assert watcher.feed("axb") == "a"
    assert watcher.feed("more") == ""
    assert watcher.finish() == ""


def test_what_was_passed_by_stays_passed_by_even_while_it_is_held_back() -> None:
    stops = StopStrings(["ab", "abcd"])
    released = stops.pass_by("xab")  # the end of it may still become the longer one
    assert released == "x"
    released += stops.feed("c")
    assert stops.matched is None
    released += stops.feed("xab!")
    assert (released, stops.matched) == ("xabcx", "ab")
    straddled = StopStrings(["ab"])
    assert straddled.pass_by("ab a") == "ab "
    assert straddled.feed("b") == ""
    assert straddled.matched == "ab"
