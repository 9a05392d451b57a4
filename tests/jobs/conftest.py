"""Fixtures for the tests of what travels through the queue."""

import pytest

from jobs.control import advance, ticker, upkeep


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices and ticks that a test runs in its own process do all that they find, however long the
    machine holds them up.
    """
    monkeypatch.setattr(advance, "SLICE_SECONDS", 60.0)
    monkeypatch.setattr(ticker, "MOMENT_SECONDS", 60.0)
    monkeypatch.setattr(upkeep, "MOMENT_SECONDS", 60.0)
