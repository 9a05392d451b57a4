"""What is said of a device that cannot do what is asked of it."""

import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import torch

from workers.engine.attention import CacheShape, make_attention
from workers.engine.device import device as module
from workers.engine.device.device import (
    check_gpu,
    require_triton,
    triton_trouble,
    unfit_for,
    unusable_gpu,
    usable_device,
    without_code,
)
from workers.engine.kernels import smoke_test
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.errors import ModelLoadError
from workers.engine.native.build import NativeUnavailable

CPU = torch.device("cpu")
no_cuda_build = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")


@no_cuda_build
def test_a_build_without_cuda_is_named() -> None:
    with pytest.raises(
        ModelLoadError, match=r"^the device is cuda, but torch \S+ is a build without CUDA; install one .* or choose"
    ):
        usable_device("cuda")


@no_cuda_build
def test_the_cpu_is_used_quietly_only_where_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_GPUS", tmp_path / "gpus")
    assert EngineConfig(model="m").resolve().device == "cpu"
    assert not caplog.records
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    assert EngineConfig(model="m").resolve().device == "cpu"
    assert "the CPU is used though there is an NVIDIA GPU: torch" in caplog.text


@pytest.mark.parametrize(
    ("error", "visible", "says"),
    [
        (
            (
                "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by"
                " downloading"
            ),
            None,
            (
                "the NVIDIA driver here knows CUDA up to 12.2 and torch .* needs 13.0; update the driver, or install a"
                " torch"
            ),
        ),
        (
            "Found no NVIDIA driver on your system. Please check that you have",
            None,
            "there is no NVIDIA driver here; install",
        ),
        (
            "No CUDA GPUs are available",
            "",
            "CUDA_VISIBLE_DEVICES= leaves torch no GPU; unset it or choose the device cpu",
        ),
        (
            "No CUDA GPUs are available",
            None,
            r"torch cannot use a GPU here \(No CUDA GPUs are available\); see whether",
        ),
        ("CUDA unknown error", "0", r"torch cannot use a GPU here \(CUDA unknown error\); see"),
    ],
)
def test_what_torch_says_of_a_gpu_that_it_cannot_use(error: str, visible: str | None, says: str) -> None:
    assert re.match(says, unusable_gpu(error, "13.0", visible))


def test_a_gpu_too_old_for_a_dtype_is_named_with_what_to_use() -> None:
    why = unfit_for(torch.bfloat16, "Tesla T4", (7, 5))
    assert (
        why
        == "Tesla T4 (compute capability 7.5) has no bfloat16, which came with 8.0; use the dtype float16 or float32"
    )
    assert unfit_for(torch.float16, "Tesla T4", (7, 5)) is None
    assert unfit_for(torch.bfloat16, "A100", (8, 0)) is None


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((9, 0), ["sm_80", "sm_90a"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((6, 1), ["sm_75", "sm_80"], False),
        ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((12, 0), ["sm_100", "sm_120"], True),
    ],
)
def test_a_gpu_that_torch_has_no_code_for_is_named(
    capability: tuple[int, int], built_for: list[str], runs: bool
) -> None:
    why = without_code("Some GPU", capability, built_for)
    assert (why is None) == runs
    if why is not None:
        major, minor = capability
        assert (
            f"no code for Some GPU (compute capability {major}.{minor}), only for {', '.join(built_for)}; install"
            in why
        )


def test_a_gpu_too_old_for_the_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It runs plain torch unless the kernels were asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert EngineConfig(model="m").resolve().attention_backend == "torch"
    said = "Tesla T4 (compute capability 7.5) is too old for the engine's kernels, which need 8.0 or newer"
    assert f"{said}; plain torch is used, which is slower" in caplog.text
    check_gpu(torch.device("cuda"), "torch")
    with pytest.raises(ModelLoadError) as caught:
        check_gpu(torch.device("cuda"), "triton")
    assert str(caught.value) == said


def test_a_cpu_without_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It runs plain torch unless the kernels were asked for."""

    def fail() -> None:
        raise NativeUnavailable("there is no C compiler (cc, gcc or clang) on PATH")

    monkeypatch.setattr(module, "load", fail)
    assert EngineConfig(model="m", device="cpu").resolve().attention_backend == "torch"
    assert (
        "there are no CPU kernels (there is no C compiler (cc, gcc or clang) on PATH); plain torch is used"
        in caplog.text
    )
    shape = CacheShape(2, 16, 1, 64)
    with pytest.raises(
        ModelLoadError, match=r"^the cpu backend cannot be had: there is no C compiler .*; choose .* auto or torch$"
    ):
        make_attention("cpu", shape, 1, torch.float32, CPU)
    with pytest.raises(
        ModelLoadError,
        match=r"^the cpu backend cannot be had: its kernels .* float32, and the dtype is float16; choose",
    ):
        make_attention("cpu", shape, 1, torch.float16, CPU)
    with pytest.raises(ModelLoadError, match=r"^the cpu backend is for the device cpu, and the device is cuda; choose"):
        make_attention("cpu", shape, 1, torch.float32, torch.device("cuda"))


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


@pytest.mark.gpu
def test_a_gpu_past_the_last_is_refused() -> None:
    assert usable_device("cuda").type == "cuda"
    check_gpu(torch.device("cuda"), "triton")
    with pytest.raises(ModelLoadError, match="but the last GPU that torch finds here is cuda:"):
        usable_device(f"cuda:{torch.cuda.device_count()}")
