"""A running `pipeline serve` with the demo model, and a client of it."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from batch_inference_pipeline import Pipeline
from tests.support import http_calls
from tests.support.commands import RunningCommand, running_pipeline
from tests.support.processes import command_line, descendants
from tests.support.waiting import wait_until


class ClientServer(NamedTuple):
    """The command, and the address of its API."""

    command: RunningCommand
    base_url: str

    def api_processes(self) -> list[int]:
        return [pid for pid in descendants(self.command.process.pid) if " pipeline api " in command_line(pid)]


@pytest.fixture(scope="package")
def client_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    store = tmp_path_factory.mktemp("store")
    with running_pipeline("serve", "--port", 0, "--file-store", store) as command:
        found = re.search(r"listening on (http://\S+)", command.wait_for("listening on"))
        assert found is not None
        wait_until(lambda: http_calls.get(f"{found[1]}/ready").status_code == 200, 120, "the model to be served")
        yield ClientServer(command, f"{found[1]}/v1")


@pytest.fixture
def p(client_server: ClientServer) -> Iterator[Pipeline]:
    with Pipeline(base_url=client_server.base_url) as pipeline:
        yield pipeline
