"""One stack for all of these tests, one server with a model for those that an echo cannot answer,
and the official client, whose every answer is checked.
"""

import re
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.contract.shapes import Recorder
from tests.support.api_server import official_client, plain_client
from tests.support.batch_stack import BatchStack, running_stack
from tests.support.commands import running_pipeline
from tests.support.waiting import wait_until

SHORT_WINDOW = "4s"


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatchStack]:
    """Started with the first of these tests, stopped after the last."""
    with running_stack(tmp_path_factory.mktemp("stack"), completion_windows=("24h", SHORT_WINDOW)) as stack:
        yield stack


@pytest.fixture(scope="module")
def module_client(stack: BatchStack) -> Iterator[openai.OpenAI]:
    """The client of fixtures that outlive one test; a wrong answer fails the module at its end."""
    recorder = Recorder()
    with official_client(stack.api_url, on_answer=recorder) as client:
        yield client
    assert recorder.faults == []


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """What the client got."""
    recorder = Recorder()
    yield recorder
    assert recorder.faults == []


@pytest.fixture
def client(stack: BatchStack, recorder: Recorder) -> Iterator[openai.OpenAI]:
    """The official client, without retries."""
    with official_client(stack.api_url, on_answer=recorder) as client:
        yield client


@pytest.fixture(scope="package")
def http(stack: BatchStack) -> Iterator[httpx.Client]:
    """For what the official client would not send."""
    with plain_client(stack.api_url) as http:
        yield http


@pytest.fixture(scope="package")
def model_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a `pipeline serve` with the demo model, which is ready."""
    flags = ("--port", 0, "--dtype", "float32", "--tool-call-parser", "hermes")
    with running_pipeline("serve", *flags, "--file-store", tmp_path_factory.mktemp("store")) as command:
        found = re.search(r"listening on (http://\S+)", command.wait_for("listening on"))
        assert found is not None
        with plain_client(found[1]) as http:
            wait_until(lambda: http.get("/ready").status_code == 200, 120, "the model to be served")
        yield found[1]


@pytest.fixture
def model_client(model_url: str, recorder: Recorder) -> Iterator[openai.OpenAI]:
    """The official client of that server."""
    with official_client(model_url, on_answer=recorder) as client:
        yield client
