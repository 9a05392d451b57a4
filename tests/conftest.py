"""Fixtures for all tests: `redis_url`, `redis_client` and `queue` use a real private server."""

import os
import signal
from collections.abc import Iterator

import pytest
import redis
from hypothesis import HealthCheck, settings

from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.server import PrivateServer
from tests.support.logs import kept_log
from tests.support.proof_table import read_table
from tests.support.redis_server import running_server

pytest_plugins = ["tests.support.time_limits", "tests.support.proof_budget"]

# How long an example takes says more of the machine than of what is tested; and the examples are
# the same each time unless others are asked for (`HYPOTHESIS_PROFILE=others pytest`).
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("others", settings.get_profile("tests"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tests"))


# A shell without job control has what it starts with `&` ignore SIGINT, and `nohup` SIGHUP; the
# commands that tests start would inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip `gpu` tests where torch can use no GPU."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a proof that no row of `tests/proofs.toml` has: no change would ever run it."""
    files = {item.nodeid.partition("::")[0] for item in items if item.get_closest_marker("proof")}
    if unknown := sorted(files - read_table().seconds.keys()):
        raise pytest.UsageError(f"tests/proofs.toml lacks {', '.join(unknown)}: add each to the row of what it proves")


@pytest.fixture(scope="session", autouse=True)
def _file_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever names no file store of its own, in this process or in one that it starts, has one
    that no other test sees.
    """
    os.environ["FILE_STORE"] = str(tmp_path_factory.mktemp("store"))


@pytest.fixture(autouse=True)
def log_of_each_test() -> Iterator[None]:
    with kept_log():
        yield


@pytest.fixture
def seed() -> int:
    """Return what a test draws its random numbers from: the same each time, unless SEED in the
    environment is another number. It is printed, so that a failure shows it.
    """
    number = int(os.environ.get("SEED", 20261121))
    print(f"seed {number} (set SEED to draw others)")
    return number


@pytest.fixture(scope="session")
def redis_server() -> Iterator[PrivateServer]:
    """One private server for the whole test process."""
    with running_server() as server:
        yield server


@pytest.fixture
def redis_client(redis_server: PrivateServer) -> Iterator[redis.Redis]:
    """A client of the emptied server."""
    client = connect(redis_server.url)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def redis_url(redis_server: PrivateServer, redis_client: redis.Redis) -> str:
    """The URL of the emptied server, for processes that a test starts."""
    return redis_server.url


@pytest.fixture
def queue(redis_client: redis.Redis) -> Queue:
    """A queue on the emptied server."""
    return Queue(redis_client)
