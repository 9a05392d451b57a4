"""Of many processes that write a file at once one does, and each learns whether it did."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from jobs.store.storage import StoreError, delete, join, read_bytes, replace_version, write_new
from tests.support.object_stores import CLOUDS, cloud
from tests.support.seaweedfs import seaweedfs

_WRITERS = 16
_FEW = 4  # rounds at once: the other servers take one call after another, and a client waits 20 s for it
_MANY_AT_ONCE = 20  # SeaweedFS answers the losers of a round seconds later
_MANY = [pytest.mark.proof, pytest.mark.timeout(1800)]
RACES = [
    *[(kind, 20, _FEW) for kind in ("s3", *CLOUDS)],
    pytest.param("s3", 1000, _FEW, marks=_MANY),
    pytest.param("seaweedfs", 1000, _MANY_AT_ONCE, marks=_MANY),
]


@pytest.fixture(params=["s3", *CLOUDS, pytest.param("seaweedfs", marks=pytest.mark.proof)])
def remote(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket of each kind, and on a server that is no mock."""
    is_real = request.param == "seaweedfs"
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) if is_real else cloud(request.param) as uri:
        yield uri


@pytest.mark.proof
@pytest.mark.parametrize(("remote", "rounds", "at_once"), RACES, indirect=["remote"])
def test_one_of_many_makes_a_file(remote: str, rounds: int, at_once: int) -> None:
    def check(number: int) -> None:
        name = join(remote, f"new-{number}")
        winner = only(race(partial(write_new, name)))
        assert read_bytes(name) == winner

    side_by_side(check, rounds, at_once)


@pytest.mark.proof
@pytest.mark.parametrize(("remote", "rounds", "at_once"), RACES, indirect=["remote"])
def test_one_of_many_replaces_a_version(remote: str, rounds: int, at_once: int) -> None:
    def check(number: int) -> None:
        name = join(remote, f"replaced-{number}")
        version = write_new(name, b"first")
        assert version is not None
        winner = only(race(partial(replace_version, name, version=version)))
        assert read_bytes(name) == winner

    side_by_side(check, rounds, at_once)


def test_what_is_gone_is_not_replaced(remote: str) -> None:
    name = join(remote, "gone")
    version = write_new(name, b"first")
    assert version is not None
    delete(name)
    assert replace_version(name, b"second", version) is None
    with pytest.raises(StoreError, match=r"/gone: (NoSuchKey|BlobNotFound)$"):
        read_bytes(name)


def test_a_put_that_is_repeated_since_its_answer_was_lost_has_won(remote: str) -> None:
    name = join(remote, "repeated")
    version = write_new(name, b"by one")
    assert write_new(name, b"by one") == version
    assert write_new(name, b"by another") is None


def side_by_side(check: Callable[[int], None], rounds: int, at_once: int) -> None:
    """Run all rounds, some of them at once."""
    with ThreadPoolExecutor(at_once) as running:
        for _ in running.map(check, range(rounds)):
            pass


def race(write: Callable[[bytes], object]) -> list[bytes]:
    """Return the contents whose writers got the answer that they have written."""
    ready = threading.Barrier(_WRITERS)

    def run(number: int) -> bytes | None:
        content = b"by writer %d" % number
        ready.wait()
        return None if write(content) is None else content

    with ThreadPoolExecutor(_WRITERS) as writers:
        return [content for content in writers.map(run, range(_WRITERS)) if content is not None]


def only(winners: list[bytes]) -> bytes:
    """Return the one."""
    [winner] = winners
    return winner
