"""Batches that are cancelled and batches that expire: what was finished stays, the rest gets its
line, and all adds up.
"""

from collections.abc import Callable

import openai
import pytest
from openai.types import Batch

from tests.contract.calls import lines, results, said, submit, wait
from tests.contract.conftest import SHORT_WINDOW
from tests.contract.shapes import Recorder
from tests.support.batch_stack import AWAY, BatchStack
from tests.support.control_plane import chat_line
from tests.support.waiting import wait_until

HALF = (
    chat_line("done", "yes")
    + chat_line("open", "no", AWAY)
    + chat_line("bad", "fail 400")
    + chat_line("open too", "no", AWAY)
)


@pytest.fixture
def half_done(client: openai.OpenAI) -> Callable[..., Batch]:
    """Makes a batch whose first and third lines have ended, while the others wait for a worker."""

    def make() -> Batch:
        batch = submit(client, HALF)

        def answered() -> Batch | None:
            found = client.batches.retrieve(batch.id)
            assert found.request_counts is not None
            return found if (found.request_counts.completed, found.request_counts.failed) == (1, 1) else None

        return wait_until(answered, 60, "two lines to end")

    return make


def test_a_cancelled_batch_keeps_what_was_finished(
    client: openai.OpenAI, recorder: Recorder, half_done: Callable[..., Batch]
) -> None:
    batch = client.batches.cancel(half_done().id)
    assert batch.status in ("cancelling", "cancelled")
    assert batch.cancelling_at is not None
    batch = wait(client, batch.id)
    assert batch.status == "cancelled"
    assert recorder.states[batch.id][-1] == "cancelled"
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 3)
    check_rest(client, batch, "batch_cancelled", {"done", "bad"})


def test_cancelling_again_changes_nothing(client: openai.OpenAI, half_done: Callable[..., Batch]) -> None:
    batch = half_done()
    client.batches.cancel(batch.id)
    client.batches.cancel(batch.id)
    ended = wait(client, batch.id)
    assert client.batches.cancel(batch.id) == ended
    assert client.batches.retrieve(batch.id) == ended


def test_a_batch_is_cancelled_before_it_has_begun(client: openai.OpenAI) -> None:
    batch = submit(client, lines("one", "two", model=AWAY))
    client.batches.cancel(batch.id)
    batch = wait(client, batch.id)
    assert (batch.status, batch.output_file_id) == ("cancelled", None)


@pytest.mark.parametrize("content", [lines("one"), lines("one") + b"{\n"], ids=["completed", "failed"])
def test_what_has_ended_cannot_be_cancelled(client: openai.OpenAI, content: bytes) -> None:
    batch = wait(client, submit(client, content).id)
    with pytest.raises(openai.ConflictError) as caught:
        client.batches.cancel(batch.id)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert (caught.value.type, caught.value.code) == ("invalid_request_error", None)
    assert client.batches.retrieve(batch.id) == batch


def test_a_retrying_client_asks_only_once(stack: BatchStack, client: openai.OpenAI, recorder: Recorder) -> None:
    batch = wait(client, submit(client, lines("one")).id)
    before = recorder.checked
    with pytest.raises(openai.ConflictError):
        client.with_options(max_retries=2).batches.cancel(batch.id)
    assert recorder.checked == before + 1


def test_a_window_that_ends_leaves_a_line_for_the_rest(client: openai.OpenAI) -> None:
    batch = submit(client, HALF, completion_window=SHORT_WINDOW)
    assert (batch.completion_window, batch.expires_at) == (SHORT_WINDOW, batch.created_at + 4)
    batch = wait(client, batch.id)
    assert batch.status == "expired"
    assert batch.expired_at is not None
    assert batch.expired_at >= batch.created_at + 4
    assert batch.request_counts is not None
    # A busy machine may not even read the file in that time
    if batch.request_counts.total:
        check_rest(client, batch, "batch_expired", set())
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def check_rest(client: openai.OpenAI, batch: Batch, code: str, ran: set[str]) -> None:
    """Each of the four lines is in one file, those that `ran` with their end, those without a
    worker with the code.
    """
    assert batch.request_counts is not None
    done = results(client, batch.output_file_id) if batch.output_file_id else []
    failed = {line["custom_id"]: line for line in results(client, batch.error_file_id)}
    assert [(line["custom_id"], said(line)) for line in done] == [("done", "yes")] * len(done)
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        4,
        len(done),
        len(failed),
    )
    assert {*failed, *(line["custom_id"] for line in done)} == {"done", "open", "bad", "open too"}
    if "bad" in ran or failed["bad"]["response"]:
        assert failed.pop("bad")["response"]["status_code"] == 400
    assert ran.isdisjoint(failed)
    for line in failed.values():
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert line["response"] is None
        assert line["error"]["code"] == code
        assert line["error"]["message"]
        assert line["id"].startswith("batch_req_")
