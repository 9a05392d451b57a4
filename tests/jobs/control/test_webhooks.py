"""Webhooks: each end of a batch of the API is sent at least once, whatever is killed or goes back
between, by deliveries that OpenAI's client accepts.
"""

import json
import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

import openai
import pytest
import redis

from api.settings import ApiSettings
from jobs.batch.client import cancel_batch
from jobs.batch.ending import begin_cancel
from jobs.batch.forgetting import delete_batch
from jobs.batch.webhook_notes import list_webhooks
from jobs.control import webhooks
from jobs.control.runner import Runner
from jobs.control.ticker import Ticker
from jobs.control.webhooks import DELAYS, Webhooks
from jobs.process import configure_logs
from jobs.protocol.ids import BATCH, new_id
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from jobs.queue.webhook_settings import secret_key
from jobs.store.storage import exists, remove_tree
from tests.support import http_calls
from tests.support.api_server import running_api
from tests.support.batch_steps import answer_all, run_to_end, step, tick, wait_for_batch
from tests.support.commands import run_pipeline
from tests.support.control_plane import ROOT, Answering, chat_line, control_plane
from tests.support.cut_off import ended_before_each_step
from tests.support.javascript import run_javascript
from tests.support.ports import reserved_port
from tests.support.rollback import EarlierRedis
from tests.support.store_batches import lines_of, store_of, submit
from tests.support.waiting import wait_for_value, wait_until
from tests.support.webhook_receiver import SECRET, WebhookReceiver, webhook_receiver

HUNG_LOOK_UP = """
import socket, threading
look_up = socket.getaddrinfo

def hang(host, *arguments, **options):
    if host not in ("hung.invalid", b"hung.invalid"):
        return look_up(host, *arguments, **options)
    print("looking up", flush=True)
    threading.Event().wait()

socket.getaddrinfo = hang
from jobs.control.ticker import main
main()
"""
"""A ticker whose resolver does not answer for one host."""


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with webhook_receiver() as running:
        yield running


@pytest.fixture(autouse=True)
def _configured(monkeypatch: pytest.MonkeyPatch, receiver: WebhookReceiver) -> None:
    monkeypatch.setenv("PIPELINE_WEBHOOK_URL", receiver.url)
    monkeypatch.setenv("PIPELINE_WEBHOOK_SECRET", SECRET)
    monkeypatch.setattr(webhooks, "_LOOK_SECONDS", 0.05)


@pytest.fixture
def ticker_logs() -> Iterator[None]:
    """The logs of this process are those of a ticker."""
    loggers = [logging.root, *map(logging.getLogger, ("httpx2", "httpcore2", "asyncio"))]
    handlers, levels = logging.root.handlers[:], [logger.level for logger in loggers]
    configure_logs("ticker")
    yield
    logging.root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@contextmanager
def delivering(
    client: redis.Redis, folder: PurePath, receiver: WebhookReceiver, delays: tuple[float, ...] = (0.0,) * 5
) -> Iterator[None]:
    """Webhooks in this process, for a store that is there."""
    stopping = threading.Event()
    sender = Webhooks(Queue(client), str(folder / "store"), receiver.url, secret_key(SECRET), delays)
    thread = threading.Thread(target=sender.run, args=(lambda: True, stopping))
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def wait_until_sent(folder: PurePath) -> None:
    wait_until(lambda: list_webhooks(str(folder / "store")) == [], 120, "no webhook to be due")


def events(receiver: WebhookReceiver) -> list[tuple[str, str, str]]:
    """The id, type and batch of each delivery, as OpenAI's client reads it."""
    client = openai.OpenAI(api_key="none", webhook_secret=SECRET)
    found = [client.webhooks.unwrap(body, headers) for headers, body in receiver.received]
    assert [headers["webhook-id"] for headers, _ in receiver.received] == [event.id for event in found]
    return [(event.id, event.type, event.data.id) for event in found]  # type: ignore[union-attr]


def complete(client: redis.Redis, folder: PurePath) -> str:
    return run_to_end(client, submit(client, folder, lines_of(2)).id).id


def fail(client: redis.Redis, folder: PurePath) -> str:
    return run_to_end(client, submit(client, folder, b"no line\n").id).id


def cancel(client: redis.Redis, folder: PurePath) -> str:
    batch = submit(client, folder, lines_of(2)).id
    cancel_batch(client, batch)
    return run_to_end(client, batch).id


def expire(client: redis.Redis, folder: PurePath) -> str:
    batch = submit(client, folder, lines_of(2), seconds=0.001).id
    tick(Ticker(Queue(client), str(folder / "store")))
    return run_to_end(client, batch).id


@pytest.mark.parametrize(
    ("end", "state"), [(complete, "completed"), (fail, "failed"), (cancel, "cancelled"), (expire, "expired")]
)
def test_each_end_is_sent_once(
    redis_client: redis.Redis,
    folder: PurePath,
    receiver: WebhookReceiver,
    end: Callable[[redis.Redis, PurePath], str],
    state: str,
) -> None:
    batch = end(redis_client, folder)
    with delivering(redis_client, folder, receiver):
        wait_until_sent(folder)
    [(event, kind, sent)] = events(receiver)
    assert (kind, sent) == (f"batch.{state}", batch)
    body = json.loads(receiver.received[0][1])
    assert body.keys() == {"id", "object", "created_at", "type", "data"}
    assert (body["object"], event[:4]) == ("event", "evt_")


def test_the_javascript_client_reads_the_same_events(
    redis_client: redis.Redis, tmp_path: Path, receiver: WebhookReceiver
) -> None:
    for end in (complete, fail, cancel, expire):
        end(redis_client, tmp_path)
    with delivering(redis_client, tmp_path, receiver):
        wait_until_sent(tmp_path)
    deliveries = [{"headers": headers, "body": body.decode()} for headers, body in receiver.received]
    assert len(deliveries) == 4
    found = {"secret": SECRET, "events": events(receiver), "deliveries": deliveries}
    run_javascript("webhooks.js", DELIVERIES=json.dumps(found))


def test_a_failed_delivery_is_repeated_under_the_same_id_and_counted(redis_url: str, tmp_path: Path) -> None:
    """All of it as processes: the control plane, the API, the official client."""
    store = str(tmp_path / "store")
    with webhook_receiver() as receiver:
        receiver.statuses = [500, 302, 302]  # the first attempt may come again after the kill
        variables = {"FILE_STORE": store, "PIPELINE_WEBHOOK_URL": receiver.url, "PIPELINE_WEBHOOK_SECRET": SECRET}
        with (
            control_plane(redis_url, ("--file-store", store), variables) as plane,
            running_api(ApiSettings(redis_url=redis_url, file_store=store)) as url,
            Answering(redis_url),
        ):
            client = openai.OpenAI(api_key="none", base_url=f"{url}/v1")
            file = client.files.create(file=("in.jsonl", chat_line("c1")), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            wait_for_batch(connect(redis_url), batch.id, 120)
            wait_until(lambda: len(receiver.received) == 1, 120, "the first attempt")
            plane.kill("ticker")
            plane.start("ticker")
            wait_until(lambda: len(receiver.received) >= 2, 120, "the second attempt")
            # A kill costs a count at most
            wait_until(
                lambda: re.search(
                    r'webhook_deliveries_total{result="failed"} [12]', http_calls.get(f"{url}/metrics").text
                ),
                120,
                "the count of the last one at least",
            )
        sent = events(receiver)
        assert set(sent) == {(sent[0][0], "batch.completed", batch.id)}
        assert list_webhooks(store) != []  # 302 is no success


@pytest.mark.parametrize(
    ("statuses", "attempts", "result"),
    [
        ([500, 302, 404, 200], 4, "delivered"),
        ([500, 410], 2, "abandoned"),
        ([503] * 9, 6, "abandoned"),
    ],
)
def test_attempts_end_with_a_success_a_410_or_the_last_delay(
    redis_client: redis.Redis,
    folder: PurePath,
    receiver: WebhookReceiver,
    ticker_logs: None,
    capsys: pytest.CaptureFixture[str],
    statuses: list[int],
    attempts: int,
    result: str,
) -> None:
    receiver.statuses = list(statuses)
    complete(redis_client, folder)
    with delivering(redis_client, folder, receiver):
        wait_until_sent(folder)
        counts = {"delivered": 0, "abandoned": 0, result: 1, "failed": attempts - 1}
        wait_for_value(Queue(redis_client).webhook_attempts, counts, 120, "the counts of all attempts")
    assert len(receiver.received) == attempts
    assert len(set(events(receiver))) == 1
    logs = capsys.readouterr().err
    assert not [secret for secret in ("pass-word", "to-ken", SECRET) if secret in logs]
    assert "status" in logs


def test_a_receiver_that_does_not_answer_is_tried_again(
    redis_client: redis.Redis, tmp_path: Path, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "TIMEOUT_SECONDS", 0.5)
    receiver.silent.set()
    complete(redis_client, tmp_path)
    with delivering(redis_client, tmp_path, receiver, (0.0,) * 500):
        wait_until(lambda: len(receiver.received) >= 2, 120, "a second attempt")
        receiver.silent.clear()
        wait_until_sent(tmp_path)
    assert len(set(events(receiver))) == 1


def test_a_note_that_cannot_be_read_delays_no_other(
    redis_client: redis.Redis, tmp_path: Path, receiver: WebhookReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    batch = complete(redis_client, tmp_path)
    damaged = tmp_path / "store" / "webhooks" / f"{new_id(BATCH, 1.0)}.completed"
    damaged.mkdir()
    with delivering(redis_client, tmp_path, receiver):
        wait_until(
            lambda: [note.name for note in list_webhooks(str(tmp_path / "store"))] == [damaged.name],
            120,
            "the delivery",
        )
    assert [each for _, _, each in events(receiver)] == [batch]
    assert "is paused: " in caplog.text


def test_a_client_that_cannot_be_made_is_made_again(
    redis_client: redis.Redis, tmp_path: Path, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = complete(redis_client, tmp_path)
    monkeypatch.setattr(webhooks, "_RESTART_SECONDS", 0.1)
    failed = threading.Event()
    with monkeypatch.context() as broken:
        broken.setenv("HTTP_PROXY", "bogus://nowhere")
        broken.setattr(webhooks.logger, "exception", lambda *_: failed.set())
        with delivering(redis_client, tmp_path, receiver):
            assert failed.wait(120)
            broken.delenv("HTTP_PROXY")
            wait_until_sent(tmp_path)
    assert [each for _, _, each in events(receiver)] == [batch]


def test_what_a_killed_ticker_left_half_written_is_removed(
    redis_client: redis.Redis, tmp_path: Path, receiver: WebhookReceiver
) -> None:
    complete(redis_client, tmp_path)
    folder = tmp_path / "store" / "webhooks"
    [note] = folder.iterdir()
    (folder / f".{note.name}.1.tmp").write_bytes(b"{")
    with delivering(redis_client, tmp_path, receiver):
        wait_until(lambda: list(folder.iterdir()) == [], 120, "an empty folder")
    assert len(receiver.received) == 1


def test_a_batch_ends_once_its_webhook_can_be_noted(
    redis_client: redis.Redis, tmp_path: Path, receiver: WebhookReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    batch = submit(redis_client, tmp_path, b"no line\n").id
    folder = tmp_path / "store" / "webhooks"
    folder.write_text("no folder")
    assert step(redis_client, batch).state == "validating"
    assert f"make {folder} a folder with room that this process can write to" in caplog.text
    folder.unlink()
    assert run_to_end(redis_client, batch).state == "failed"
    with delivering(redis_client, tmp_path, receiver):
        wait_until_sent(tmp_path)
    assert [each for _, _, each in events(receiver)] == [batch]


def test_a_ticker_ends_while_a_look_up_of_the_receiver_hangs(
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
    receiver: WebhookReceiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    complete(redis_client, tmp_path)
    monkeypatch.setenv("PIPELINE_WEBHOOK_URL", "http://hung.invalid/")
    arguments = ("--redis-url", redis_url, "--file-store", str(tmp_path / "store"))
    ticker = subprocess.Popen([sys.executable, "-c", HUNG_LOOK_UP, *arguments], cwd=ROOT, stdout=subprocess.PIPE)
    assert ticker.stdout is not None
    with ticker.stdout as said:
        try:
            assert said.readline() == b"looking up\n"
            ticker.send_signal(signal.SIGTERM)
            assert ticker.wait(120) == 0
        finally:
            ticker.kill()
            ticker.wait()
    assert len(list_webhooks(str(tmp_path / "store"))) == 1


def test_attempts_go_on_for_three_days_where_another_process_left_off(
    redis_client: redis.Redis, folder: PurePath, receiver: WebhookReceiver
) -> None:
    assert 3 * 86400 <= sum(DELAYS) < 4 * 86400
    receiver.statuses = [500]
    complete(redis_client, folder)
    with delivering(redis_client, folder, receiver, (86400.0,)):
        wait_until(lambda: Queue(redis_client).webhook_attempts()["failed"] == 1, 120, "the first attempt")
    other = complete(redis_client, folder)
    with delivering(redis_client, folder, receiver, (86400.0,)):
        wait_until(lambda: len(list_webhooks(str(folder / "store"))) == 1, 120, "the other's delivery")
    assert [batch for _, _, batch in events(receiver)][1:] == [other]


def test_nothing_is_sent_of_a_deleted_batch_nor_of_one_that_ended_before(
    redis_client: redis.Redis, folder: PurePath, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted = complete(redis_client, folder)
    delete_batch(Queue(redis_client), store_of(redis_client, folder), deleted)
    with monkeypatch.context() as without:
        without.delenv("PIPELINE_WEBHOOK_URL")
        complete(redis_client, folder)
    with delivering(redis_client, folder, receiver):
        wait_until_sent(folder)
        redis_client.flushall()
        tick(Ticker(Queue(redis_client), str(folder / "store")))
        assert len(Queue(redis_client).batches()) == 1
        sent = complete(redis_client, folder)
        wait_until_sent(folder)
    assert [batch for _, _, batch in events(receiver)] == [sent]


def test_the_end_of_a_batch_whose_folder_is_lost_is_sent(
    redis_client: redis.Redis, folder: PurePath, receiver: WebhookReceiver
) -> None:
    record = submit(redis_client, folder, lines_of(2))
    remove_tree(record.spec.root)
    assert not exists(record.spec.root)
    assert cancel_batch(redis_client, record.id).ended
    with delivering(redis_client, folder, receiver):
        wait_until_sent(folder)
    assert [sent[1:] for sent in events(receiver)] == [("batch.cancelled", record.id)]


@pytest.mark.parametrize(("was_cancelled", "state"), [(False, "completed"), (True, "cancelled")])
def test_an_end_that_redis_loses_is_sent_as_clients_see_it(
    redis_client: redis.Redis, folder: PurePath, receiver: WebhookReceiver, was_cancelled: bool, state: str
) -> None:
    """A cancel that Redis had before it got the end turns one into the other."""
    queue, batch = Queue(redis_client), submit(redis_client, folder, lines_of(2)).id
    while step(redis_client, batch).state != "finalizing":
        answer_all(redis_client)
    earlier = EarlierRedis(redis_client)
    run_to_end(redis_client, batch)
    earlier.restore()
    if was_cancelled:
        assert begin_cancel(queue, batch, queue.batch_fields(batch).generation)
    with delivering(redis_client, folder, receiver):
        assert run_to_end(redis_client, batch).state == state
        wait_until_sent(folder)
    assert [kind for _, kind, _ in events(receiver)] == [f"batch.{state}"]


def test_the_receiver_of_the_page_prints_the_event_once(redis_client: redis.Redis, tmp_path: Path) -> None:
    [text] = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/webhooks.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "webhook_secret").write_text(SECRET)
    batch = complete(redis_client, tmp_path)
    with reserved_port() as port, (tmp_path / "out").open("wb") as out:
        program = [sys.executable, "-uc", text.replace("8787", str(port))]
        with subprocess.Popen(program, cwd=tmp_path, stdout=out) as process:
            try:
                url = f"http://127.0.0.1:{port}"
                with delivering(redis_client, tmp_path, WebhookReceiver(url), (1.0,) * 200):
                    wait_until_sent(tmp_path)
                assert http_calls.post(url, content=b"{}").status_code == 400
            finally:
                process.kill()
    assert (tmp_path / "out").read_text() == f"batch.completed {batch}\n"


@pytest.mark.proof
def test_a_kill_at_any_step_of_the_end_loses_no_event(
    redis_client: redis.Redis, redis_url: str, folder: PurePath, receiver: WebhookReceiver
) -> None:
    made: list[str] = []

    def begin() -> None:
        made.append(submit(redis_client, folder, lines_of(1)).id)
        while step(redis_client, made[-1]).state != "finalizing":
            answer_all(redis_client)

    begin()
    with delivering(redis_client, folder, receiver):
        for _ in ended_before_each_step(
            redis_client, redis_url, str(folder), lambda client: Runner(Queue(client)).run(made[-1])
        ):
            run_to_end(redis_client, made[-1])
            begin()
        wait_until_sent(folder)
    assert len(made) > 5
    assert {(kind, batch) for _, kind, batch in events(receiver)} == {("batch.completed", batch) for batch in made[:-1]}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            ("--webhook-url", "example.com/pass-word"),
            "a webhook URL is an http:// or https:// URL such as https://example.com/webhooks",
        ),
        (
            ("--webhook-url", "http://u:pass-word@h"),
            "PIPELINE_WEBHOOK_URL needs a secret: set PIPELINE_WEBHOOK_SECRET_FILE",
        ),
    ],
)
def test_the_command_refuses_to_start(redis_url: str, tmp_path: Path, flags: tuple[str, str], problem: str) -> None:
    done = run_pipeline("jobs", "--file-store", tmp_path / "store", *flags, redis_url=redis_url)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr
    assert "pass-word" not in done.stderr


@pytest.mark.parametrize("url", ["ftp://example.com", "example.com", "http://", "http://a:99999", "http://a b"])
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="PIPELINE_WEBHOOK_URL: a webhook URL is an http"):
        QueueSettings(webhook_url=url)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_c2hvcnQ=", f"whsec_{'?' * 40}", SECRET[6:], "whsec_ü"])
def test_a_secret_that_cannot_be_used_is_refused(tmp_path: Path, secret: str) -> None:
    file = tmp_path / "secret"
    file.write_text(secret)
    settings = QueueSettings(webhook_url="https://example.com", webhook_secret_file=str(file))
    with pytest.raises(ValueError, match="a webhook secret is whsec_ and the base64 of 24 to 64 bytes"):
        settings.webhook_key()
    file.write_text(f"{SECRET}\n")
    assert settings.webhook_key() == b"secret" * 4
    file.unlink()
    with pytest.raises(ValueError, match="cannot be used: No such file"):
        settings.webhook_key()
    with pytest.raises(ValueError, match="PIPELINE_WEBHOOK_URL needs a secret"):
        QueueSettings(webhook_url="https://example.com").webhook_key()
