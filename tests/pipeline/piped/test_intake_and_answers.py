"""Lines go from stdin into an open batch, and their answers come back from wherever they are."""

import hashlib
import json
import threading
from pathlib import Path

import pytest
import redis

from jobs.batch.bitmap import Bitmap
from jobs.batch.client import BatchRecord, BatchSpec, create_batch
from jobs.batch.input_files import InputLine
from jobs.batch.manifest import load_manifest
from jobs.batch.open_requests import SOURCE_NAME, OpenRequests
from jobs.batch.parts import PartDamaged
from jobs.control.runner import Runner
from jobs.protocol.requests import Claim
from jobs.protocol.results import ApiError, Result
from jobs.queue.request_queue import Queue
from pipeline.piped import answers, outstanding
from pipeline.piped.answers import AnswerReader
from pipeline.piped.intake import LineIntake
from pipeline.piped.outstanding import Outstanding
from tests.support.batch_steps import answer_all, step
from tests.support.control_plane import chat_line, echo
from tests.support.waiting import wait_for_value


class OpenPipe:
    """An open batch with its intake and its answers, as one run has them."""

    def __init__(self, client: redis.Redis, folder: Path, ordered: bool = False, written: tuple[int, ...] = ()) -> None:
        root = str(folder / "out.parts")
        self.spec = BatchSpec(
            input=f"{root}/{SOURCE_NAME}",
            root=root,
            models=("m",),
            error_file="inline",
            skip_invalid_requests=True,
            streams_input=True,
        )
        self.record: BatchRecord = create_batch(client, self.spec)
        self.outstanding = Outstanding(ordered)
        self.intake = LineIntake(Queue(client), self.record.id, self.spec, self.outstanding, durable=True)
        self.answers = AnswerReader(Queue(client), self.record.id, root, self.outstanding)
        self.intake.resume(_bitmap(*written), _bitmap())

    def take(self, *raws: bytes, first: int = 1) -> bool:
        return self.intake.take([InputLine(number, 0, raw) for number, raw in enumerate(raws, first)])

    def write(self) -> list[tuple[str | None, int]]:
        """What is written now: custom_ids with their status codes."""
        while self.answers.read():
            pass
        answers = self.outstanding.to_write()
        self.outstanding.note_written(answers)
        lines = [json.loads(line) for line in answers.values()]
        return [(line["custom_id"], line["response"]["status_code"]) for line in lines]


def answer(claim: Claim) -> Result:
    """As a worker does, which refuses what stands for an invalid line."""
    is_valid = isinstance(json.loads(claim.request.body)["messages"], list)
    return echo(claim) if is_valid else ApiError(400, "no messages").result("")


@pytest.fixture
def piped(redis_client: redis.Redis, tmp_path: Path) -> OpenPipe:
    """One whose batch is in progress."""
    found = OpenPipe(redis_client, tmp_path)
    step(redis_client, found.record.id)
    return found


def test_lines_reach_workers_without_the_control_plane(piped: OpenPipe, redis_client: redis.Redis) -> None:
    assert not piped.take(chat_line("a"), chat_line("b"))
    assert answer_all(redis_client) == 2
    assert not piped.take(chat_line("c"), first=3)
    assert answer_all(redis_client) == 1
    piped.answers.collect([1, 2, 3, 77])
    assert sorted(piped.write()) == [("a", 200), ("b", 200), ("c", 200)]
    assert (piped.intake.read, piped.intake.failed, piped.answers.failed) == (3, 0, 0)


def test_lines_that_the_control_plane_has_to_feed_are_fed_once(redis_client: redis.Redis, tmp_path: Path) -> None:
    piped = OpenPipe(redis_client, tmp_path)
    piped.take(chat_line("a"))
    assert answer_all(redis_client) == 0
    step(redis_client, piped.record.id)
    piped.take(chat_line("b"), first=2)
    step(redis_client, piped.record.id)
    assert answer_all(redis_client) == 2
    piped.answers.collect_all()
    assert sorted(piped.write()) == [("a", 200), ("b", 200)]


def test_answers_that_were_drained_are_read_from_the_parts(piped: OpenPipe, redis_client: redis.Redis) -> None:
    piped.take(*(chat_line(f"{number}") for number in range(3)))
    answer_all(redis_client, most=2)
    Runner(Queue(redis_client)).drain(piped.record.id)
    answer_all(redis_client)
    manifest = load_manifest(piped.spec.root)
    assert manifest is not None
    assert manifest.parts
    piped.answers.collect_all()
    assert sorted(piped.write()) == [("0", 200), ("1", 200), ("2", 200)]
    piped.answers.collect_all()
    assert piped.write() == []


def test_lines_that_cannot_run_are_answered_in_their_place(redis_client: redis.Redis, tmp_path: Path) -> None:
    piped = OpenPipe(redis_client, tmp_path, ordered=True)
    step(redis_client, piped.record.id)
    bad = chat_line("unknown", model="other")
    assert piped.take(b"{broken", bad, chat_line("a"), chat_line("a"), bad, chat_line("a", "else"))
    assert piped.write() == [(None, 400), ("unknown", 400)]
    answer_all(redis_client, answer)
    piped.answers.collect_all()
    piped.answers.read()
    answers = list(piped.outstanding.to_write().values())
    assert piped.write() == [("a", 200), ("a", 400), ("unknown", 400), ("a", 400)]
    duplicate = json.loads(answers[1])
    assert duplicate["error"]["code"] == "duplicate_custom_id"
    assert duplicate["error"]["message"].startswith("Line 4: ")
    assert piped.intake.failed == 5


def test_a_later_run_takes_up_what_is_not_written(redis_client: redis.Redis, tmp_path: Path) -> None:
    first = OpenPipe(redis_client, tmp_path)
    step(redis_client, first.record.id)
    first.take(*(chat_line(f"{number}") for number in range(1, 7)), b'{"custom_id": "bad"}')
    answer_all(redis_client, answer, most=3)
    Runner(Queue(redis_client)).drain(first.record.id)
    redis_client.flushall()
    second = OpenPipe(redis_client, tmp_path, ordered=True, written=(1, 2))
    assert second.record.id == first.record.id
    step(redis_client, second.record.id)
    assert list(second.outstanding.unanswered().values()) == ["3", "4", "5", "6"]
    second.take(*(chat_line(f"{number}") for number in range(1, 9)))
    step(redis_client, second.record.id)
    assert answer_all(redis_client, answer) == 6  # one of them is the placeholder of the invalid line
    second.answers.collect_all()
    assert [name for name, _ in second.write()] == ["3", "4", "5", "6", "bad", "7", "8"]
    assert OpenRequests(second.spec).committed().lines == 9


def test_large_answers_are_in_memory_only_to_be_written(
    piped: OpenPipe, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they are in Redis or in parts."""
    monkeypatch.setattr(answers, "_MOST_BYTES", 5000)
    piped.take(*(chat_line(f"{number}", "x" * 1500) for number in range(20)))
    answer_all(redis_client, most=10)
    Runner(Queue(redis_client)).drain(piped.record.id)
    answer_all(redis_client)
    piped.answers.collect_all()
    written: list[int] = []
    while piped.answers.read():
        assert 0 < piped.outstanding.answer_bytes < 2 * 5000 + 4000
        found = piped.outstanding.to_write()
        written += found
        piped.outstanding.note_written(found)
    assert sorted(written) == [*range(1, 21)]
    assert piped.outstanding.answer_bytes == 0


def test_a_damaged_answer_is_named_once_those_of_other_lines_are_read(
    piped: OpenPipe, redis_client: redis.Redis
) -> None:
    piped.take(*(chat_line(f"{number}") for number in range(3)))
    answer_all(redis_client)
    Runner(Queue(redis_client)).drain(piped.record.id)
    [part] = (Path(piped.spec.root) / "parts").iterdir()
    part.write_bytes(part.read_bytes()[:-1])
    piped.answers.collect_all()
    assert piped.answers.read()
    assert not piped.answers.read()
    piped.answers.collect_all()
    with pytest.raises(PartDamaged, match=rf"the answer of line 3 of {piped.record.id} cannot be read: "):
        piped.answers.read()
    assert sorted(piped.write()) == [("0", 200), ("1", 200)]


def test_a_part_that_was_damaged_once_is_read_again(piped: OpenPipe, redis_client: redis.Redis) -> None:
    piped.take(chat_line("a"), chat_line("b"))
    answer_all(redis_client)
    Runner(Queue(redis_client)).drain(piped.record.id)
    [part] = (Path(piped.spec.root) / "parts").iterdir()
    content = part.read_bytes()
    part.write_bytes(content[:-1])
    piped.answers.collect_all()
    assert piped.answers.read()
    part.write_bytes(content)
    piped.answers.collect_all()
    assert sorted(piped.write()) == [("a", 200), ("b", 200)]


def test_a_finish_that_redis_lost_is_no_lost_answer(piped: OpenPipe, redis_client: redis.Redis) -> None:
    piped.take(chat_line("a"))
    answer_all(redis_client)
    redis_client.flushall()
    for _ in range(3):
        piped.answers.collect([1])
        assert piped.write() == []
        create_batch(redis_client, piped.spec)
        piped.answers.collect_all()
    step(redis_client, piped.record.id)
    step(redis_client, piped.record.id)
    answer_all(redis_client)
    piped.answers.collect_all()
    assert piped.write() == [("a", 200)]


def test_a_later_run_takes_up_lines_as_there_is_room(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = OpenPipe(redis_client, tmp_path)
    step(redis_client, first.record.id)
    first.take(*(chat_line(f"{number}", "x" * (number % 3)) for number in range(1, 9)))
    monkeypatch.setattr(outstanding, "MOST_LINES", 3)
    again = Outstanding(ordered=True)
    intake = LineIntake(Queue(redis_client), first.record.id, first.spec, again, durable=True)
    thread = threading.Thread(target=intake.resume, args=(_bitmap(2), _bitmap()))
    thread.start()
    taken: list[str] = []
    while len(taken) < 7:
        room = min(3, 7 - len(taken))
        left = 7 - len(taken) - room  # a line is counted after it was added
        wait_for_value(lambda: (len(again), intake.earlier), (room, left), 60, "lines of the run before")
        line, name = next(iter(again.unanswered().items()))
        again.answer(line, b"")
        again.note_written([line])
        taken.append(name)
    thread.join()
    assert taken == ["1", "3", "4", "5", "6", "7", "8"]


def test_each_duplicate_has_its_error_once_over_all_runs(redis_client: redis.Redis, tmp_path: Path) -> None:
    lines = [chat_line("a"), chat_line("a"), b"{broken", chat_line("a", "else"), chat_line("a")]
    first = OpenPipe(redis_client, tmp_path)
    step(redis_client, first.record.id)
    first.take(*lines[:1])
    for refused, errors in (
        ((), [("a", 400), (None, 400), ("a", 400), ("a", 400)]),
        (("2", "3"), [("a", 400), ("a", 400)]),
        (("2", "3", "4", "5"), []),
    ):
        again = OpenPipe(redis_client, tmp_path, written=(1,))
        answers = [f"stdin_{n}_{hashlib.blake2b(lines[int(n) - 1], digest_size=8).hexdigest()}" for n in refused]
        again.intake.resume(_bitmap(1), _bitmap(), answers)
        again.take(*lines)
        assert again.write() == errors
        assert (again.intake.read, again.intake.failed) == (5, 4)
        assert again.intake.answered == 5 - len(errors)


def test_lines_that_come_again_count_with_the_answers_that_they_have(redis_client: redis.Redis, tmp_path: Path) -> None:
    lines = [chat_line(f"{number}") for number in range(1, 5)]
    first = OpenPipe(redis_client, tmp_path)
    step(redis_client, first.record.id)
    first.take(*lines)
    again = OpenPipe(redis_client, tmp_path)
    again.intake.resume(_bitmap(1, 2, 3), _bitmap(2, 3))
    again.take(*lines[1:], lines[1])
    assert again.write() == [("2", 400)]
    assert (again.intake.read, again.intake.answered, again.intake.failed) == (4, 2, 3)


def _bitmap(*lines: int) -> Bitmap:
    found = Bitmap()
    for line in lines:
        found.add(line)
    return found


def test_answers_that_no_note_names_are_found(piped: OpenPipe, redis_client: redis.Redis) -> None:
    piped.take(chat_line("a"), chat_line("b"))
    answer_all(redis_client)
    assert piped.answers.collect([]) is None
    assert piped.write() == []
    piped.answers.collect_all()
    assert len(piped.write()) == 2
