"""Figures of a GPU, and what is left out where there is none."""

import logging
import sys
from pathlib import Path

import pytest
import torch

from workers.replica.gpus import gpu_gauges


def test_without_gpus_nothing_is_asked() -> None:
    assert gpu_gauges([]) == []


def test_without_a_driver_or_its_library_no_figures_are_reported() -> None:
    assert gpu_gauges(["GPU-00000000-0000-0000-0000-000000000000"]) == []


@pytest.mark.parametrize(
    "library",
    [
        "",
        "raise RuntimeError('made for another driver')",
        (
            "def nvmlInit(): pass\ndef nvmlDeviceGetHandleByUUID(uuid): raise UnicodeDecodeError('utf-8', b'\\xff', 0,"
            " 1, 'odd')"
        ),
    ],
    ids=["another's", "does not load", "fails"],
)
def test_a_library_of_that_name_that_does_otherwise_is_reported_once(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "pynvml.py").write_text(library)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    with caplog.at_level(logging.WARNING):
        assert gpu_gauges(["GPU-1"]) == gpu_gauges(["GPU-1"]) == []
    assert len(caplog.records) == 1
    sys.modules.pop("pynvml", None)


@pytest.mark.gpu
def test_a_gpu_reports_its_figures() -> None:
    pytest.importorskip("pynvml")
    (gpu,) = gpu_gauges([f"GPU-{torch.cuda.get_device_properties(0).uuid}"])
    assert gpu.name == torch.cuda.get_device_name(0)
    assert gpu.memory_total is not None
    assert gpu.memory_total > 0
    assert gpu.watts is None or 0 < gpu.watts < 2000
