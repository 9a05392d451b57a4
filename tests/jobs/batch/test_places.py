"""A batch runs in a bucket as it does in a folder."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any

import pytest
import redis

from jobs.batch import log_segments, manifest, recovery
from jobs.batch import register as register_module
from jobs.batch.client import get_batch
from jobs.batch.line_index import INDEX_NAME
from jobs.batch.manifest import MADE, Manifest, Superseded, save_manifest
from jobs.batch.plan import PLAN_NAME
from jobs.batch.rebuild import rebuild, rebuild_all, unknown_folders
from jobs.batch.submit import BatchSubmission, submit_batch, submitted_batch
from jobs.control import advance, finalize, slices, validate
from jobs.control.ticker import Ticker
from jobs.protocol.chat import CHAT
from jobs.protocol.ids import BATCH, new_id
from jobs.protocol.requests import Claim, RequestKey
from jobs.protocol.results import Result
from jobs.protocol.states import END_STATES
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from jobs.store import object_storage
from jobs.store.storage import StoreError, join, list_names, path_of
from tests.support.batch_steps import answer_all, run_to_end, step, tick
from tests.support.control_plane import failing
from tests.support.cut_off import cut_off_before_each_step, end_leases, held_up_before_each_step, process
from tests.support.integrity import faults
from tests.support.object_stores import CLOUDS, PLACES, bucket, files_below, store_location
from tests.support.redis_server import running_server
from tests.support.rollback import EarlierRedis
from tests.support.store_batches import (
    check_every_line_once,
    custom_ids,
    lines_of,
    log_of,
    manifest_of,
    put,
    serve,
    store_of,
    submit,
    under_way,
)


@pytest.fixture(params=[*PLACES, *CLOUDS])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where a file store will be: a folder, and a bucket of each kind."""
    with store_location(request.param, tmp_path) as found:
        yield found


def empty_and_rebuild(client: redis.Redis, folder: PurePath) -> None:
    """Redis loses all, and knows the one batch of the store again."""
    client.flushall()
    serve(client, "m")
    assert rebuild_all(Queue(client), str(folder / "store")) == (1, [])


def test_a_batch_runs_to_its_end(redis_client: redis.Redis, folder: PurePath) -> None:
    record = run_to_end(redis_client, submit(redis_client, folder, lines_of(20)).id, failing(3))
    check_every_line_once(redis_client, folder, record, 20)


def test_a_process_that_was_thought_dead_changes_nothing(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket() as remote:
        folder = path_of(remote.uri)
        record = under_way(redis_client, folder)
        stopped = manifest_of(record)
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "PROCESS", "another")
            assert step(redis_client, record.id).state == "in_progress"
        with pytest.raises(Superseded):
            save_manifest(stopped)
        answer_all(redis_client, failing(3))
        ended = run_to_end(redis_client, record.id, failing(3))
        with pytest.raises(Superseded):
            save_manifest(stopped)
        check_every_line_once(redis_client, folder, ended, 20)


def test_a_process_that_was_thought_dead_as_it_took_up_a_batch_undoes_no_line(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which finished under another process meanwhile."""
    with bucket() as remote:
        folder = path_of(remote.uri)
        record = under_way(redis_client, folder)
        empty_and_rebuild(redis_client, folder)
        save_stored = recovery.save_stored

        def others_first(*arguments: Any) -> None:
            monkeypatch.setattr(recovery, "save_stored", save_stored)
            redis_client.delete(keys.hold(record.spec.root))
            with monkeypatch.context() as patch:
                patch.setattr(manifest, "PROCESS", "another")
                assert step(redis_client, record.id).state == "in_progress"
                answer_all(redis_client, failing(3), most=7)
            save_stored(*arguments)

        monkeypatch.setattr(recovery, "save_stored", others_first)
        assert step(redis_client, record.id).problem is None
        assert recovery.save_stored is save_stored
        assert faults(redis_client) == []
        ended = run_to_end(redis_client, record.id, failing(3))
        check_every_line_once(redis_client, folder, ended, 20)


def test_an_emptied_redis_is_rebuilt(redis_client: redis.Redis, folder: PurePath) -> None:
    record = under_way(redis_client, folder)
    seen = log_of(record)
    assert len(custom_ids(seen)) > 0
    empty_and_rebuild(redis_client, folder)
    ended = run_to_end(redis_client, record.id, failing(3))
    assert log_of(ended).startswith(seen)
    check_every_line_once(redis_client, folder, ended, 20)


@pytest.mark.parametrize(("fault", "reason"), [("read_only", "AccessDenied"), ("denied", "AccessDenied")])
def test_a_batch_shows_why_its_bucket_holds_it_up(redis_client: redis.Redis, fault: str, reason: str) -> None:
    with bucket() as remote:
        folder = path_of(remote.uri)
        record = under_way(redis_client, folder)
        answer_all(redis_client, failing(3))
        setattr(remote.server, fault, True)
        assert reason in (step(redis_client, record.id).problem or "")
        setattr(remote.server, fault, False)
        ended = run_to_end(redis_client, record.id, failing(3))
        check_every_line_once(redis_client, folder, ended, 20)


def test_a_batch_goes_on_once_its_bucket_answers(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket() as remote:
        folder = path_of(remote.uri)
        record = under_way(redis_client, folder)
        answer_all(redis_client, failing(3))
        remote.server.held = "PUT "
        with monkeypatch.context() as patch:
            patch.setattr(object_storage, "_REQUEST", timedelta(seconds=1))
            object_storage._bucket.cache_clear()
            assert "or did not answer in time" in (step(redis_client, record.id).problem or "")
        object_storage._bucket.cache_clear()
        remote.server.held = ""
        remote.server.released.set()
        ended = run_to_end(redis_client, record.id, failing(3))
        check_every_line_once(redis_client, folder, ended, 20)


def test_what_an_ended_batch_needs_no_more_is_removed_once_its_bucket_answers(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was killed as it ended the batch has left that to the ticker."""
    with bucket() as remote:
        folder, queue = path_of(remote.uri), Queue(redis_client)
        record = under_way(redis_client, folder)
        with monkeypatch.context() as patch:
            patch.setattr(slices, "clean_up", lambda *_: None)
            run_to_end(redis_client, record.id, failing(3))
        leader, parts = Ticker(queue, str(folder / "store")), join(record.spec.root, "parts")
        remote.server.denied = True
        tick(leader)
        remote.server.denied = False
        assert list_names(parts) != []
        tick(leader)
        assert list_names(parts) == []
        assert queue.active_batches() == {}


def test_what_a_validation_made_that_was_begun_again_is_removed_at_the_end(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_away(_: Manifest) -> str:
        raise StoreError("it cannot be reached")

    with bucket() as remote:
        folder = path_of(remote.uri)
        record = submit(redis_client, folder, lines_of(20))
        with monkeypatch.context() as patch:
            patch.setattr(validate, "source_stamp", is_away)
            assert "cannot be reached" in (step(redis_client, record.id).problem or "")
        assert sum(name.endswith(PLAN_NAME) for name in files_below(record.spec.root)) == 1
        ended = run_to_end(redis_client, record.id, failing(3))
        made = manifest_of(ended).made
        found = [name for name in files_below(record.spec.root) if name.startswith(MADE)]
        assert found == [join(made, INDEX_NAME)]
        check_every_line_once(redis_client, folder, ended, 20)


def test_a_fleet_with_another_redis_takes_a_batch_over(redis_client: redis.Redis, folder: PurePath) -> None:
    """The first one leaves it alone from then on."""
    record = under_way(redis_client, folder)
    with running_server() as server, redis.Redis.from_url(server.url) as other:
        serve(other, "m")
        assert rebuild_all(Queue(other), str(folder / "store")) == (1, [])
        assert step(redis_client, record.id).state == "in_progress"
        answer_all(redis_client, failing(3))
        ended = run_to_end(other, record.id, failing(3))
        assert step(redis_client, record.id).state == "in_progress"
        check_every_line_once(other, folder, ended, 20)


def test_a_batch_that_was_rebuilt_meanwhile_has_no_problem(
    redis_client: redis.Redis, folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its record and its folder a slice finds another owner, of this Redis."""
    record, held_folder = under_way(redis_client, folder), slices.held_folder

    def rebuild_first(queue: Queue, root: str, patience: float) -> AbstractContextManager[None]:
        empty_and_rebuild(redis_client, folder)
        return held_folder(queue, root, patience)

    with monkeypatch.context() as patch:
        patch.setattr(slices, "held_folder", rebuild_first)
        assert step(redis_client, record.id).problem is None
    ended = run_to_end(redis_client, record.id, failing(3))
    check_every_line_once(redis_client, folder, ended, 20)


def test_a_manifest_is_made_once(redis_client: redis.Redis) -> None:
    with bucket() as remote:
        found = manifest_of(submit(redis_client, path_of(remote.uri), lines_of(1)))
        found.__dict__.clear()  # as one that is new
        with pytest.raises(Superseded):
            save_manifest(found)


def test_a_batch_whose_maker_was_thought_dead_is_not_made(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call is repeated while the first is at work, and finds nothing of it."""
    with bucket() as remote:
        folder = path_of(remote.uri)
        files = store_of(redis_client, folder)
        serve(redis_client, "m")
        file_id = put(files, lines_of(3))
        batch, save = new_id(BATCH, time.time()), register_module.save_manifest

        def judge_first(made: manifest.Manifest) -> None:
            assert submitted_batch(Queue(redis_client), files, "", batch) is None
            save(made)

        monkeypatch.setattr(register_module, "save_manifest", judge_first)
        new = BatchSubmission(input_file_id=file_id, endpoint=CHAT, completion_window="24h", seconds=86400.0)
        with pytest.raises(StoreError, match="given up"):
            submit_batch(Queue(redis_client), files, new, batch)
        assert Queue(redis_client).batches() == []
        assert unknown_folders(Queue(redis_client), str(files.root)) == []


@pytest.mark.proof
@pytest.mark.parametrize("emptied", [False, True])
def test_a_process_that_ends_before_any_step_loses_and_doubles_no_line(
    redis_client: redis.Redis, emptied: bool
) -> None:
    with bucket() as remote:
        folder = path_of(remote.uri)
        made: dict[int, str] = {}

        def answered(number: int) -> str:
            record = submit(redis_client, folder, lines_of(20))
            step(redis_client, record.id)
            step(redis_client, record.id)
            answer_all(redis_client, failing(3))
            made[number] = record.id
            return record.id

        def run(number: int) -> None:
            while step(redis_client, made[number]).state not in END_STATES:
                pass

        answered(1)
        for number in cut_off_before_each_step(redis_client, run):
            if emptied:
                redis_client.flushall()
                serve(redis_client, "m")
                rebuild_all(Queue(redis_client), str(folder / "store"))
            tick(Ticker(Queue(redis_client)))
            record = get_batch(redis_client, made[number])
            if record.state not in END_STATES:
                record = run_to_end(redis_client, record.id, failing(3))
            check_every_line_once(redis_client, folder, record, 20)
            answered(number + 1)
        assert number > 20


def test_a_process_that_was_stopped_removes_no_part_of_the_one_that_went_on(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one is stopped before it removes what it finds unlisted."""
    with bucket() as remote:
        record = under_way(redis_client, path_of(remote.uri), done=0)
        answer_all(redis_client, failing(3), most=8)
        step(redis_client, record.id)
        answer_all(redis_client, failing(3), most=7)
        remove = advance.drop_unlisted

        def stopped_before(*arguments: Any) -> int:
            monkeypatch.setattr(advance, "drop_unlisted", remove)
            end_leases(redis_client)
            with process("another"):
                step(redis_client, record.id)
            return remove(*arguments)

        monkeypatch.setattr(advance, "drop_unlisted", stopped_before)
        with process("stopped"), contextlib.suppress(Superseded):
            step(redis_client, record.id)
        assert len(manifest_of(record).parts) == 2
        assert {part.name for part in manifest_of(record).parts} <= set(list_names(join(record.spec.root, "parts")))
        end_leases(redis_client)
        check_every_line_once(redis_client, path_of(remote.uri), run_to_end(redis_client, record.id, failing(3)), 20)


def test_a_process_that_was_stopped_removes_no_log_of_the_one_that_ended_the_batch(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one is stopped before it makes its output the log, of lines that were drained at once."""
    with bucket() as remote:
        folder = path_of(remote.uri)
        record = under_way(redis_client, folder, done=0)
        answer_all(redis_client, failing(3))
        assert step(redis_client, record.id).state == "finalizing"
        assert manifest_of(record).logged_lines == 0
        log_output = finalize.log_output

        def stopped_before(*arguments: Any) -> None:
            monkeypatch.setattr(finalize, "log_output", log_output)
            end_leases(redis_client)
            with process("another"):
                assert step(redis_client, record.id).state == "completed"
            log_output(*arguments)

        monkeypatch.setattr(finalize, "log_output", stopped_before)
        with process("stopped"):
            step(redis_client, record.id)
        ended, log = get_batch(redis_client, record.id), join(record.spec.root, log_segments.FOLDER)
        with process("reader"):
            check_every_line_once(redis_client, folder, ended, 20)
        assert len(list_names(log)) == 2, "the other is of the one that was stopped"
        store_of(redis_client, folder).delete("", str(ended.output_file_id))
        assert list_names(log) == []


class CountedRuns:
    """Gives the answers of another function, and knows how often each request was run."""

    def __init__(self, answer: Callable[[Claim], Result]) -> None:
        self._answer = answer
        self._runs: Counter[RequestKey] = Counter()

    def __call__(self, claim: Claim) -> Result:
        self._runs[claim.key] += 1
        return self._answer(claim)

    @property
    def is_once_each(self) -> bool:
        return set(self._runs.values()) == {1}


@pytest.mark.proof
@pytest.mark.parametrize(("lost", "first"), [("nothing", 8), ("some", 8), ("all", 8), ("nothing", 0)])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_process_that_is_stopped_before_any_step_while_another_goes_on_loses_and_doubles_no_line(
    redis_client: redis.Redis, lost: str, first: int, steps: int
) -> None:
    """Also where Redis has lost something before, and where all lines are drained at once: after
    no `first` ones.
    """
    with bucket() as remote:
        folder = path_of(remote.uri)
        made: dict[int, str] = {}
        answer = CountedRuns(failing(3))

        def begin(number: int) -> None:
            record = under_way(redis_client, folder, done=0)
            made[number] = record.id
            earlier = EarlierRedis(redis_client)
            answer_all(redis_client, answer, most=first)
            step(redis_client, record.id)
            if lost == "some":
                earlier.restore()
            if lost == "all":
                redis_client.flushall()
                serve(redis_client, "m")
                assert rebuild(Queue(redis_client), record.spec.root)
            else:
                answer_all(redis_client, answer)

        def run(number: int) -> None:
            for _ in range(3):
                step(redis_client, made[number])

        def go_on(number: int) -> None:
            for _ in range(steps):
                step(redis_client, made[number])
            answer_all(redis_client, answer, most=7)

        begin(1)
        for number in held_up_before_each_step(redis_client, run, go_on):
            assert faults(redis_client) == []
            record = get_batch(redis_client, made[number])
            if record.state not in END_STATES:
                record = run_to_end(redis_client, record.id, answer)
            check_every_line_once(redis_client, folder, record, 20)
            assert lost != "nothing" or answer.is_once_each
            begin(number + 1)
        assert number > 20
