"""What is said of a device that cannot do what is asked of it."""

import re
from pathlib import Path

import pytest
import torch

from workers.engine.device import device as module
from workers.engine.device.device import (
    check_gpu,
    default_device,
    unfit_for,
    unusable_gpu,
    usable_device,
    without_code,
)
from workers.engine.messages.errors import ModelLoadError

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
    assert default_device() == "cpu"
    assert not caplog.records
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    assert default_device() == "cpu"
    assert "using the CPU although there is an NVIDIA GPU: torch" in caplog.text


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
                "the NVIDIA driver supports CUDA up to 12.2 and torch .* needs 13.0; update the driver, or install a"
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
            "CUDA_VISIBLE_DEVICES= hides all GPUs from torch; unset it or choose the device cpu",
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
    assert why == "Tesla T4 (compute capability 7.5) has no bfloat16, which needs 8.0; use the dtype float16 or float32"
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


@pytest.mark.gpu
def test_a_gpu_past_the_last_is_refused() -> None:
    assert usable_device("cuda").type == "cuda"
    check_gpu(torch.device("cuda"), torch.float16)
    with pytest.raises(ModelLoadError, match="but the last GPU that torch finds here is cuda:"):
        usable_device(f"cuda:{torch.cuda.device_count()}")
