"""The compose files: valid by the published schema, no right too many, and times that fit the
processes.
"""

import shutil
import subprocess
import sys
from typing import Any

import click
import pytest
import yaml

from api.settings import ApiSettings
from pipeline import child, supervisor
from pipeline.main import COMMANDS, CommandGroup
from tests.docker.composition import FILES, seconds, services
from tests.docker.recipe import environment, folders, lineage, stages
from tests.support.commands import REPOSITORY
from workers.replica.requeue import GOODBYE_SECONDS
from workers.settings import WorkerSettings

SERVICES = services()
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
NOT_FLAGS = {"HF_TOKEN_PATH", "OMP_NUM_THREADS"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_is_valid_by_the_compose_specification(file: Any) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("files", [FILES[:1], FILES[:2], FILES[::2]], ids=["cpu", "gpu", "monitoring"])
def test_the_command_itself_reads_them(files: tuple[Any, ...]) -> None:
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("no `docker compose` on this machine")
    done = subprocess.run(
        ["docker", "compose", *(part for file in files for part in ("-f", str(file))), "config", "--quiet"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_right_that_it_does_not_need(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    users = [service["user"]] if "user" in service else lineage(service["build"]["target"])[-1].values("USER")
    assert len(users) == 1
    assert not users[0].startswith(("0", "root"))


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_watched_and_started_again(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True
    check = service["healthcheck"]
    assert check["test"][0] in ("CMD", "CMD-SHELL")
    assert seconds(check["timeout"]) <= seconds(check["interval"])


def test_nothing_is_published_but_the_api_and_that_to_this_host_alone() -> None:
    assert {name: service["ports"] for name, service in SERVICES.items() if "ports" in service} == {
        "api": ["127.0.0.1:8000:8000"]
    }


def test_every_process_has_the_time_to_stop_in_order() -> None:
    grace = {name: seconds(service["stop_grace_period"]) for name, service in SERVICES.items()}
    assert grace["api"] > ApiSettings().timeout_graceful_shutdown
    # RQ workers, then the ticker
    assert grace["jobs"] > 2 * supervisor._STOP_SECONDS + 3 * child._LAST_OUTPUT_SECONDS
    drains = WorkerSettings(redis_url="redis://redis").shutdown_timeout + 4 * GOODBYE_SECONDS
    assert grace["worker"] > drains + 2 * GOODBYE_SECONDS


@pytest.mark.parametrize("name", OURS)
def test_a_service_runs_a_command_with_settings_that_it_knows(name: str) -> None:
    command, *arguments = OURS[name]["command"]
    found = CommandGroup().get_command(None, command)
    assert found is not None
    with found.make_context(command, list(arguments), resilient_parsing=True) as context:
        known = {param.envvar for param in context.command.params if isinstance(param, click.Option)}
    given = set(OURS[name]["environment"]) | {
        key for key in environment(OURS[name]["build"]["target"]) if key == "FILE_STORE"
    }
    unused = {"FILE_STORE"} if name == "worker" else set()
    assert given - NOT_FLAGS - unused <= known
    health = OURS[name]["healthcheck"]["test"]
    assert health[1] == "pipeline"
    assert health[2] in COMMANDS


def test_no_two_services_build_one_tag() -> None:
    """An engine builds them side by side, and the second may find the tag taken."""
    tags = [service["image"] for service in OURS.values() if "image" in service]
    assert len(tags) == len(set(tags))


@pytest.mark.parametrize("name", OURS)
def test_volumes_belong_to_the_user_of_the_image(name: str) -> None:
    """A named volume takes its owner from the folder of the image where it is mounted first."""
    assert {volume.split(":")[1] for volume in OURS[name]["volumes"]} <= set(folders(OURS[name]["build"]["target"]))


def test_what_an_image_is_to_write_lies_in_a_folder_of_its_own() -> None:
    for name in stages():
        for variable in ("FILE_STORE", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "PIPELINE_DEVICE_LOCK_FOLDER"):
            assert any(environment(name)[variable].startswith(folder) for folder in folders(name)), variable


def test_volumes_are_where_processes_look_for_them() -> None:
    worker = environment("worker-cpu")
    wanted = {"caches": worker["XDG_CACHE_HOME"], "locks": worker["PIPELINE_DEVICE_LOCK_FOLDER"]}
    assert dict(volume.split(":") for volume in SERVICES["worker"]["volumes"]) == wanted
    for name in ("api", "jobs"):
        assert SERVICES[name]["volumes"] == [f"files:{environment('control')['FILE_STORE']}"]
    names = {name: volume for name, volume in yaml.safe_load(FILES[0].read_text())["volumes"].items() if volume}
    assert names == {"locks": {"name": "inference-card-locks"}}, (
        "workers of all projects on a host share the locks on GPUs"
    )


def test_the_queue_is_kept_on_disk_and_forgets_nothing() -> None:
    [command] = SERVICES["redis"]["command"]
    for setting in ("--appendonly yes", "--appendfsync everysec", "--maxmemory-policy noeviction", "--dir /data"):
        assert setting in command
    assert SERVICES["redis"]["volumes"] == ["redis:/data"]


def test_secrets_are_files_that_git_does_not_see() -> None:
    secrets = yaml.safe_load(FILES[0].read_text())["secrets"]
    assert {secret["file"] for secret in secrets.values()} == {f"secrets/{name}" for name in secrets}
    assert "docker/secrets/" in (REPOSITORY / ".gitignore").read_text().splitlines()
