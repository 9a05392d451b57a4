"""`pipeline serve`: the official client against everything on one machine."""

import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import redis
from click.testing import CliRunner
from openai.types import Completion

from jobs.queue import keys
from jobs.store.storage import exclusive
from pipeline.commands.serve import serve
from tests.pipeline.conftest import RunHere
from tests.pipeline.results import ANSWERS
from tests.support import http_calls
from tests.support.commands import EXAMPLES, RunningCommand, running_pipeline
from tests.support.poison import Poison, noted_steps, poisoned_environment
from tests.support.processes import (
    command_line,
    cpu_seconds,
    descendants,
    environment_of,
    send_all,
    wait_for_rest,
    wake_ups,
)
from tests.support.waiting import check_time, wait_for_value, wait_until

LISTED_AT_FIRST: list[dict[str, object]] = []
"""The models when the address could be reached; `served` fills it."""


LEAVING_SECONDS = 1.0
"""How long a call may go on after its client has left."""


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file in which the engine core of `served` notes its steps."""
    return tmp_path_factory.mktemp("served") / "steps.jsonl"


@pytest.fixture(scope="module")
def served(notes: Path) -> Iterator[tuple[RunningCommand, str]]:
    """A running `pipeline serve` whose model is ready, and its address."""
    flags = ("--port", 0, "--served-model-name", "demo", "--served-model-name", "alias")
    environment = poisoned_environment(Poison("tortoise", "slow"), notes=notes)
    with running_pipeline("serve", *flags, **environment) as command:
        url = re.search(r"listening on (http://\S+)", command.wait_for("listening on"))
        assert url is not None
        LISTED_AT_FIRST[:] = http_calls.get(f"{url[1]}/v1/models").json()["data"]
        command.wait_for("worker INFO ready")
        wait_until(lambda: http_calls.get(f"{url[1]}/ready").status_code == 200, 60, "the model to be served")
        yield command, url[1]


@pytest.fixture
def client(served: tuple[RunningCommand, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def longest_example() -> tuple[dict[str, object], str]:
    """The body of the example request with the longest answer, and that answer."""
    best = max((json.loads(line) for line in ANSWERS.read_text().splitlines()), key=lambda row: len(row["answer"]))
    rows = (json.loads(line) for line in EXAMPLES.read_text().splitlines())
    return next(row["body"] for row in rows if row["custom_id"] == best["custom_id"]), best["answer"]


@pytest.mark.proof
def test_idle_processes_use_next_to_nothing(served: tuple[RunningCommand, str]) -> None:
    command = served[0]
    pids = [command.process.pid, *descendants(command.process.pid)]
    assert len({command_line(pid) for pid in pids}) >= 7
    wait_for_rest(pids, 0.01)

    def rest_together() -> bool:
        before, began = sum(map(cpu_seconds, pids)), time.monotonic()
        time.sleep(20)  # what is measured is this very time
        share = (sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - began)
        print(f"all together use {100 * share:.2f} % of a core")
        return share < 0.01

    wait_until(rest_together, 120, "the processes to use less than 1 % of a core together")


@pytest.mark.proof
def test_idle_processes_sleep(served: tuple[RunningCommand, str]) -> None:
    """Counted per second of the ticker, so that a busy machine changes little."""
    parent = served[0].process.pid
    pids = [parent, *descendants(parent)]
    wait_for_rest(pids, 0.01)
    [api] = processes(served[0], "pipeline api")

    def sleep_most_of_the_time() -> bool:
        before, began = [wake_ups([api]), wake_ups(pids), commands_of(client)], ticks_of(client)
        time.sleep(3)  # what is measured is this very time
        after, ended = [wake_ups([api]), wake_ups(pids), commands_of(client)], ticks_of(client)
        seconds = max(ended - began, 1.0)  # a busy machine may skip ticks
        rates = [(now - then) / seconds for now, then in zip(after, before, strict=True)]
        print("a second: {:.1f} wake-ups of the API, {:.1f} of all, {:.1f} commands of Redis".format(*rates))
        return rates[0] < 3 and rates[1] < 52 and rates[2] < 40

    with redis_of(served[0]) as client:
        wait_until(sleep_most_of_the_time, 60, "the processes to sleep")


def processes(command: RunningCommand, words: str) -> list[int]:
    """The processes below a command that were started with these words."""
    return [pid for pid in descendants(command.process.pid) if words in command_line(pid)]


def redis_of(command: RunningCommand) -> redis.Redis:
    [api] = processes(command, "pipeline api")
    variables = dict(entry.partition("=")[::2] for entry in environment_of(api))
    return redis.Redis.from_url(variables["REDIS_URL"])


def ticks_of(client: redis.Redis) -> float:
    """Seconds by the ticker, which notes each."""
    return int(client.hget("{q}:tick", "time") or 0) / 1000  # type: ignore[arg-type]


def commands_of(client: redis.Redis) -> int:
    return int(client.info("stats")["total_commands_processed"])


def test_the_official_client_streams_the_right_tokens(client: openai.OpenAI) -> None:
    body, answer = longest_example()
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(texts) == answer
    assert chunks[-1].usage.completion_tokens >= len(texts)


def endless(client: openai.OpenAI) -> openai.Stream[Completion]:
    """The stream of a call that takes a minute and a half, however fast the machine is."""
    return client.completions.create(
        model="demo", prompt="a tortoise", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )


def test_tokens_come_while_the_next_ones_are_computed(client: openai.OpenAI) -> None:
    pieces = 0
    with endless(client) as stream:
        for chunk in stream:
            assert chunk.choices[0].finish_reason is None
            pieces += bool(chunk.choices[0].text)
            if pieces > 5:
                break
    assert pieces > 5


def test_streamed_and_whole_answers_are_the_same(client: openai.OpenAI) -> None:
    body, answer = longest_example()
    whole = client.chat.completions.create(**body)  # type: ignore[call-overload]
    assert whole.choices[0].message.content == answer
    assert whole.choices[0].finish_reason == "stop"


def test_a_seed_gives_the_same_text_again(client: openai.OpenAI) -> None:
    calls = [
        client.completions.create(model="alias", prompt="List", max_tokens=12, temperature=1.0, seed=7)
        for _ in range(3)
    ]
    assert len({call.choices[0].text for call in calls}) == 1


def test_a_prompt_over_the_context_is_refused_before_the_stream_begins(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="word " * 5000, stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_models_are_listed_under_all_their_names(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["alias", "demo"]


def test_models_are_listed_as_soon_as_it_listens(served: tuple[RunningCommand, str]) -> None:
    assert [model["id"] for model in LISTED_AT_FIRST] == ["alias", "demo"]
    assert {model["status"] for model in LISTED_AT_FIRST} <= {"loading", "ready"}


@pytest.mark.proof
def test_a_client_that_leaves_frees_its_place(served: tuple[RunningCommand, str], client: openai.OpenAI) -> None:
    with endless(client) as stream:
        next(iter(stream))
    wait_until(lambda: http_calls.get(f"{served[1]}/health").json().get("live_calls") == 0, 60, "the call to end")


def call(url: str, stream: bool) -> socket.socket:
    """A connection with a call that takes a minute and a half."""
    body = {"model": "demo", "prompt": "a tortoise", "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {url.partition('//')[2]}\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def calls_at(url: str) -> tuple[int, float, float]:
    """Calls that the API has, and sequences that run and wait in the engine."""
    metrics = http_calls.get(f"{url}/metrics").text
    running, waiting = (
        sum(map(float, re.findall(rf"^vllm:num_requests_{state}\{{.*\}} (\S+)$", metrics, re.MULTILINE)))
        for state in ("running", "waiting")
    )
    return http_calls.get(f"{url}/health").json().get("live_calls"), running, waiting


def sequences(notes: Path) -> set[tuple[int, int]]:
    """Those that the engine core has had in a step, each with the process id of its core."""
    return {(step.core_pid, one) for step in noted_steps(notes) for one in step.request_ids}


@pytest.mark.proof
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain call"])
def test_the_engine_stops_within_a_second_of_a_client_that_leaves(
    served: tuple[RunningCommand, str], notes: Path, stream: bool
) -> None:
    """By the monotonic clock, which is the same in all processes: the core notes when it hands out
    the step that ends a sequence.
    """
    before = sequences(notes)
    with call(served[1], stream) as connection:
        [sequence] = wait_until(lambda: sequences(notes) - before, 60, "the engine to run the call")
        if stream:
            received = b""
            while b"data: " not in received:
                received += connection.recv(4096)
        left = time.monotonic()

    def aborted() -> float:
        steps = (step for step in noted_steps(notes) if step.core_pid == sequence[0] and sequence[1] in step.aborted)
        return next((step.at for step in steps), 0.0)

    stopped = wait_until(aborted, 60, "the engine to stop")
    print(f"the engine stopped after {stopped - left:.3f} s")
    check_time(stopped - left, LEAVING_SECONDS, "stopping the engine")


@pytest.mark.proof
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain call"])
def test_a_call_that_waits_leaves_the_queue_within_a_second_of_its_client(
    served: tuple[RunningCommand, str], client: openai.OpenAI, notes: Path, stream: bool
) -> None:
    """The worker process is stopped meanwhile, so that it cannot claim the call."""
    before = sequences(notes)
    workers = processes(served[0], "pipeline worker")
    with redis_of(served[0]) as queue:
        send_all(workers, signal.SIGSTOP)
        try:
            with call(served[1], stream):
                [key] = wait_until(lambda: waiting_calls(queue), 60, "the call to wait")
                left = time.monotonic()
            wait_until(lambda: key not in waiting_calls(queue), 60, "the call to leave the queue")
            gone = time.monotonic()
            assert not queue.hexists(keys.LIVE_CALLS, key)
            assert [name for name in queue.scan_iter() if key in name] == []
        finally:
            send_all(workers, signal.SIGCONT)
    print(f"the call left the queue after {gone - left:.3f} s")
    client.completions.create(model="demo", prompt="List", max_tokens=1)
    assert len(sequences(notes) - before) == 1, "the engine ran more than the last call"
    check_time(gone - left, LEAVING_SECONDS, "leaving the queue")


def waiting_calls(queue: redis.Redis) -> list[bytes]:
    """Keys of the live calls of the first model that no worker has claimed, in any turn."""
    lists = queue.scan_iter(match=keys.live_of("*", "*"))
    return [key for name in lists for key in queue.lrange(name, 0, -1)]  # type: ignore[union-attr]


@pytest.mark.proof
def test_clients_that_leave_together_end_their_calls_wherever_they_are(served: tuple[RunningCommand, str]) -> None:
    """Half of them are streams; 64 run, some wait in the engine and some in the queue."""
    url = served[1]
    connections = [call(url, stream=bool(number % 2)) for number in range(160)]
    wait_until(lambda: calls_at(url)[:2] == (160, 64), 60, "all calls to be there")
    for connection in connections:
        connection.close()
    began = time.monotonic()
    # Workers report these counts every few seconds; the calls would take a minute and a half
    wait_for_value(lambda: calls_at(url), (0, 0, 0), 40, "all calls to be gone")
    print(f"gone, and seen to be, after {time.monotonic() - began:.2f} s")


@pytest.mark.proof
@pytest.mark.parametrize("victim", ["pipeline worker", "workers.engine.core_process"])
def test_a_stream_goes_on_where_it_was_after_a_kill(
    served: tuple[RunningCommand, str], client: openai.OpenAI, victim: str
) -> None:
    body, answer = longest_example()
    command = served[0]
    starts = command.output.count("worker INFO ready")
    stream = client.chat.completions.create(**body, stream=True)  # type: ignore[call-overload]
    texts: list[str] = []
    for chunk in stream:
        texts.append(chunk.choices[0].delta.content or "")
        if len("".join(texts)) > 20 and victim:
            send_all(processes(command, victim), signal.SIGKILL)
            victim = ""
    assert "".join(texts) == answer
    assert not victim
    wait_until(
        lambda: command.output.count("worker INFO ready") > starts, 120, "its successor, which the next test needs"
    )


@pytest.mark.proof
def test_it_stops_in_order_and_at_once(tmp_path: Path) -> None:
    with running_pipeline("serve", "--port", 0, "--file-store", tmp_path) as command:
        command.wait_for("listening on")
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 0
        assert "Traceback" not in command.output


@pytest.mark.proof
def test_it_goes_on_after_its_redis_and_its_worker_were_killed_together(tmp_path: Path) -> None:
    with running_pipeline("serve", "--port", 0, "--file-store", tmp_path) as command:
        command.wait_for("worker INFO ready")
        below = {pid: command_line(pid) for pid in descendants(command.process.pid)}
        victims = [pid for pid, line in below.items() if "redis.sock" in line or "pipeline worker" in line]
        assert len(victims) == 2, below
        send_all(victims, signal.SIGKILL)
        wait_until(lambda: command.output.count("worker INFO ready") == 2, 150, "the next worker to be ready")
        assert command.process.poll() is None, command.output


def test_status_shows_workers_models_and_batches(redis_url: str, run_here: RunHere) -> None:
    done = run_here("status", REDIS_URL=redis_url)
    assert done.code == 0, done.err
    assert all(title in done.out for title in ("Workers", "Models", "Batches"))


@pytest.mark.proof
def test_a_second_server_keeps_off_the_file_store_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with exclusive(str(tmp_path), 1):
        monkeypatch.setattr("pipeline.commands.serve._PATIENCE_SECONDS", 0.0)
        done = CliRunner().invoke(serve, ["--port", "0", "--file-store", str(tmp_path)])
    assert done.exit_code == 2
    assert "another `pipeline serve` uses the file store" in done.stderr


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--ssl-certfile", "absent.pem"), "the certificate absent.pem with the key absent.pem cannot be used"),
        (("--middleware", "no_such_module.Name"), "--middleware no_such_module.Name cannot be imported"),
    ],
)
def test_settings_of_the_http_server_that_cannot_be_used_end_it(
    tmp_path: Path, flags: tuple[str, ...], reason: str, run_here: RunHere
) -> None:
    done = run_here("serve", "--port", 0, "--file-store", tmp_path, *flags)
    assert done.code == 2
    assert reason in done.err.splitlines()[-1]
