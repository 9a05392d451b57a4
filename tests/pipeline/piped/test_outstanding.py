"""Lines that were read: in which order their answers leave, and how many there may be."""

import threading

import pytest

from pipeline.piped import outstanding
from pipeline.piped.outstanding import Outstanding
from tests.support.waiting import wait_until


def filled(ordered: bool, *lines: int) -> Outstanding:
    found = Outstanding(ordered)
    for line in lines:
        found.add(line, f"id-{line}", 10)
    return found


def test_answers_leave_in_the_order_in_which_they_came() -> None:
    lines = filled(False, 1, 2, 3)
    assert lines.answer(3, b"c")
    assert lines.answer(1, b"a")
    assert not lines.answer(1, b"other")
    assert not lines.answer(7, b"unknown")
    assert list(lines.to_write().items()) == [(3, b"c"), (1, b"a")]
    lines.note_written([3, 1])
    assert lines.to_write() == {}
    assert lines.unanswered() == {2: "id-2"}
    assert lines.unanswered([1, 2, 9]) == {2: "id-2"}
    assert len(lines) == 1


def test_ordered_ones_wait_for_those_before_them() -> None:
    lines = filled(True, 5, -6, 2)
    lines.add(9, "", 0, b"refused")
    lines.answer(2, b"c")
    assert lines.to_write() == {}
    assert list(lines.to_write(with_gaps=True).values()) == [b"c", b"refused"]
    lines.answer(5, b"a")
    assert list(lines.to_write()) == [5]
    lines.note_written([5])
    lines.answer(-6, b"b")
    assert list(lines.to_write().values()) == [b"b", b"c", b"refused"]


@pytest.mark.parametrize("bound", ["MOST_LINES", "MOST_BYTES"])
def test_a_reader_waits_until_answers_are_written(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outstanding, bound, 3 if bound == "MOST_LINES" else 30)
    lines = filled(False, 1, 2)
    assert lines.wait_for_room() >= 1
    lines.add(3, "", 10)
    rooms: list[int] = []
    thread = threading.Thread(target=lambda: rooms.append(lines.wait_for_room()))
    thread.start()
    lines.answer(1, b"")
    lines.to_write()
    assert thread.is_alive()
    lines.note_written([1])
    wait_until(lambda: rooms, 60, "room")
    assert rooms[0] >= 1
    thread.join()


def test_no_one_waits_once_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outstanding, "MOST_LINES", 1)
    lines = filled(False, 1)
    thread = threading.Thread(target=lines.wait_for_room)
    thread.start()
    lines.close()
    thread.join(60)
    assert not thread.is_alive()
    assert lines.wait_for_room() == 0
