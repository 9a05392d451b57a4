"""Settings come from their maker, else from the environment, else from their defaults."""

import subprocess
import sys

import pytest

from jobs.settings import QueueSettings


def test_the_environment_replaces_a_default_and_gives_way_to_its_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKER_DEATHS", raising=False)
    monkeypatch.setenv("LEASE_SECONDS", "1.5")
    monkeypatch.setenv("WINDOW_BYTES", "4096")
    settings = QueueSettings(window_bytes=77)
    assert (settings.lease_seconds, settings.window_bytes, settings.worker_deaths) == (1.5, 77, 1000)


@pytest.mark.parametrize(("variable", "value", "says"), [
    ("LEASE_SECONDS", "soon", "LEASE_SECONDS must be a number, got 'soon'"),
    ("WINDOW_BYTES", "0", "window_bytes must be above 0, got 0"),
    ("STREAM_INTERVAL", "nan", "stream_interval must be above 0, got nan"),
    ("REDIS_RETRY_SECONDS", "-1", "redis_retry_seconds must not be negative, got -1.0"),
])  # fmt: skip
def test_what_cannot_be_used_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=says):
        QueueSettings()


def test_no_process_of_the_queue_waits_for_pydantic() -> None:
    code = "import sys, jobs.rq_worker, jobs.ticker, workers.worker, pipeline.batch_run; print('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
