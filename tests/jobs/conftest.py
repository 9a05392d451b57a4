"""Fixtures for the tests of what travels through the queue."""

from collections.abc import Iterator
from pathlib import PurePath

import pytest

from jobs.control import advance, ticker, upkeep
from jobs.store.storage import make_folder, path_of
from tests.support.object_stores import PLACES, store_location


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices and ticks that a test runs in its own process do all that they find, however long the
    machine holds them up.
    """
    monkeypatch.setattr(advance, "SLICE_SECONDS", 60.0)
    monkeypatch.setattr(advance, "FEED_SECONDS", 60.0)
    monkeypatch.setattr(ticker, "MOMENT_SECONDS", 60.0)
    monkeypatch.setattr(upkeep, "MOMENT_SECONDS", 60.0)


@pytest.fixture(params=PLACES)
def location(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a file store will be: a folder, and a bucket."""
    with store_location(request.param, tmp_path_factory.mktemp("place")) as found:
        yield found


@pytest.fixture
def folder(location: str) -> PurePath:
    """The same as a path, of a folder that is there."""
    make_folder(location)
    return path_of(location)
