"""One stack for all of these tests, and the official client, whose every answer is checked."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.contract.shapes import Recorder
from tests.support.api_server import official_client, plain_client
from tests.support.batch_stack import BatchStack, running_stack

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
