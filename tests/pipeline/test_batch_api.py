"""The Batch API end to end: the official client, HTTP, `pipeline serve` and the demo model, whose
right answers are known.
"""

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from openai.types import Batch

from jobs.protocol.states import END_STATES
from jobs.queue import keys
from jobs.queue.connection import connect
from tests.pipeline.results import answers, check_answers, examples
from tests.support import http_calls
from tests.support.commands import RunningCommand, running_pipeline
from tests.support.event_reader import Event, EventReader, batch_texts
from tests.support.poison import Poison, held, poisoned_environment
from tests.support.ports import reserved_port
from tests.support.processes import command_line, cpu_seconds, descendants, send_all, wait_for_rest
from tests.support.redis_server import running_server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof

CHAT = "/v1/chat/completions"
SHORT_WINDOW = "12s"
HOLD = Poison("long", "hold", start=100)


class Served(NamedTuple):
    """A running `pipeline serve` whose model is ready.

    While the file `hold` is there long answers come to no end, see `HOLD`.
    """

    command: RunningCommand
    url: str
    redis_url: str
    hold: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store, hold = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("hold") / "file"
    flags = [
        "--file-store",
        store,
        "--completion-window",
        "24h",
        "--completion-window",
        SHORT_WINDOW,
        "--step-timeout",
        200,
    ]
    environment = poisoned_environment(HOLD, hold=hold)
    with (
        running_server() as server,
        running_pipeline("serve", "--port", 0, *flags, redis_url=server.url, **environment) as command,
    ):
        found = re.search(r"listening on (http://\S+)", command.wait_for("listening on"))
        assert found is not None
        wait_until(lambda: http_calls.get(f"{found[1]}/health").json().get("models"), 120, "the model to be served")
        yield Served(command, found[1], server.url, hold)


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def submit(client: openai.OpenAI, source: Path, window: Any = "24h") -> Batch:
    file = client.files.create(file=source, purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window=window)


def wait(client: openai.OpenAI, batch: Batch, timeout: float = 150) -> Batch:
    """The batch at its end; its states and counts only ever went forward."""
    counts = [0, 0]

    def ended() -> Batch | None:
        found = client.batches.retrieve(batch.id)
        assert found.request_counts is not None
        now = [found.request_counts.completed, found.request_counts.failed]
        assert all(after >= before for before, after in zip(counts, now, strict=True))
        counts[:] = now
        return found if found.status in END_STATES else None

    return wait_until(ended, timeout, "the batch to end") or batch


def rows(client: openai.OpenAI, file_id: str | None, **query: object) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id, extra_query=query).content.splitlines()]


def line(custom_id: str, max_tokens: int, **more: Any) -> str:
    """A question that is answered with exactly so many tokens."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": f"Count {custom_id}"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body | more}) + "\n"


def lines(path: Path, short: int, long: int, tokens: int = 1900) -> Path:
    path.write_text(
        "".join([line(f"short-{n}", 4) for n in range(short)] + [line(f"long-{n}", tokens) for n in range(long)])
    )
    return path


def test_questions_are_answered_and_their_tokens_followed_through_a_cut(
    served: Served, client: openai.OpenAI, tmp_path: Path
) -> None:
    source = examples(tmp_path / "in.jsonl", 300)
    with ExitStack() as reading:
        with standing_still(served.command):
            batch = submit(client, source)
            path = f"{served.url}/v1/batches/{batch.id}/stream"
            reader = reading.enter_context(EventReader(path))
            wait_until(lambda: is_watched(served.redis_url, batch), 60, "its tokens to be watched")
        seen = reader.wait_for_id(301, 150)
    with EventReader(path, seen[-1].id) as rest:
        batch = wait(client, batch)
        *more, end, done = rest.wait_ended()
    assert (batch.status, batch.model, batch.error_file_id) == ("completed", "demo", None)
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (300, 300, 0)
    (tmp_path / "out.jsonl").write_bytes(client.files.content(batch.output_file_id or "").content)
    check_answers(source, tmp_path / "out.jsonl")
    assert batch.usage is not None
    assert batch.usage.total_tokens == sum(
        row["response"]["body"]["usage"]["total_tokens"] for row in rows(client, batch.output_file_id)
    )
    assert batch_texts([*seen, *more]) == answers()
    assert (Batch.model_validate(end.value), done.value) == (batch, None)


@contextmanager
def standing_still(command: RunningCommand) -> Iterator[None]:
    """Stop the computation meanwhile, so that a reader that begins now gets all tokens."""
    cores = [pid for pid in descendants(command.process.pid) if "core_process" in command_line(pid)]
    send_all(cores, signal.SIGSTOP)
    try:
        yield
    finally:
        send_all(cores, signal.SIGCONT)


def is_watched(redis_url: str, batch: Batch) -> bool:
    with connect(redis_url) as client:
        return client.zscore(keys.WATCHED, batch.id) is not None


def test_results_can_be_read_while_the_batch_runs(served: Served, client: openai.OpenAI, tmp_path: Path) -> None:
    with held(served.hold):
        batch = submit(client, lines(tmp_path / "in.jsonl", short=5, long=12, tokens=1000))
        output = wait_until(lambda: client.batches.retrieve(batch.id).output_file_id, 60, "the first results")
        first = client.files.with_raw_response.content(output, extra_query={"offset": 0})
    position = int(first.headers["x-last-line"])
    early = first.content.splitlines()
    assert (first.headers["x-incomplete"], len(early)) == ("true", position)
    assert 0 < position <= 5
    batch = wait(client, batch)
    assert (batch.status, batch.output_file_id) == ("completed", output)
    log = client.files.with_raw_response.content(output, extra_query={"offset": 0})
    assert (log.headers["x-incomplete"], log.headers["x-last-line"]) == ("false", "17")
    assert log.content.splitlines()[:position] == early
    later = rows(client, output, offset=position)
    whole = rows(client, output)
    assert sorted([*map(json.loads, early), *later], key=lambda row: row["id"]) == sorted(
        whole, key=lambda row: row["id"]
    )
    assert [row["custom_id"] for row in whole] == [*(f"short-{n}" for n in range(5)), *(f"long-{n}" for n in range(12))]
    assert {row["response"]["body"]["usage"]["completion_tokens"] for row in whole} == {4, 1000}


def test_a_cancel_takes_the_work_out_of_the_engine_at_once(
    served: Served, client: openai.OpenAI, tmp_path: Path
) -> None:
    with held(served.hold):
        batch = submit(client, lines(tmp_path / "in.jsonl", short=3, long=40))
        wait_until(lambda: client.batches.retrieve(batch.id).output_file_id, 60, "the first results")
        wait_until(lambda: engine_running(served) >= 40, 60, "the engine to say that it is busy")
        core = engine_core(served)
        assert client.batches.cancel(batch.id).status == "cancelling"
        before = cpu_seconds(core)
        with connect(served.redis_url) as client_of_redis:
            assert client_of_redis.hlen(keys.LEASE) == 0
    wait_for_rest([core], 0.05, 0.5)
    # Its own time, since others may delay the reader of a clock, and the worker process may be held
    # up too; all of the lines take far more.
    assert cpu_seconds(core) - before < 3
    batch = wait(client, batch)
    assert client.batches.cancel(batch.id).status == batch.status == "cancelled"
    check_ends(client, batch, "batch_cancelled", short=3, total=43)
    wait_until(lambda: engine_running(served) == 0, 60, "the engine to say that it is idle")


def engine_running(served: Served) -> float:
    """Sequences that the engine computes, as `/metrics` reports."""
    found = re.findall(
        r"^vllm:num_requests_running\{.*\} ([0-9.e+]+)$", http_calls.get(f"{served.url}/metrics").text, re.MULTILINE
    )
    return sum(map(float, found))


def engine_core(served: Served) -> int:
    [core] = [pid for pid in descendants(served.command.process.pid) if "core_process" in command_line(pid)]
    return core


def check_ends(client: openai.OpenAI, batch: Batch, code: str, short: int, total: int) -> None:
    """What was finished stays, every other line has its error; together they are all."""
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed + counts.failed) == (total, total)
    done, failed = (rows(client, file_id) if file_id else [] for file_id in (batch.output_file_id, batch.error_file_id))
    assert (len(done), len(failed)) == (counts.completed, counts.failed)
    assert len(failed) > 0
    assert {row["custom_id"] for row in done} | {row["custom_id"] for row in failed} == {
        *(f"short-{n}" for n in range(short)),
        *(f"long-{n}" for n in range(total - short)),
    }
    assert {(row["response"], row["error"]["code"]) for row in failed} == {(None, code)}


def test_a_batch_that_is_not_done_in_time_expires(served: Served, client: openai.OpenAI, tmp_path: Path) -> None:
    """The window is long enough for the file to be read in any case."""
    with held(served.hold):
        batch = submit(client, lines(tmp_path / "in.jsonl", short=3, long=300), SHORT_WINDOW)
        assert batch.expires_at is not None
        with EventReader(f"{served.url}/v1/batches/{batch.id}/stream") as reader:
            batch = wait(client, batch)
            end = reader.wait_ended()[-2]
    assert (batch.status, end.value["status"]) == ("expired", "expired")
    assert batch.expires_at == batch.created_at + 12
    check_ends(client, batch, "batch_expired", short=3, total=303)


def test_a_file_with_bad_lines_fails_with_an_error_for_each(client: openai.OpenAI, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    bad = [
        line("a", 4),
        "{\n",
        line("a", 4),
        line("b", 4, stream=True),
        line("c", 4, model="other"),
        line("d", 4).replace(CHAT, "/v1/x"),
        line("e", 4).replace('"method": "POST", ', ""),
        line("f", 4, messages=None),
    ]
    source.write_text("".join(bad))
    batch = wait(client, submit(client, source))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors is not None
    found = [(error.line, error.code, error.param) for error in batch.errors.data or []]
    assert found == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "streaming_unsupported", "body.stream"),
        (5, "model_not_found", "body.model"),
        (6, "invalid_url", "url"),
        (7, "missing_required_parameter", "method"),
        (8, "invalid_request", "body.messages"),
    ]
    assert batch.request_counts is not None
    assert batch.request_counts.total == 0


class Following(threading.Thread):
    """Follows a batch as a client does that reconnects, until the stream has its end."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.events: list[Event] = []
        self.cuts = 0
        self._url = url
        self._reader: EventReader | None = None

    @property
    def is_connected(self) -> bool:
        """Whether it reads just now, and has received something."""
        reader = self._reader
        return reader is not None and bool(reader.events) and not reader.is_cut

    def run(self) -> None:
        while not self.events or self.events[-1].value is not None:
            last_id = next((event.id for event in reversed(self.events) if event.id is not None), None)
            with suppress(httpx.HTTPError, AssertionError), EventReader(self._url, last_id) as reader:
                self._reader = reader
                wait_until(lambda reader=reader: reader.ended or reader.is_cut, 200, "the stream to end")
                self.cuts += not reader.ended
                self.events += reader.events
            time.sleep(0.05)  # without a listener it would try again at once


def test_any_process_may_be_killed_while_a_batch_is_made_run_and_followed(tmp_path: Path) -> None:
    """The API comes back under the same address.

    Killed where lines are left it cuts the stream; near the batch's end that may be over.
    """
    flags = ["--file-store", tmp_path / "store", "--lease-seconds", 2, "--max-num-seqs", 8, "--stream-interval", 0.2]
    source = examples(tmp_path / "in.jsonl", 300)
    with (
        reserved_port() as port,
        running_server() as server,
        running_pipeline("serve", "--port", port, *flags, redis_url=server.url) as command,
    ):
        found = re.search(r"listening on (http://\S+)", command.wait_for("listening on"))
        assert found is not None
        url = found[1]
        wait_until(lambda: http_calls.get(f"{url}/health").json().get("models"), 120, "the model to be served")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=20, timeout=60) as client:
            with standing_still(command):
                batch = submit(client, source)
                following = Following(f"{url}/v1/batches/{batch.id}/stream")
                following.start()
                wait_until(lambda: is_watched(server.url, batch), 60, "its tokens to be watched")
            parts = [
                "pipeline api",
                "core_process",
                "pipeline api",
                "jobs.control.rq_worker",
                "pipeline worker",
                "jobs.control.rq_worker",
                "jobs.control.ticker",
            ]
            sure_cuts = 0
            for number, part in enumerate(parts):
                wait_until(lambda number=number: done_lines(client, batch) >= 35 * number, 120, "some more lines")
                wait_until(lambda: following.is_connected, 60, "the stream to be read")
                with standing_still(command):
                    # More than those that the core may have ended unseen
                    lines_left = done_lines(client, batch) < 200
                    sure_cuts += lines_left and part == "pipeline api"
                    send_all(
                        [pid for pid in descendants(command.process.pid) if part in command_line(pid)], signal.SIGKILL
                    )
            batch = wait(client, batch)
            following.join(120)
            (tmp_path / "out.jsonl").write_bytes(client.files.content(batch.output_file_id or "").content)
    check_answers(source, tmp_path / "out.jsonl")
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 300, 0)
    assert sure_cuts <= following.cuts <= parts.count("pipeline api")
    assert batch_texts(following.events) == answers()


def done_lines(client: openai.OpenAI, batch: Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    return 0 if counts is None else counts.completed + counts.failed
