"""Settings come from their maker, else from the environment, else from their defaults."""

from dataclasses import replace

import pytest

from jobs.errors import SettingsError
from jobs.queue.settings import QueueSettings


def test_the_environment_replaces_a_default_and_gives_way_to_its_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKER_DEATHS", raising=False)
    monkeypatch.setenv("LEASE_SECONDS", "1.5")
    monkeypatch.setenv("WINDOW_BYTES", "4096")
    settings = QueueSettings.from_environment(window_bytes=77)
    assert (settings.lease_seconds, settings.window_bytes, settings.worker_deaths) == (1.5, 77, 1000)


def test_another_process_gets_the_same_settings_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = QueueSettings(on_demand_models=("a", "org/b"), lease_seconds=1.5, file_store="/files")
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert vars(QueueSettings.from_environment()) == vars(settings)


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("REDIS_URL", "FILE_STORE", "WINDOW_BYTES"):
        monkeypatch.setenv(variable, "")
    settings = QueueSettings.from_environment()
    assert (settings.redis_url, settings.file_store, settings.window_bytes) == (None, "./store", 64 * 2**20)


@pytest.mark.parametrize(("variable", "value", "says"), [
    ("LEASE_SECONDS", "soon", "LEASE_SECONDS must be a number, at least 0.2, got 'soon': give one, or leave it out"),
    ("LEASE_SECONDS", "inf", "LEASE_SECONDS must be a number, at least 0.2, got 'inf'"),
    ("STREAM_INTERVAL", "nan", "STREAM_INTERVAL must be a number, at least 0.02, got 'nan'"),
    ("WINDOW_BYTES", "64.5", "WINDOW_BYTES must be a whole number above 0, got '64.5'"),
    ("WINDOW_BYTES", "0", "WINDOW_BYTES must be a whole number above 0, got '0'"),
    ("REDIS_RETRY_SECONDS", "-1", "REDIS_RETRY_SECONDS must be a number, at least 0, got '-1'"),
])  # fmt: skip
def test_what_cannot_be_used_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=says):
        QueueSettings.from_environment()


def test_what_its_maker_says_is_checked_too() -> None:
    with pytest.raises(SettingsError, match="'a b' has spaces: give the model a --served-model-name without"):
        QueueSettings(on_demand_models=("a b",))
    assert QueueSettings(redis_retry_seconds=0).redis_retry_seconds == 0
    with pytest.raises(SettingsError, match=r"LEASE_SECONDS must be a number, at least 0\.2, got 0"):
        QueueSettings(lease_seconds=0)
    with pytest.raises(SettingsError, match="WORKER_DEATHS"):
        replace(QueueSettings(), worker_deaths=-1)
