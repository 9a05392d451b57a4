"""The images built and the composition run without an engine: overlays and namespaces in place of
it (`namespaces.py`).
"""

import json
import secrets
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.server import find_server
from tests.docker.composition import seconds, services
from tests.docker.namespaces import USER, Container, ContainerEngine, Image, why_not
from tests.docker.recipe import folders
from tests.pipeline.results import check_answers, examples
from tests.support.commands import REPOSITORY
from tests.support.processes import command_line
from tests.support.waiting import wait_until
from tests.support.worker_process import START_SECONDS
from tests.test_install import PROGRAM

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]
SERVICES = services()
IN_MEMORY = ("/tmp", "/dev/shm", "/dev/mqueue")
BATCH = """
import sys, time
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1], api_key=sys.argv[2])
file = client.files.create(file=open(sys.argv[3], "rb"), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while not batch.status in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.1)
    batch = client.batches.retrieve(batch.id)
client.files.content(batch.output_file_id).write_to_file(sys.argv[4])
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerEngine]:
    if reason := why_not():
        pytest.skip(reason)
    with ContainerEngine(tmp_path_factory.mktemp("engine")) as engine:
        for name, text in {"redis_password": secrets.token_hex(16), "hf_token": ""}.items():
            (engine.seen(engine.folder("secrets")) / name).write_text(text)
        yield engine


@pytest.fixture(scope="module")
def control(engine: ContainerEngine) -> Image:
    """The image `control`."""
    return engine.build("control")


@pytest.fixture(scope="module")
def worker(control: Image) -> Image:
    """In place of `worker-cpu`, whose torch takes minutes to install: `control` with the
    packages that this test runs by.
    """
    return replace(control, packages=Path(sysconfig.get_path("purelib")))


@pytest.fixture(scope="module")
def server(engine: ContainerEngine) -> Image:
    """A server by the name that the composition uses."""
    return engine.image_of_files("server", {"usr/local/bin/valkey-server": find_server()})


def test_an_image_holds_every_file_of_the_packages_and_no_torch(engine: ContainerEngine, control: Image) -> None:
    packages = [
        path for layer in control.layers for path in engine.seen(layer).glob("python/lib/python3*/site-packages")
    ]
    tracked = subprocess.run(
        ["git", "ls-files", "jobs", "workers", "api", "pipeline", "batch_inference_pipeline"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [file for file in tracked.stdout.split() if not (packages[0] / file).exists()] == []
    assert not [path for path in packages if (path / "torch").exists() or (path / "transformers").exists()]
    assert not [layer for layer in control.layers for _ in engine.seen(layer).glob("wheel/*")]


def test_the_deployment_from_the_first_key_to_an_orderly_end(
    engine: ContainerEngine, control: Image, worker: Image, server: Image, tmp_path: Path
) -> None:
    redis = engine.start("redis", SERVICES["redis"], server, {})
    names = {"redis": redis}
    wait_until(lambda: "Ready to accept connections" in redis.log, 60, "the server")

    api = engine.start("api", SERVICES["api"], control, names)
    assert api.wait(START_SECONDS) == 2, api.log
    assert "there is no API key in /files" in api.log
    key = engine.start(
        "keys", {**SERVICES["api"], "command": ["keys", "create", "--name", "first", "--json"]}, control, names
    )
    assert key.wait(START_SECONDS) == 0, key.log
    secret = json.loads(key.log)["secret"]

    started = {
        "api": engine.start("api", SERVICES["api"], control, names),
        "jobs": engine.start("jobs", SERVICES["jobs"], control, names),
    }
    for number in (1, 2):
        started[f"worker-{number}"] = engine.start(
            f"worker-{number}", SERVICES["worker"], worker, names, OMP_NUM_THREADS="1"
        )
    for name, text in {"api": "listening on", "worker-1": "INFO ready", "worker-2": "INFO ready"}.items():
        wait_until(lambda name=name, text=text: text in started[name].log, START_SECONDS, f"{name} to be ready")
    for name, container in started.items():
        check = SERVICES[name.partition("-")[0]]["healthcheck"]["test"][1:]
        wait_until(
            lambda container=container, check=check: container.run(*check).returncode == 0,
            START_SECONDS,
            f"{name} to be healthy",
        )

    imported = started["jobs"].run("python", "-c", PROGRAM)
    assert imported.returncode == 0, imported.stderr

    base_url = f"http://{started['api'].address}:8000/v1"
    source, output = examples(tmp_path / "requests.jsonl", 16), tmp_path / "results.jsonl"
    assert "401" in engine.client(sys.executable, "-c", BATCH, base_url, "sk-wrong", source, output).stderr
    done = engine.client(sys.executable, "-c", BATCH, base_url, secret, source, output)
    assert done.returncode == 0, done.stderr
    check_answers(source, output)

    for name, container in started.items():
        assert_confined(container, set(folders("control")), SERVICES[name.partition("-")[0]])
    password = (engine.seen(engine.folder("secrets")) / "redis_password").read_text()
    assert password not in command_lines()
    for name, container in reversed(started.items()):
        assert container.stop(seconds(SERVICES[name.partition("-")[0]]["stop_grace_period"])) == 0, container.log
    assert redis.stop(seconds(SERVICES["redis"]["stop_grace_period"])) == 0


def assert_confined(container: Container, own: set[str], service: dict[str, list[str]]) -> None:
    """It has no rights, and nowhere to write but in its volumes and in memory."""
    status = dict(line.split(":\t") for line in container.run("cat", "/proc/1/status").stdout.splitlines())
    assert status["Uid"].split() == [str(USER)] * 4
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    writable = container.run(
        "find", "/", "-path", "/proc", "-prune", "-o", "-type", "d", "-writable", "-print"
    ).stdout.split()
    volumes = {volume.partition(":")[2] for volume in service["volumes"]}
    assert volumes <= own
    assert [path for path in writable if not path.startswith((*IN_MEMORY, *volumes))] == []
    assert volumes <= set(writable)


def command_lines() -> str:
    """What every user of this machine can read of its processes."""
    return "\n".join(command_line(int(process.name)) for process in Path("/proc").iterdir() if process.name.isdecimal())
