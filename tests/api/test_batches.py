"""Batches over HTTP where things go wrong: a Redis that forgot them, limits of a key, callers who
are not theirs, late cancels.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis
from openai.types import Batch

from api.settings import ApiSettings
from jobs.batch import client as client_module
from jobs.batch import retry as retry_module
from jobs.batch import submit as submit_module
from jobs.batch.client import cancel_batch, get_batch
from jobs.batch.manifest import Manifest
from jobs.batch.rebuild import rebuild_all
from jobs.control import advance, finalize, runner
from jobs.control.ticker import Ticker
from jobs.protocol.states import STATES
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.store.api_keys import create_key
from tests.support.api_server import official_client, running_api
from tests.support.batch_steps import answer_all, run_to_end, step, tick
from tests.support.control_plane import chat_line, failing
from tests.support.store_batches import lines_of, serve, submit

ORDER = ("validating", "in_progress", "finalizing", "completed")


@pytest.fixture
def api_url(redis_url: str, tmp_path: Path) -> Iterator[str]:
    """An API on the store of `tests.support.store_batches`."""
    with running_api(ApiSettings(redis_url=redis_url, file_store=str(tmp_path / "store"))) as url:
        yield url


def create(client: openai.OpenAI, data: bytes, **asked: Any) -> Batch:
    wanted: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"} | asked
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, **wanted)


def delete(client: openai.OpenAI, batch_id: str) -> Any:
    return client.delete(f"/batches/{batch_id}", cast_to=object)


def test_states_and_counts_go_forward_through_the_loss_of_redis(
    redis_client: redis.Redis, client: openai.OpenAI, http: httpx.Client, tmp_path: Path
) -> None:
    serve(redis_client, "m")
    batch = create(client, lines_of(30))
    seen: list[Batch] = []

    def look() -> Batch:
        seen.append(client.batches.retrieve(batch.id))
        return seen[-1]

    def lose_all() -> None:
        redis_client.flushall()
        answer = http.get(f"/v1/batches/{batch.id}")
        assert (answer.status_code, answer.headers["retry-after"], answer.json()["error"]["code"]) == (
            503,
            "1",
            "queue_unavailable",
        )
        serve(redis_client, "m")
        rebuild_all(Queue(redis_client), str(tmp_path / "store"))
        look()

    look()
    lose_all()
    while get_batch(redis_client, batch.id).state != "finalizing":
        advance._progress.clear()
        step(redis_client, batch.id)
        look()
        answer_all(redis_client, failing(3, 17), most=7)
        look()
        if len(seen) in (7, 11, 15):
            lose_all()
    lose_all()
    run_to_end(redis_client, batch.id, failing(3, 17))
    look()
    lose_all()
    states = [ORDER.index(one.status) for one in seen]
    assert states == sorted(states)
    counts = [(one.request_counts.completed, one.request_counts.failed) for one in seen if one.request_counts]
    assert counts == sorted(counts)
    assert [failed for _, failed in counts] == sorted(failed for _, failed in counts)
    for name in ("in_progress_at", "finalizing_at", "output_file_id", "model"):
        values = [getattr(one, name) for one in seen]
        first = next(number for number, value in enumerate(values) if value is not None)
        assert set(values[first:]) == {values[-1]}, name
    assert (seen[-1].status, counts[-1]) == ("completed", (28, 2))


def test_a_new_batch_is_shown_as_it_was_made(
    redis_client: redis.Redis, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the control plane is faster than the answer."""
    serve(redis_client, "m")
    monkeypatch.setattr(runner, "_PATIENCE_SECONDS", 0.0)
    register = submit_module.register

    def late(queue: Queue, manifest: Manifest) -> Any:
        made = register(queue, manifest)
        step(redis_client, manifest.batch_id)
        return made

    monkeypatch.setattr(submit_module, "register", late)
    batch = create(client, lines_of(1))
    assert (batch.status, batch.in_progress_at) == ("validating", None)
    assert batch == client.batches.retrieve(batch.id)
    assert step(redis_client, batch.id).state == "in_progress"


def test_a_batch_whose_window_ends_is_in_progress_until_it_is_expired(
    redis_client: redis.Redis, client: openai.OpenAI, tmp_path: Path
) -> None:
    batch = submit(redis_client, tmp_path, lines_of(5)).id
    step(redis_client, batch)
    redis_client.hset("{q}:batch:" + batch, "expires_at", 1)
    tick(Ticker(Queue(redis_client)))
    seen = [client.batches.retrieve(batch)]
    assert get_batch(redis_client, batch).state == "finalizing"
    run_to_end(redis_client, batch)
    seen.append(client.batches.retrieve(batch))
    assert [(one.status, one.finalizing_at) for one in seen] == [("in_progress", None), ("expired", None)]


def test_members_that_are_no_parameters_are_counted_or_refused(
    redis_client: redis.Redis, redis_url: str, client: openai.OpenAI, tmp_path: Path
) -> None:
    serve(redis_client, "m")
    line = chat_line("a", max_token=5)
    counted = create(client, line)
    step(redis_client, counted.id)
    found = client.batches.retrieve(counted.id).to_dict()["unknown_members"]
    assert found == [{"name": "max_token", "lines": 1, "nearest": "max_tokens"}]
    settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path / "store"), strict_parameters=True)
    with running_api(settings) as url, official_client(url) as strict:
        refused = create(strict, line)
        step(redis_client, refused.id)
        errors = strict.batches.retrieve(refused.id).errors
    assert errors is not None
    assert [(error.code, error.line, error.param) for error in errors.data or []] == [
        ("unknown_parameter", 1, "body.max_token")
    ]


def test_a_batch_may_be_for_an_alias_of_its_endpoint(redis_client: redis.Redis, client: openai.OpenAI) -> None:
    serve(redis_client, "m")
    assert create(client, lines_of(1), endpoint="/v2/rerank").endpoint == "/v1/rerank"


def test_a_batch_has_the_priority_that_it_was_given(redis_client: redis.Redis, client: openai.OpenAI) -> None:
    serve(redis_client, "m")
    batch = create(client, lines_of(1), extra_body={"priority": -7})
    assert batch.to_dict()["priority"] == client.batches.retrieve(batch.id).to_dict()["priority"] == -7
    usual = create(client, lines_of(1), extra_body={"priority": 0}).to_dict()
    assert not {"priority", "risk"} & usual.keys()


def test_priority_risk_and_place_are_kept_or_found_again_in_an_empty_redis(
    redis_client: redis.Redis, client: openai.OpenAI, tmp_path: Path
) -> None:
    """The priority is on disk; the risk is judged anew."""
    queue = Queue(redis_client)
    first, other = (submit(redis_client, tmp_path, lines_of(20), priority=priority).id for priority in (-5, 0))
    for batch in (other, first):
        step(redis_client, batch)
    queue.note_risks({first: "late"})
    shown = client.batches.retrieve(first).to_dict()
    assert (shown["priority"], shown["risk"]) == (-5, "late")
    redis_client.flushall()
    serve(redis_client, "m")
    tick(Ticker(queue, str(tmp_path / "store")))
    for batch in (other, first):
        step(redis_client, batch)
    shown = client.batches.retrieve(first).to_dict()
    assert (shown["status"], shown["priority"], shown.get("risk")) == ("in_progress", -5, None)
    claims = queue.claim("w", 1, 30, models=["m"])
    assert [claim.key.batch for claim in claims] == [first] * 20 + [other] * 10


def test_a_limit_of_one_batch_is_told_in_the_singular(redis_client: redis.Redis, api_url: str, tmp_path: Path) -> None:
    serve(redis_client, "m")
    _, secret = create_key(str(tmp_path / "store"), tenant="a", open_batches=1)
    create(official_client(api_url, secret), lines_of(1))
    with pytest.raises(openai.RateLimitError, match="You have 1 batch that has not ended, as many as you may have"):
        create(official_client(api_url, secret), lines_of(1))


def test_limits_of_a_key_are_those_of_its_tenant(redis_client: redis.Redis, api_url: str, tmp_path: Path) -> None:
    serve(redis_client, "m")
    store = str(tmp_path / "store")
    first, second = (create_key(store, tenant="a", open_batches=2, queued_tokens=1500)[1] for _ in range(2))
    _, other = create_key(store, tenant="b")
    made = [create(official_client(api_url, key), lines_of(50)) for key in (first, second)]
    with pytest.raises(openai.RateLimitError, match="2 batches that have not ended") as caught:
        create(official_client(api_url, first), lines_of(1))
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    create(official_client(api_url, other), lines_of(500))
    for batch in made:
        step(redis_client, batch.id)
    found = [official_client(api_url, first).batches.retrieve(batch.id) for batch in made]
    assert [one.status for one in found] == ["in_progress", "failed"]
    assert found[1].errors is not None
    assert [error.code for error in found[1].errors.data or []] == ["token_limit_exceeded"]
    create(official_client(api_url, second), lines_of(1))  # in the place of the one that failed


def test_a_batch_of_another_tenant_is_unknown(redis_client: redis.Redis, api_url: str, tmp_path: Path) -> None:
    serve(redis_client, "m")
    store = str(tmp_path / "store")
    (_, mine), (_, theirs) = create_key(store, tenant="a"), create_key(store, tenant="b")
    batch = create(official_client(api_url, mine), lines_of(2))
    stranger = official_client(api_url, theirs)
    for emptied in (False, True):
        if emptied:
            redis_client.flushall()
        for call in (
            stranger.batches.retrieve,
            stranger.batches.cancel,
            partial(delete, stranger),
            partial(retry, stranger),
        ):
            with pytest.raises(openai.NotFoundError, match="No batch found"):
                call(batch.id)
    assert stranger.batches.list().data == []


def test_a_batch_of_the_command_line_is_not_shown(redis_client: redis.Redis, http: httpx.Client) -> None:
    Queue(redis_client).create_batch("batch_0123456789abcdef01234567", 1, state="in_progress")
    assert http.get("/v1/batches/batch_0123456789abcdef01234567").status_code == 404


@pytest.mark.parametrize("moment", ["before", "while"])
def test_a_cancel_that_meets_the_end(
    redis_client: redis.Redis,
    client: openai.OpenAI,
    tmp_path: Path,
    moment: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first to come wins, and no client gets two different answers."""
    batch = submit(redis_client, tmp_path, lines_of(5))
    while step(redis_client, batch.id).state != "finalizing":
        answer_all(redis_client)
    if moment == "before":
        assert client.batches.cancel(batch.id).status == "cancelling"
        run_to_end(redis_client, batch.id)
    else:
        real = finalize.publish_result_files

        def cancelled(*arguments: Any) -> None:
            real(*arguments)
            assert client.batches.cancel(batch.id).status == "cancelling"

        with monkeypatch.context() as patch:
            patch.setattr(finalize, "publish_result_files", cancelled)
            step(redis_client, batch.id)
        assert client.batches.retrieve(batch.id).status == "cancelling"
        run_to_end(redis_client, batch.id)
    ended = client.batches.cancel(batch.id)
    assert (ended.status, ended.completed_at, ended.error_file_id) == ("cancelled", None, None)
    assert ended.cancelled_at is not None
    assert ended.request_counts is not None
    assert (ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (5, 5, 0)
    assert len(client.files.content(ended.output_file_id or "").text.splitlines()) == 5


def test_many_cancels_at_once_are_all_answered(
    redis_client: redis.Redis, client: openai.OpenAI, tmp_path: Path
) -> None:
    batch = submit(redis_client, tmp_path, lines_of(20))
    step(redis_client, batch.id)
    states: list[str] = []
    threads = [threading.Thread(target=lambda: states.append(client.batches.cancel(batch.id).status)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states == ["cancelling"] * 8
    ended = run_to_end(redis_client, batch.id)
    assert (ended.state, ended.failed) == ("cancelled", 20)
    cancel_batch(redis_client, batch.id)


def test_a_batch_that_is_over_for_long_is_unknown(
    redis_client: redis.Redis, client: openai.OpenAI, tmp_path: Path
) -> None:
    """Its record in Redis goes by itself some moments before its folder does."""
    batch = run_to_end(redis_client, submit(redis_client, tmp_path, lines_of(1)).id)
    redis_client.delete("{q}:batch:" + batch.id)
    with pytest.raises(openai.InternalServerError):
        client.batches.retrieve(batch.id)
    manifest = Path(batch.spec.root, "manifest.json")
    ended = batch.timestamps["completed"]
    manifest.write_text(manifest.read_text().replace(repr(ended), repr(ended - 31 * 86400)))
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve(batch.id)
    assert client.batches.list().data == []


def test_a_deleted_batch_is_unknown_and_its_files_are_read_as_a_whole(
    redis_client: redis.Redis, client: openai.OpenAI, http: httpx.Client, tmp_path: Path
) -> None:
    batch, other = (run_to_end(redis_client, submit(redis_client, tmp_path, lines_of(3)).id).id for _ in range(2))
    output = client.batches.retrieve(batch).output_file_id or ""
    path = f"/v1/files/{output}/content"
    content = http.get(path).content
    assert http.get(f"{path}?offset=0").content == content
    assert delete(client, batch) == {"id": batch, "object": "batch", "deleted": True}
    for call in (client.batches.retrieve, client.batches.cancel, partial(delete, client)):
        with pytest.raises(openai.NotFoundError, match="No batch found"):
            call(batch)
    assert [one.id for one in client.batches.list()] == [other]
    assert http.get(path).content == content
    assert client.files.retrieve(output).bytes == len(content)
    refused = http.get(f"{path}?limit=1")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")
    assert "its batch was deleted" in refused.json()["error"]["message"]
    assert client.files.delete(output).deleted


def test_a_batch_that_has_not_ended_is_not_deleted(
    redis_client: redis.Redis, client: openai.OpenAI, http: httpx.Client
) -> None:
    serve(redis_client, "m")
    batch = create(client, lines_of(1)).id
    for state in ("validating", "in_progress", "cancelling"):
        answer = http.delete(f"/v1/batches/{batch}")
        assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
        why = f"Cannot delete a batch with status '{state}'; cancel it first, and wait until it has ended."
        assert answer.json()["error"]["message"] == why
        step(redis_client, batch) if state == "validating" else client.batches.cancel(batch)
    assert run_to_end(redis_client, batch).state == "cancelled"
    assert delete(client, batch)["deleted"]


def test_a_batch_that_an_emptied_redis_does_not_know_yet_is_deleted_later(
    redis_client: redis.Redis, client: openai.OpenAI, http: httpx.Client, tmp_path: Path
) -> None:
    batch = run_to_end(redis_client, submit(redis_client, tmp_path, lines_of(1)).id).id
    redis_client.flushall()
    answer = http.delete(f"/v1/batches/{batch}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_unavailable")
    rebuild_all(Queue(redis_client), str(tmp_path / "store"))
    assert delete(client, batch)["deleted"]
    assert rebuild_all(Queue(redis_client), str(tmp_path / "store")) == (0, [])
    assert http.get(f"/v1/batches/{batch}").status_code == 404


def test_many_deletions_at_once_remove_a_batch_once(
    redis_client: redis.Redis, http: httpx.Client, tmp_path: Path
) -> None:
    batch = run_to_end(redis_client, submit(redis_client, tmp_path, lines_of(1)).id).id
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: http.delete(f"/v1/batches/{batch}").status_code, range(8)))
    assert sorted(answers)[0] == 200
    assert set(answers) <= {200, 404}
    assert http.get(f"/v1/batches/{batch}").status_code == 404


def retry(client: openai.OpenAI, batch_id: str) -> Batch:
    return client.post(f"/batches/{batch_id}/retry", cast_to=Batch)


def test_a_retry_asks_for_what_the_batch_asked_for(
    redis_client: redis.Redis, api_url: str, client: openai.OpenAI, tmp_path: Path
) -> None:
    pairs = {f"k{number}": "v" for number in range(15)}
    expiry = {"output_expires_seconds": 7200, "priority": 5}
    first = run_to_end(
        redis_client, submit(redis_client, tmp_path, lines_of(3), metadata=pairs, **expiry).id, failing(2)
    )
    made = retry(client, first.id)
    assert (made.status, made.endpoint, made.completion_window) == ("validating", "/v1/chat/completions", "24h")
    assert made.metadata == {**pairs, "retry_of": first.id}
    assert client.files.content(made.input_file_id).content == lines_of(3).splitlines(keepends=True)[1]
    assert client.files.retrieve(made.input_file_id).purpose == "batch"
    spec = get_batch(redis_client, made.id).spec
    assert (spec.output_expires_seconds, spec.priority) == (7200, 5)
    again = run_to_end(redis_client, made.id, failing(1))
    twice = retry(client, again.id)
    assert twice.metadata == {**pairs, "retry_of": made.id}
    assert {one.id for one in client.batches.list()} == {first.id, made.id, twice.id}


def test_a_batch_with_as_many_pairs_as_may_be_is_retried_with_these(
    redis_client: redis.Redis, client: openai.OpenAI, tmp_path: Path
) -> None:
    pairs = {f"k{number}": "v" for number in range(16)}
    batch = run_to_end(redis_client, submit(redis_client, tmp_path, lines_of(2), metadata=pairs).id, failing(2))
    assert retry(client, batch.id).metadata == pairs


def test_retries_that_cannot_be_are_refused(redis_client: redis.Redis, http: httpx.Client, tmp_path: Path) -> None:
    batch = submit(redis_client, tmp_path, lines_of(2)).id
    path = f"/v1/batches/{batch}/retry"
    answer = http.post(path)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
    assert answer.json()["error"]["message"].startswith("Cannot retry a batch with status 'validating'; cancel it, or")
    run_to_end(redis_client, batch)
    answer = http.post(path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "batch_id")
    assert "there is nothing to retry" in answer.json()["error"]["message"]
    other = run_to_end(redis_client, submit(redis_client, tmp_path, lines_of(2)).id, failing(2))
    assert http.delete(f"/v1/files/{other.spec.input_file_id}").status_code == 200
    answer = http.post(f"/v1/batches/{other.id}/retry")
    assert answer.status_code == 400
    assert f"The input file {other.spec.input_file_id}" in answer.json()["error"]["message"]


def test_a_retry_keeps_to_the_limits_of_its_key(redis_client: redis.Redis, api_url: str, tmp_path: Path) -> None:
    serve(redis_client, "m")
    _, secret = create_key(str(tmp_path / "store"), tenant="a", open_batches=1)
    tenant = official_client(api_url, secret)
    ended = run_to_end(redis_client, create(tenant, lines_of(2)).id, failing(1, 2))
    create(tenant, lines_of(1))
    before = [file.id for file in tenant.files.list()]
    with pytest.raises(openai.RateLimitError, match="You have 1 batch that has not ended"):
        retry(tenant, ended.id)
    assert [file.id for file in tenant.files.list()] == before


def test_a_retry_of_more_tokens_than_may_be_queued_is_refused_at_once(
    redis_client: redis.Redis, api_url: str, tmp_path: Path
) -> None:
    serve(redis_client, "m")
    _, secret = create_key(str(tmp_path / "store"), tenant="a", queued_tokens=1500)
    tenant = official_client(api_url, secret)
    ended = run_to_end(redis_client, create(tenant, lines_of(50)).id, failing(*range(1, 51)))
    other = create(tenant, lines_of(50))
    step(redis_client, other.id)
    before = [file.id for file in tenant.files.list()]
    with pytest.raises(openai.RateLimitError, match="tokens in the lines to retry and") as caught:
        retry(tenant, ended.id)
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    assert [file.id for file in tenant.files.list()] == before
    assert os.listdir(tmp_path / "store" / "idempotency") == []
    run_to_end(redis_client, other.id)
    assert retry(tenant, ended.id).status == "validating"


def test_a_retry_whose_queue_goes_away_makes_one_batch_once_it_is_repeated(
    redis_client: redis.Redis,
    client: openai.OpenAI,
    http: httpx.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = run_to_end(redis_client, submit(redis_client, tmp_path, lines_of(2)).id, failing(2)).id
    register = submit_module.register

    def lose(queue: Queue, manifest: Manifest) -> Any:
        register(queue, manifest)
        raise QueueUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(submit_module, "register", lose)
        answer = http.post(f"/v1/batches/{batch}/retry")
    assert (answer.status_code, answer.headers.get("x-should-retry")) == (503, None)
    made = retry(client, batch).id
    assert [one.id for one in client.batches.list()] == [made, batch]


def test_many_retries_at_once_make_one_batch(
    redis_client: redis.Redis, client: openai.OpenAI, http: httpx.Client, tmp_path: Path
) -> None:
    batch = run_to_end(redis_client, submit(redis_client, tmp_path, lines_of(2)).id, failing(2)).id
    path = f"/v1/batches/{batch}/retry"
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: http.post(path), range(8)))
    assert {answer.status_code for answer in answers} <= {200, 409}
    [made] = {answer.json()["id"] for answer in answers if answer.status_code == 200}
    again = http.post(path)
    assert (again.json()["id"], again.headers["idempotent-replayed"]) == (made, "true")
    keyed = [http.post(path, headers={"idempotency-key": key}).json()["id"] for key in ("a", "a", "b")]
    assert len({made, *keyed}) == 3
    assert {one.id for one in client.batches.list()} == {batch, made, *keyed}
    assert len(list(client.files.list(purpose="batch"))) == 4


def test_retries_that_copy_for_long_hold_up_no_upload(
    redis_client: redis.Redis,
    client: openai.OpenAI,
    http: httpx.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = run_to_end(redis_client, submit(redis_client, tmp_path, lines_of(2)).id, failing(2)).id
    copying, disk, copy = threading.Semaphore(0), threading.Event(), retry_module._copy_lines

    def copy_slowly(*arguments: Any) -> None:
        copying.release()
        assert disk.wait(120)
        copy(*arguments)

    monkeypatch.setattr(retry_module, "_copy_lines", copy_slowly)
    with ThreadPoolExecutor(6) as threads:
        try:
            asking = [
                threads.submit(http.post, f"/v1/batches/{batch}/retry", headers={"idempotency-key": f"{number}"})
                for number in range(6)
            ]
            for _ in range(4):
                assert copying.acquire(timeout=60)
            upload = client.uploads.create(bytes=1, filename="a", mime_type="text/plain", purpose="vision")
            part = client.uploads.parts.create(upload.id, data=b"x")
            assert client.uploads.complete(upload.id, part_ids=[part.id], timeout=30).status == "completed"
        finally:
            disk.set()
        assert [answer.result().status_code for answer in asking] == [200] * 6


def test_a_retry_whose_batch_was_deleted_makes_another_with_a_key_only(
    redis_client: redis.Redis, client: openai.OpenAI, http: httpx.Client, tmp_path: Path
) -> None:
    batch = run_to_end(redis_client, submit(redis_client, tmp_path, lines_of(2)).id, failing(2)).id
    made = run_to_end(redis_client, retry(client, batch).id).id
    delete(client, made)
    answer = http.post(f"/v1/batches/{batch}/retry")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "batch_id")
    assert f"The batch {made} that a retry of {batch} made was deleted" in answer.json()["error"]["message"]
    assert http.post(f"/v1/batches/{batch}/retry", headers={"idempotency-key": "k"}).status_code == 200


def test_a_page_looks_at_so_many_batches_and_says_where_to_go_on(
    redis_client: redis.Redis,
    client: openai.OpenAI,
    http: httpx.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "MOST_LISTED", 4)
    monkeypatch.setattr(client_module, "_GROUP", 2)
    oldest = submit(redis_client, tmp_path, lines_of(1)).id
    ended = [run_to_end(redis_client, submit(redis_client, tmp_path, lines_of(1)).id).id for _ in range(9)]
    newest = submit(redis_client, tmp_path, lines_of(1)).id
    pages, after = [], ""
    while not pages or pages[-1]["has_more"]:
        pages.append(http.get(f"/v1/batches?status=validating&limit=1{after}").json())
        after = f"&after={pages[-1]['last_id']}"
    assert [[one["id"] for one in page["data"]] for page in pages] == [[newest], [oldest], []]
    assert [page["last_id"] for page in pages[:2]] == [ended[6], oldest]
    assert [one.id for one in client.batches.list(limit=1, extra_query={"status": "validating"})] == [newest, oldest]


def test_batches_are_listed_by_the_status_that_they_are_shown_with(
    redis_client: redis.Redis, client: openai.OpenAI, tmp_path: Path
) -> None:
    """As one that is made again in an empty Redis, or whose window has ended."""

    def listed() -> dict[str, list[str]]:
        found = {name: [one.id for one in client.batches.list(extra_query={"status": name})] for name in STATES}
        return {name: batches for name, batches in found.items() if batches}

    serve(redis_client, "m")
    rebuilt = create(client, lines_of(1)).id
    step(redis_client, rebuilt)
    redis_client.flushall()
    rebuild_all(Queue(redis_client), str(tmp_path / "store"))
    assert get_batch(redis_client, rebuilt).state == "validating"
    assert listed() == {"in_progress": [rebuilt]}
    serve(redis_client, "m")
    step(redis_client, rebuilt)
    redis_client.hset("{q}:batch:" + rebuilt, "expires_at", 1)
    tick(Ticker(Queue(redis_client)))
    assert get_batch(redis_client, rebuilt).state == "finalizing"
    assert listed() == {"in_progress": [rebuilt]}
    run_to_end(redis_client, rebuilt)
    assert listed() == {"expired": [rebuilt]}
