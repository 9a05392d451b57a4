"""Whether a device is there and fit for what is asked of it.

All that can be wrong becomes one sentence that says what to do.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from workers.engine.device.device_lock import TakenGpus, take_gpus
from workers.engine.device.out_of_memory import one_line
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.errors import ModelLoadError
from workers.engine.native.build import NativeUnavailable
from workers.engine.native.library import load

logger = logging.getLogger(__name__)

_BFLOAT16_SINCE = (8, 0)  # compute capability
_KERNELS_SINCE = (
    8,
    0,
)  # what Triton supports; on what came before, `attend` also takes more shared memory than there is
_TRITON_SINCE = (3, 6)
_HALF = ("float16", "fp16", "half")
_NATIVE_DTYPES = (torch.bfloat16, torch.float32)
_GPUS = Path("/proc/driver/nvidia/gpus")


def default_device() -> str:
    """Return a GPU where torch can use one, else the CPU; log why where there is a GPU that torch
    cannot use.
    """
    if torch.cuda.is_available():
        return "cuda"
    if _GPUS.is_dir() and any(_GPUS.iterdir()):
        logger.warning("the CPU is used though there is an NVIDIA GPU: %s", _why_unusable() or "torch finds none")
    return "cpu"


def default_backend(device: str, dtype: str = "auto") -> str:
    """Return the kernels for a GPU or a CPU where they run, else plain torch, with a line in the
    log that says why. Takes the name of a device, which may be none that is there, and the dtype's
    as it was asked for.
    """
    _, _, index = device.partition(":")
    if not device.startswith("cuda"):
        why = _no_native(torch.float16 if dtype in _HALF else torch.float32)
        if why is not None:
            logger.warning("there are no CPU kernels (%s); plain torch is used, which is slower", why)
        return "cpu" if why is None else "torch"
    if torch.cuda.is_available() and int(index or 0) < torch.cuda.device_count():
        why = _too_old_for_kernels(*_gpu(torch.device(device)))
        if why is not None:
            logger.warning("%s; plain torch is used, which is slower", why)
            return "torch"
    return "triton"


def usable_device(name: str) -> torch.device:
    """Return the device of that name.

    Raises ModelLoadError where there is none, or none that this torch can use.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"unknown device {name!r}; choose auto, cpu or cuda")
    if device.type == "cuda":
        why = _why_unusable()
        if why is not None:
            raise ModelLoadError(f"the device is {name}, but {why}")
        found = torch.cuda.device_count()
        if (device.index or 0) >= found:
            raise ModelLoadError(
                f"the device is {name}, but the last GPU that torch finds here is cuda:{found - 1}; choose cuda for any"
            )
    return device


def _why_unusable() -> str | None:
    """Return why torch can use no GPU of this machine, and what to do; None where it can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} is a build without CUDA; install one with it (pytorch.org/get-started) or"
            " choose the device cpu"
        )
    try:
        torch.cuda.current_device()
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        return unusable_gpu(one_line(error), torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return None


def unusable_gpu(error: str, cuda: str | None, visible: str | None) -> str:
    """Return what torch's error means and what to do about it.

    `cuda`: the version that torch was built for; `visible`: CUDA_VISIBLE_DEVICES.
    """
    driver = re.search(r"driver on your system is too old \(found version (\d+)\)", error)
    if driver:
        has = f"{int(driver[1]) // 1000}.{int(driver[1]) % 1000 // 10}"
        advice = f"update the driver, or install a torch that is built for CUDA {has} or older"
        return f"the NVIDIA driver here knows CUDA up to {has} and torch {torch.__version__} needs {cuda}; {advice}"
    if "Found no NVIDIA driver" in error:
        return (
            "there is no NVIDIA driver here; install one, give a container its GPUs (--gpus all), or choose the"
            " device cpu"
        )
    if visible is not None and "No CUDA GPUs are available" in error:
        return f"CUDA_VISIBLE_DEVICES={visible} leaves torch no GPU; unset it or choose the device cpu"
    return (
        f"torch cannot use a GPU here ({error.rstrip('.')}); see whether nvidia-smi lists one, or choose the device cpu"
    )


def check_gpu(device: torch.device, backend: str) -> None:
    """Raise ModelLoadError for a GPU that this torch, or the kernels of `backend`, cannot run
    on.
    """
    if device.type == "cuda":
        gpu, capability = _gpu(device)
        why = without_code(gpu, capability, torch.cuda.get_arch_list()) if torch.version.cuda else None
        if why is None and backend == "triton":
            why = _too_old_for_kernels(gpu, capability)
        if why is not None:
            raise ModelLoadError(why)
    if backend == "triton":
        require_triton(device)


def _gpu(device: torch.device) -> tuple[str, tuple[int, int]]:
    return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)


def without_code(gpu: str, capability: tuple[int, int], built_for: list[str]) -> str | None:
    """Return what is to be said where torch has no code for a GPU; None where it has.

    `built_for`: as `torch.cuda.get_arch_list` gives it.
    """
    # Machine code runs on later GPUs of the same generation, intermediate code ("compute") on all
    # later ones.
    for name in built_for:
        kind, number = name.rstrip("af").split("_")
        major, minor = divmod(int(number), 10)
        if (major, minor) <= capability and (kind == "compute" or major == capability[0]):
            return None
    if not built_for:
        return None
    of = f"compute capability {capability[0]}.{capability[1]}"
    return (
        f"torch {torch.__version__} has no code for {gpu} ({of}), only for {', '.join(built_for)}; install a torch"
        " that is built for it"
    )


def _too_old_for_kernels(gpu: str, capability: tuple[int, int]) -> str | None:
    if capability >= _KERNELS_SINCE:
        return None
    return (
        f"{gpu} (compute capability {capability[0]}.{capability[1]}) is too old for the engine's kernels, which need"
        " 8.0 or newer"
    )


def require_triton(device: torch.device) -> None:
    """Raise ModelLoadError where Triton is absent, too old or unable to run a kernel on the
    device.
    """
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ModelLoadError(
            "the triton backend needs a GPU; on a CPU choose attention_backend torch, or set TRITON_INTERPRET=1 to test"
            " kernels"
        )
    if device.type == "cuda" and os.environ.get("TRITON_INTERPRET") == "1":
        raise ModelLoadError(
            "TRITON_INTERPRET=1 has kernels run on the CPU, one element at a time; unset it to use the GPU"
        )
    needed = _triton_of_torch()
    install = f"pip install triton=={needed}" if needed else "pip install 'triton>=3.6'"
    try:
        installed = metadata.version("triton")
    except metadata.PackageNotFoundError:
        raise ModelLoadError(f"the engine's kernels need Triton, which is not installed; {install}") from None
    if _numbers(installed) < _TRITON_SINCE:
        raise ModelLoadError(f"the engine's kernels need Triton 3.6 or newer, and {installed} is installed; {install}")
    try:
        from workers.engine.kernels.smoke_test import run_smoke_test

        run_smoke_test(device)
    except Exception as error:  # whatever a compiler, a linker, a driver or a mixture of versions may say
        raise ModelLoadError(
            f"Triton {installed} cannot run a kernel on {device}: {triton_trouble(error, installed, needed)}"
        ) from error


def triton_trouble(error: Exception, installed: str, needed: str | None) -> str:
    """Return what a kernel's failure means and what to do about it.

    `needed`: the version that torch was made with, where it names one.
    """
    what = one_line(error).rstrip(".")
    if isinstance(error, subprocess.CalledProcessError) or "C compiler" in what:
        return (
            f"{what}; it builds its launcher with a C compiler and Python's headers: install gcc and python3-dev, or"
            " set CC"
        )
    if needed is not None and _numbers(needed)[:2] != _numbers(installed)[:2]:
        return f"{what}; torch {torch.__version__} goes with Triton {needed}: pip install triton=={needed}"
    if "PTX" in what or "kernel image" in what:
        return f"{what}; the NVIDIA driver is older than the CUDA that this Triton compiles for: update the driver"
    return f"{what}; install torch and Triton together, as pip chooses them"


def require_native(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ModelLoadError where the CPU's own kernels cannot do what is asked for."""
    if device.type != "cpu":
        raise ModelLoadError(
            f"the cpu backend is for the device cpu, and the device is {device}; choose attention_backend auto"
        )
    why = _no_native(dtype)
    if why is not None:
        raise ModelLoadError(f"the cpu backend cannot be had: {why}; choose attention_backend auto or torch")


def _no_native(dtype: torch.dtype) -> str | None:
    """Return why there are no CPU kernels for a model of `dtype`; None where there are."""
    if dtype not in _NATIVE_DTYPES:
        return f"its kernels compute in bfloat16 and float32, and the dtype is {str(dtype).removeprefix('torch.')}"
    try:
        load()
    except NativeUnavailable as error:
        return str(error)
    return None


def _triton_of_torch() -> str | None:
    wanted = (re.match(r"triton\s*==\s*([\d.]+)", line) for line in metadata.requires("torch") or [])
    return next((found[1] for found in wanted if found), None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def take_devices(config: EngineConfig) -> tuple[list[str], TakenGpus]:
    """Return a device for each rank of a replica, and the locks that keep other workers of this
    host from its GPUs.

    On a CPU nothing is locked. Raises ModelLoadError where too few GPUs are free.
    """
    device, size = usable_device(config.device), config.tensor_parallel_size
    if device.type != "cuda":
        return [config.device] * size, TakenGpus([], [], [])
    names = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]
    taken = take_gpus(names, size, config.device_lock_folder, device.index)
    return [f"cuda:{index}" for index in taken.indices], taken


def check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ModelLoadError for a GPU that is too old for `dtype`."""
    if device.type == "cuda":
        why = unfit_for(dtype, *_gpu(device))
        if why is not None:
            raise ModelLoadError(why)


def unfit_for(dtype: torch.dtype, gpu: str, capability: tuple[int, int]) -> str | None:
    """Return what is to be said of a GPU that does not know `dtype`; None where it does."""
    if dtype != torch.bfloat16 or capability >= _BFLOAT16_SINCE:
        return None
    major, minor = capability
    return (
        f"{gpu} (compute capability {major}.{minor}) has no bfloat16, which came with 8.0; use the dtype float16 or"
        " float32"
    )
