"""`pipeline serve` with several models: each is loaded when work for it waits."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from jobs.queue import keys
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from pipeline.hosting import host
from pipeline.hosting.host import ModelHost
from pipeline.hosting.models import served_models
from pipeline.hosting.settings import HostingSettings
from pipeline.signals import Signals
from pipeline.supervisor import Supervisor
from tests.support import http_calls
from tests.support.commands import RunningCommand, run_pipeline, running_pipeline
from tests.support.poison import Poison, poisoned_environment
from tests.support.processes import command_line, cpu_seconds, descendants, is_running
from tests.support.waiting import wait_until
from tests.workers.test_worker import follow, question, slow, submit_live
from workers.settings import DEMO_MODEL

BOTH = ("chat", "embed")
SLOW = poisoned_environment(Poison("tortoise", "slow"))
ONE_AT_A_TIME = ("--max-memory", "1200M")  # each needs about 800 MB


class Hosting(NamedTuple):
    """A running `pipeline serve` with two copies of the demo model."""

    command: RunningCommand
    url: str
    redis_url: str

    def workers(self) -> dict[str, int]:
        """Process ids of the worker processes, by model."""
        lines = {pid: command_line(pid) for pid in descendants(self.command.process.pid)}
        found = {pid: re.search(r"pipeline worker .*/(chat|embed) ", line) for pid, line in lines.items()}
        return {match[1]: pid for pid, match in found.items() if match}

    def status(self) -> dict[str, str]:
        """What the list of models says of each."""
        return {model["id"]: model["status"] for model in http_calls.get(f"{self.url}/v1/models").json()["data"]}

    def lengths(self) -> dict[str, int | None]:
        """The longest context of each."""
        return {model["id"]: model["max_model_len"] for model in http_calls.get(f"{self.url}/v1/models").json()["data"]}

    def ask(self, model: str, **parameters: Any) -> httpx.Response:
        body = {"model": model, "prompt": "List", "max_tokens": 4, "temperature": 0, **parameters}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two models."""
    path = tmp_path_factory.mktemp("models")
    for name in BOTH:
        shutil.copytree(DEMO_MODEL, path / name)
    return path


@contextmanager
def hosting(folder: Path, store: Path, redis_url: str, *flags: object, **environment: str) -> Iterator[Hosting]:
    models = [flag for name in BOTH for flag in ("--model", f"{name}={folder / name}")]
    shared = ("--port", 0, "--file-store", store, *models, "--dtype", "float32")
    with running_pipeline("serve", *shared, *flags, redis_url=redis_url, **environment) as command:
        found = re.search(r"listening on (http://\S+)", command.wait_for("listening on"))
        assert found is not None
        served = Hosting(command, found[1], redis_url)
        offered = dict.fromkeys(BOTH, "unloaded").items()  # before, they are listed as loading
        wait_until(lambda: served.status().items() >= offered, 60, "both models to be offered")
        yield served


@pytest.mark.proof
def test_each_model_is_loaded_for_the_first_call_and_a_batch_may_name_both(
    folder: Path, tmp_path: Path, redis_url: str
) -> None:
    with hosting(folder, tmp_path / "store", redis_url, "--model-flags", "embed=--max-model-len 64") as served:
        assert served.status() == dict.fromkeys(BOTH, "unloaded")
        assert served.workers() == {}
        first = served.ask("chat")
        assert first.status_code == 200, first.text
        wait_until(lambda: served.status()["chat"] == "ready", 60, "the model to be listed as loaded")
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            batch = submit(client, tmp_path / "requests.jsonl", [BOTH[number % 2] for number in range(20)])
            wait_until(lambda: client.batches.retrieve(batch).status == "completed", 120, "the batch")
            output = client.batches.retrieve(batch).output_file_id
            assert output is not None
            rows = [json.loads(line) for line in client.files.content(output).text.splitlines()]
        assert [row["response"]["body"]["model"] for row in rows] == [BOTH[number % 2] for number in range(20)]
        assert {row["response"]["body"]["choices"][0]["text"] for row in rows} == {first.json()["choices"][0]["text"]}
        wait_until(lambda: served.lengths() == {"chat": 2048, "embed": 64}, 60, "both models to be listed as loaded")
        assert set(served.workers()) == {*BOTH}


def submit(client: openai.OpenAI, path: Path, models: list[str]) -> str:
    """Submit a batch with one line for each of `models`; return its id."""
    write_lines(path, models)
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    return client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h").id


def write_lines(path: Path, models: Sequence[str | None]) -> None:
    """Write a file with one line for each of `models`, which None leaves out."""
    bodies = [{"model": model, "prompt": "List", "max_tokens": 4, "temperature": 0} for model in models]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_both(folder: Path, tmp_path: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    models = [flag for name in BOTH for flag in ("--model", f"{name}={folder / name}")]
    shared = ("-o", tmp_path / "results.jsonl", *models, "--device", "cpu", "--dtype", "float32")
    return run_pipeline("run-batch", tmp_path / "requests.jsonl", *shared, *flags)


@pytest.mark.proof
@pytest.mark.parametrize("flags", [(), ONE_AT_A_TIME], ids=["together", "one after the other"])
def test_run_batch_loads_each_model_that_its_lines_name_once(
    folder: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    models = [BOTH[number % 2] for number in range(3000)]  # more than are claimed at once
    write_lines(tmp_path / "requests.jsonl", models)
    done = run_both(folder, tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [str(number) for number in range(len(models))]
    assert [row["response"]["body"]["model"] for row in rows] == models
    assert sorted(re.findall(r"\bloading the model (\w+)", done.stderr)) == [*BOTH]
    assert done.stderr.count("to make room for") == (1 if flags else 0)


@pytest.mark.proof
def test_lines_that_their_model_cannot_answer_are_error_lines(folder: Path, tmp_path: Path) -> None:
    bodies = {"/v1/completions": {"prompt": "List", "max_tokens": 4}, "/v1/embeddings": {"input": "List"}}
    asked = [(url, model) for url in bodies for model in BOTH]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": {**bodies[url], "model": model}}
        for number, (url, model) in enumerate(asked)
    ]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run_both(folder, tmp_path, "--model-flags", "embed=--task embed")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["response"]["status_code"] for row in rows] == [200, 400, 400, 200]
    for number, sentence in ((1, "`embed` cannot be used with /v1/comp"), (2, "`chat` cannot be used with /v1/emb")):
        assert rows[number]["error"]["code"] == "unsupported_endpoint"
        assert sentence in rows[number]["response"]["body"]["error"]["message"]


@pytest.mark.proof
def test_run_batch_refuses_what_none_of_its_models_can_answer(folder: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "requests.jsonl", ["chat", None])
    done = run_both(folder, tmp_path)
    assert (done.returncode, "model" in done.stderr) == (2, True), done.stderr
    bad = tmp_path / "models"
    shutil.copytree(folder, bad)
    (bad / "embed" / "model.safetensors").unlink()
    write_lines(tmp_path / "requests.jsonl", ["chat", "embed"])
    done = run_both(bad, tmp_path)
    assert done.returncode == 1, done.stderr
    assert re.search(r"the model embed could not be loaded: .*holds no weights.*finished results are kept", done.stderr)
    shutil.copy(folder / "embed" / "model.safetensors", bad / "embed")
    assert run_both(bad, tmp_path).returncode == 0


@pytest.mark.proof
def test_an_idle_model_is_unloaded_and_loaded_again(folder: Path, tmp_path: Path, redis_url: str) -> None:
    with hosting(folder, tmp_path / "store", redis_url, "--idle-unload", 1) as served:
        for _ in range(2):
            assert served.ask("chat").status_code == 200
            pid = served.workers()["chat"]
            shown = run_pipeline("status", redis_url=redis_url).stdout
            assert [row.split("│")[3].strip() for row in shown.splitlines() if "│ embed" in row] == ["on demand"]
            wait_until(lambda: served.status()["chat"] == "unloaded", 60, "the model to be unloaded")
            wait_until(lambda gone=pid: not is_running(gone), 60, "its worker to end")
        assert "after 1 s without work" in served.command.output
        assert served.workers() == {}
        # What is left looks for work every few seconds, and is woken by it before
        pid = served.command.process.pid
        before, began = cpu_seconds(pid), time.monotonic()
        time.sleep(10)  # what is measured is this very time
        assert cpu_seconds(pid) - before < 0.01 * (time.monotonic() - began) + 1 / os.sysconf("SC_CLK_TCK")


@pytest.mark.proof
def test_a_model_that_does_not_fit_has_an_idle_one_unloaded(folder: Path, tmp_path: Path, redis_url: str) -> None:
    with hosting(folder, tmp_path / "store", redis_url, *ONE_AT_A_TIME) as served:
        for name in (*BOTH, *BOTH):
            assert served.ask(name).status_code == 200
            assert set(served.workers()) == {name}
        assert served.command.output.count("to make room for") == 3
        with ThreadPoolExecutor(8) as pool:
            codes = [answer.status_code for answer in pool.map(served.ask, BOTH * 4)]
        assert codes == [200] * 8


@pytest.mark.proof
def test_a_call_is_refused_after_a_while_where_the_other_model_is_at_work(
    folder: Path, tmp_path: Path, redis_url: str
) -> None:
    body = {"model": "chat", "prompt": "a tortoise", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with hosting(folder, tmp_path / "store", redis_url, *ONE_AT_A_TIME, "--load-timeout", 8, **SLOW) as served:
        wait_until(lambda: served.ask("chat").status_code == 200, 150, "the model to be loaded, however slowly")
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=150) as stream:
            lines = stream.iter_lines()  # which ends the call once it is let go of
            next(lines)
            refused = served.ask("embed")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "insufficient_memory")
    assert "retry-after" in refused.headers
    assert re.search(
        r"`embed` needs about 0\.\d+ GiB of memory, .* of --max-memory .* beside `chat`, which is at work; try again",
        refused.json()["error"]["message"],
    )


@pytest.mark.proof
def test_a_model_that_is_killed_while_it_loads_answers_the_call_that_waits(
    folder: Path, tmp_path: Path, redis_url: str
) -> None:
    with hosting(folder, tmp_path / "store", redis_url) as served, ThreadPoolExecutor(1) as pool:
        for victim in ("pipeline worker", "core_process"):
            answer = pool.submit(served.ask, "chat" if victim == "pipeline worker" else "embed")
            wait_until(
                lambda victim=victim: [
                    os.kill(pid, signal.SIGKILL)
                    for pid in descendants(served.command.process.pid)
                    if victim in command_line(pid)
                    and "ready after" not in served.command.output.split("loading the")[-1]
                ],
                60,
                "the process to be there, and killed",
            )
            assert answer.result(150).status_code == 200, served.command.output
        assert "the worker-chat process was killed by SIGKILL; restarting it" in served.command.output


@pytest.mark.proof
def test_a_model_that_cannot_be_loaded_fails_its_calls_alone(folder: Path, tmp_path: Path, redis_url: str) -> None:
    bad = tmp_path / "models"
    shutil.copytree(folder, bad)
    (bad / "embed" / "model.safetensors").unlink()
    shutil.copytree(bad / "embed", bad / "held" / "moved")
    (bad / "held" / "moved" / "model.safetensors").symlink_to("../../blobs/ab")
    with hosting(bad, tmp_path / "store", redis_url, "--model", bad / "held") as served:
        wait_until(lambda: served.ask("moved").json()["error"]["code"] == "model_not_loadable", 60, "a refusal")
        assert "the model moved could not be loaded: " in served.command.output
        assert "held/moved/model.safetensors is a link to ../../blobs/ab, which is not there" in served.command.output
        wait_until(lambda: served.ask("embed").json()["error"]["code"] == "model_not_loadable", 60, "a refusal")
        refusal = served.ask("embed")
        said = "The model `embed` could not be loaded: embed holds no weights: there is no .safetensors file in it."
        assert (refusal.json()["error"]["message"], refusal.headers["x-should-retry"]) == (said, "false")
        assert "the model embed could not be loaded: " in served.command.output
        assert "holds no weights" in served.command.output
        shown = run_pipeline("status", redis_url=redis_url, COLUMNS="300").stdout
        assert re.search(r"embed .*on demand, but could not be loaded: .*holds no weights", shown)
        assert served.ask("chat").status_code == 200
        shutil.copy(folder / "embed" / "model.safetensors", bad / "embed")
        wait_until(lambda: served.ask("embed").status_code == 200, 60, "the model to be loaded after all")


@pytest.mark.proof
def test_a_model_at_work_gives_way_after_its_turn_and_its_call_goes_on(
    folder: Path, redis_url: str, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "TURN_SECONDS", 2.0)
    monkeypatch.setattr(host, "_LOADS_A_TURN", 0)
    monkeypatch.setenv("PIPELINE_DEVICE", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, value in SLOW.items():
        monkeypatch.setenv(name, value)
    models = served_models([str(folder)], [], redis_url, worker_flags())
    said: list[str] = []
    settings = QueueSettings(redis_url=redis_url)
    with (
        Supervisor(redis_url, settings, said.append) as supervisor,
        ModelHost(models, HostingSettings(max_memory=1200 << 20), supervisor, said.append) as models_host,
        Signals() as signals,
    ):

        def lives() -> None:
            signals.wait(min(0.1, supervisor.check(), models_host.check()), models_host.news)

        long, api = submit_live(queue, {**slow(300), "model": "chat"})
        queue.redis.set(keys.api_alive(api), "1")
        wait_for(lives, lambda: bool(queue.running(long.batch)), said)
        short, _ = submit_live(queue, {**question("List", max_tokens=5), "model": "embed"})
        wait_for(lives, lambda: has_ended(queue, short.batch), said)
        assert not has_ended(queue, long.batch)
        wait_for(lives, lambda: has_ended(queue, long.batch), said)
        supervisor.stop()
    result = follow(queue, api)[-1].result
    assert result is not None
    assert (result.status, result.usage.completion_tokens) == (200, 300)
    assert sum("to make room for" in line for line in said) == 2


def worker_flags() -> dict[str, Any]:
    """The flags of workers as they are without any."""
    from pipeline.commands.serve import serve

    return serve.make_context("serve", ["--dtype", "float32", "--device", "cpu"]).params


def has_ended(queue: Queue, live_id: str) -> bool:
    return not queue.redis.exists(keys.bodies(live_id))


def wait_for(lives: Any, condition: Any, said: list[str]) -> None:
    deadline = time.monotonic() + 150
    while not condition():
        assert time.monotonic() < deadline, said
        lives()
