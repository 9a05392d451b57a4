"""The processes that the client starts: a server of its own, or an API of a fleet."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batch_inference_pipeline import AsyncPipeline, Pipeline, ServerFailed
from batch_inference_pipeline.private_folder import socket_folder
from tests.support.commands import REPOSITORY, running_pipeline
from tests.support.processes import command_line, descendants, is_running
from tests.support.redis_server import running_server
from tests.support.waiting import wait_until
from workers.settings import DEMO_MODEL

PROGRAM = """
import os, sys
from batch_inference_pipeline import Pipeline
p = Pipeline(max_num_seqs=8)
child = os.fork()
if not child:
    sys.exit()  # which leaves what the parent has started
os.waitpid(child, 0)
print(next(p.map(["Count from 2 to 4."], temperature=0)).text, flush=True)
sys.stdin.readline()
"""


def server_children() -> list[int]:
    return [pid for pid in descendants(os.getpid()) if " pipeline " in command_line(pid)]


@pytest.mark.proof
def test_a_server_of_its_own_comes_back_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")  # of a fleet, which is another thing
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # which leads nowhere
    monkeypatch.setenv("PIPELINE_SSL_CERTFILE", "/none.pem")  # of another server
    before = set(server_children())
    with Pipeline(device="cpu", max_num_seqs=8, log_level="warning") as p:
        assert [one.text for one in p.map(["Count from 2 to 4."], temperature=0)] == ["Count: 2, 3, 4"]
        started = set(server_children()) - before
        assert len(started) > 2
        [serve] = [pid for pid in started if " serve " in command_line(pid)]
        os.kill(serve, signal.SIGKILL)
        assert [one.text for one in p.map(["Count from 3 to 5."], temperature=0)] == ["Count: 3, 4, 5"]
        started |= set(server_children()) - before
    assert not [pid for pid in started if is_running(pid)]


@pytest.mark.proof
def test_a_server_of_its_own_is_used_while_it_loads_its_model(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("ssl-certfile: /none.pem\nssl-cert-reqs: 2\n")  # of another server
    model = shutil.copytree(DEMO_MODEL, tmp_path / "own")
    with Pipeline(model=model, config=config) as p:
        calls = [p.submit_one("Count from 2 to 4.", temperature=0) for _ in range(3)]
        assert [one.text for one in p.map(["Count from 3 to 5."], temperature=0)] == ["Count: 3, 4, 5"]
        assert [call.result(120).text for call in calls] == ["Count: 2, 3, 4"] * 3

    async def by_the_official_client() -> Any:
        async with AsyncPipeline() as p:
            message: Any = {"role": "user", "content": "Count from 2 to 4."}
            return await p.client.chat.completions.create(model=await p.model(), messages=[message], temperature=0)

    assert asyncio.run(by_the_official_client()).choices[0].message.content == "Count: 2, 3, 4"


@pytest.mark.proof
@pytest.mark.parametrize(
    "ask",
    [lambda p: list(p.map(["Count from 2 to 4."])), lambda p: p.submit_one("Count from 2 to 4.").result()],
    ids=["batch", "call"],
)
def test_a_model_that_breaks_while_it_is_loaded_is_a_sentence(tmp_path: Path, ask: Callable[[Pipeline], Any]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(DEMO_MODEL, broken)
    [weights] = broken.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(ServerFailed, match="the server does not run: "), Pipeline(model=broken) as p:
        ask(p)


@pytest.mark.proof
@pytest.mark.parametrize("ending", ["exit", "killed"])
def test_no_process_stays_when_the_program_ends(ending: str) -> None:
    environment = {**os.environ, "PIPELINE_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=environment,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stdout.readline() == "Count: 2, 3, 4\n"
        started = descendants(program.pid)
        assert len(started) > 3
        if ending == "killed":
            program.kill()
        else:
            program.stdin.close()
        program.wait(120)
        assert program.returncode == (0 if ending == "exit" else -signal.SIGKILL)
    wait_until(lambda: not [pid for pid in started if is_running(pid)], 60, "the end of every process")


def test_a_model_that_cannot_be_loaded_is_a_sentence(tmp_path: Path) -> None:
    before = set(server_children())
    with pytest.raises(ServerFailed, match=r"the server does not run: .*nothing"):
        Pipeline(model=tmp_path / "nothing")
    with pytest.raises(ServerFailed, match="No such option"):
        Pipeline(warp_speed=9)
    assert set(server_children()) == before


@pytest.mark.proof
def test_a_server_of_its_own_works_in_a_temporary_folder_with_a_long_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with Pipeline(device="cpu", max_num_seqs=8, log_level="warning") as p:
        assert [one.text for one in p.map(["Count from 2 to 4."], temperature=0)] == ["Count: 2, 3, 4"]
    assert not list(folder.iterdir())


def test_sockets_are_not_in_a_folder_with_a_long_path(tmp_path: Path) -> None:
    long = tmp_path / ("long" * 25)
    with contextlib.ExitStack() as stack:
        assert socket_folder(Path("/short"), stack) == Path("/short")
        folder = socket_folder(long, stack)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(str(folder / "api.sock")) < 107
    assert not folder.exists()


@pytest.mark.proof
def test_a_fleet_answers(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with (
        running_server() as server,
        running_pipeline("jobs", "--file-store", store, redis_url=server.url),
        running_pipeline("worker", redis_url=server.url) as worker,
    ):
        worker.wait_for("worker INFO ready")
        with Pipeline(redis_url=server.url, file_store=store) as p:
            assert [one.text for one in p.map(["Count from 2 to 4."], temperature=0)] == ["Count: 2, 3, 4"]
            [api] = [
                pid for pid in server_children() if " api " in command_line(pid) and str(store) in command_line(pid)
            ]
            os.kill(api, signal.SIGKILL)
            assert [one.text for one in p.map(["Count from 3 to 5."], temperature=0)] == ["Count: 3, 4, 5"]
        assert worker.process.poll() is None
