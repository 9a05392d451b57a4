"""The process of an engine core as it is started."""

import pytest

from tests.support.processes import environment_of
from workers.engine.client.launch import launch_core
from workers.engine.messages.config import EngineConfig
from workers.settings import DEMO_MODEL


def test_openmp_binds_no_thread_of_a_core(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setenv("OMP_STACKSIZE", "1m")
    launched = launch_core(EngineConfig(model=DEMO_MODEL, device="cpu", threads=3))
    try:
        variables = environment_of(launched.process.pid)
    finally:
        launched.discard()
    assert {"OMP_NUM_THREADS=3", "OMP_STACKSIZE=1m"} <= set(variables)
    assert not [variable for variable in variables if variable.startswith("OMP_PROC_BIND")]
    assert "OMP_PROC_BIND ignored" in caplog.text
