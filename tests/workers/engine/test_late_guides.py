"""Guides that are late, and grammars that take long: who waits, and what becomes of them."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from numpy.typing import NDArray

from tests.workers.engine.driving import run
from tests.workers.engine.guides.test_compiler import SECONDS, Panic, finished
from tests.workers.engine.guides.texts import choice, regex
from tests.workers.engine.test_guided import DEPTHS, GREEDY, answer, guided_core, in_a_batch, plain, request, written
from workers.engine.guides.guide import Guide
from workers.engine.messages.core import Finish, SamplingParams, StepOutput

AMBIGUOUS = '{"grammars": [{"lark_grammar": "start: e\\ne: e e | \\"a\\" | \\"b\\""}]}'
LATE = regex("[a-z]{12}(red|blue)[0-9]{3}")


class LateGuides:
    """Keeps back the third token, or its mask, of guides of the grammar `LATE`, until `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
        self.open = threading.Event()
        self.kept_back = 0
        calls: dict[Guide, int] = {}
        work = getattr(Guide, step)

        def late(guide: Guide, *token: int) -> Any:
            calls[guide] = calls.get(guide, 0) + 1
            if guide.grammar == LATE and calls[guide] == 3:
                self.kept_back += 1
                assert self.open.wait(SECONDS)
            return work(guide, *token)

        monkeypatch.setattr(Guide, step, late)


@pytest.fixture(params=["advance", "_make_mask"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateGuides]:
    kept = LateGuides(monkeypatch, request.param)
    yield kept
    kept.open.set()


@DEPTHS
def test_a_late_guide_holds_up_no_request_without_one_and_changes_no_token(depth: int, late: LateGuides) -> None:
    late.open.set()
    requests = [request(1, LATE), plain(2), request(3, choice("red", "blue")), request(4, LATE)]
    expected = run(guided_core(), requests).answers
    late.open.clear()
    core, ends = guided_core(depth), set[int]()
    step = core.step

    def observed() -> StepOutput | None:
        output = step()
        ends.update(finished(output))
        if 2 in ends:
            late.open.set()
        return output

    core.step = observed  # type: ignore[method-assign]
    assert run(core, requests).answers == expected
    assert late.kept_back


@DEPTHS
def test_a_core_whose_only_request_is_late_waits_for_it(depth: int, late: LateGuides) -> None:
    late.open.set()
    expected = answer(guided_core(), request(1, LATE))
    late.open.clear()
    core = guided_core(depth)
    opening = threading.Timer(0.2, late.open.set)
    opening.start()
    assert answer(core, request(1, LATE)) == expected


@pytest.mark.usefixtures("crowded")
@DEPTHS
def test_guides_that_are_always_late_change_no_token(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engine.guides.guide_threads._LEAST_PATIENCE", 0.0)
    monkeypatch.setattr("workers.engine.guides.guide_threads._PATIENCE", 0.0)
    in_a_batch(5, depth)


@DEPTHS
def test_a_grammar_that_takes_long_ends_its_own_request_with_a_sentence(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.engine.guides.guide._LONG_SECONDS", 1e-4)
    monkeypatch.setattr("workers.engine.guides.guide._MOST_LONG_SECONDS", 0.02)
    core = guided_core(depth)
    endless = SamplingParams(100, temperature=0.0, min_tokens=100)
    got = run(core, [request(1, AMBIGUOUS, endless), plain(2), request(3, choice("red", "blue"))]).answers
    assert got[1].finish is Finish.INVALID
    assert got[1].tokens
    assert got[1].error.startswith("the output's grammar cannot be followed: its tokens take too long, the last one ")
    assert got[2] == answer(guided_core(), plain(2))
    assert written(got[3]) in (b"red", b"blue")


def test_a_mask_has_a_limit_of_parser_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engine.guides.vocabulary._MOST_ITEMS", 300)
    got = answer(guided_core(), request(1, AMBIGUOUS, SamplingParams(100, temperature=0.0, min_tokens=100)))
    assert got.finish is Finish.INVALID
    assert "Too many items (limit 300; mask)" in got.error


@DEPTHS
def test_a_library_that_panics_in_a_mask_fails_that_request_alone(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Guide._make_mask

    def panic(guide: Guide) -> NDArray[Any] | None:
        if guide.grammar == LATE:
            raise Panic("an index is out of range")
        return make(guide)

    monkeypatch.setattr(Guide, "_make_mask", panic)
    got = run(guided_core(depth), [request(1, LATE), request(2, choice("red")), plain(3)]).answers
    assert (got[1].finish, got[1].tokens) == (Finish.INVALID, [])
    assert got[1].error == "the output's grammar cannot be followed: an index is out of range"
    assert written(got[2]) == b"red"
    assert got[3].tokens == answer(guided_core(), plain(3, GREEDY)).tokens
