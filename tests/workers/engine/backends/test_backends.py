"""Which backend a device runs with, and what is said where one cannot be had."""

import re
import subprocess
from importlib import metadata

import pytest
import torch

from tests.workers.engine.native.available import needs_native
from workers.engine.backends import cpu
from workers.engine.backends.registry import default_backend, find_backend
from workers.engine.backends.triton import require_triton, triton_trouble
from workers.engine.kernels import smoke_test
from workers.engine.messages.errors import ModelLoadError
from workers.engine.native.build import NativeUnavailable

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="unknown attention backend 'flash'; choose auto, torch, cpu or triton"):
        find_backend("flash")


@needs_native
def test_a_cpu_runs_its_own_kernels_for_the_dtypes_that_they_know() -> None:
    found = [default_backend(CPU, dtype).name for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    assert found == ["cpu", "cpu", "torch"]


def test_a_gpu_too_old_for_the_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It runs plain torch unless the kernels were asked for."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert default_backend(GPU, torch.float16).name == "torch"
    said = "Tesla T4 (compute capability 7.5) is too old for the engine's kernels, which need 8.0 or newer"
    assert f"{said}; plain torch is used, which is slower" in caplog.text
    find_backend("torch").check(GPU, torch.float16)
    with pytest.raises(ModelLoadError) as caught:
        find_backend("triton").check(GPU, torch.float16)
    assert str(caught.value) == said


def test_a_gpu_runs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert default_backend(GPU, torch.float16).name == "triton"


def test_a_cpu_without_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It runs plain torch unless the kernels were asked for."""

    def fail() -> None:
        raise NativeUnavailable("there is no C compiler (cc, gcc or clang) on PATH")

    monkeypatch.setattr(cpu, "load", fail)
    assert default_backend(CPU, torch.float32).name == "torch"
    assert (
        "there are no CPU kernels (there is no C compiler (cc, gcc or clang) on PATH); plain torch is used"
        in caplog.text
    )
    with pytest.raises(
        ModelLoadError, match=r"^the cpu backend cannot be had: there is no C compiler .*; choose .* auto or torch$"
    ):
        find_backend("cpu").check(CPU, torch.float32)
    with pytest.raises(
        ModelLoadError,
        match=r"^the cpu backend cannot be had: its kernels .* float32, and the dtype is float16; choose",
    ):
        find_backend("cpu").check(CPU, torch.float16)
    with pytest.raises(ModelLoadError, match=r"^the cpu backend is for the device cpu, and the device is cuda; choose"):
        find_backend("cpu").check(GPU, torch.float32)


def test_triton_is_tried_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    require_triton(CPU)

    def fail(_: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(smoke_test, "run_smoke_test", fail)
    with pytest.raises(
        ModelLoadError, match=r"^Triton \S+ cannot run a kernel on cpu: Failed to find C .*: install gcc"
    ):
        require_triton(CPU)


@pytest.mark.parametrize(
    ("version", "says"), [(None, "which is not installed; pip"), ("3.5.1", "newer, and 3.5.1 is installed; pip")]
)
def test_a_triton_that_is_not_there_or_too_old(monkeypatch: pytest.MonkeyPatch, version: str | None, says: str) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(ModelLoadError, match=says):
        require_triton(CPU)


@pytest.mark.parametrize(
    ("error", "needed", "says"),
    [
        (subprocess.CalledProcessError(1, ["gcc", "main.c"]), None, "install gcc and python3-dev"),
        (
            ImportError("cannot import name 'x'"),
            "3.6.0",
            "cannot import name 'x'; torch .* goes with Triton 3.6.0: pip install triton==3",
        ),
        (
            RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
            "3.7.1",
            "older than the CUDA that this Triton compiles for",
        ),
        (RuntimeError("something new\nand its advice"), None, "^something new; install torch and Triton together"),
    ],
)
def test_what_a_kernel_that_fails_means(error: Exception, needed: str | None, says: str) -> None:
    found = triton_trouble(error, "3.7.0", needed)
    assert re.search(says, found)
    assert "\n" not in found
