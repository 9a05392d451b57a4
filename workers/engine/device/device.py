"""Check that a device exists and fits the configuration.

Each error message is one sentence with the remedy.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import torch

from workers.engine.cuda.out_of_memory import one_line
from workers.engine.device.device_lock import TakenGpus, take_gpus
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.errors import ModelLoadError

logger = logging.getLogger(__name__)

_BFLOAT16_SINCE = (8, 0)  # compute capability
_GPUS = Path("/proc/driver/nvidia/gpus")


def default_device() -> str:
    """Return a GPU if torch can use one, else the CPU.

    Logs the reason if there is a GPU that torch cannot use.
    """
    if torch.cuda.is_available():
        return "cuda"
    if _GPUS.is_dir() and any(_GPUS.iterdir()):
        logger.warning("using the CPU although there is an NVIDIA GPU: %s", _why_unusable() or "torch finds none")
    return "cpu"


def usable_device(name: str) -> torch.device:
    """Return the device of that name.

    Raises ModelLoadError if it does not exist or this torch cannot use it.
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
    """Return why torch can use no GPU of this machine, with the remedy; None if it can."""
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
    """Return the meaning of torch's error, with the remedy.

    `cuda`: the version that torch was built for; `visible`: CUDA_VISIBLE_DEVICES.
    """
    driver = re.search(r"driver on your system is too old \(found version (\d+)\)", error)
    if driver:
        has = f"{int(driver[1]) // 1000}.{int(driver[1]) % 1000 // 10}"
        advice = f"update the driver, or install a torch that is built for CUDA {has} or older"
        return f"the NVIDIA driver supports CUDA up to {has} and torch {torch.__version__} needs {cuda}; {advice}"
    if "Found no NVIDIA driver" in error:
        return (
            "there is no NVIDIA driver here; install one, give a container its GPUs (--gpus all), or choose the"
            " device cpu"
        )
    if visible is not None and "No CUDA GPUs are available" in error:
        return f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs from torch; unset it or choose the device cpu"
    return (
        f"torch cannot use a GPU here ({error.rstrip('.')}); see whether nvidia-smi lists one, or choose the device cpu"
    )


def check_gpu(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ModelLoadError if this torch has no code for the GPU, or the GPU is too old for
    `dtype`.
    """
    if device.type != "cuda":
        return
    gpu, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    why = without_code(gpu, capability, torch.cuda.get_arch_list()) if torch.version.cuda else None
    why = why or unfit_for(dtype, gpu, capability)
    if why is not None:
        raise ModelLoadError(why)


def without_code(gpu: str, capability: tuple[int, int], built_for: list[str]) -> str | None:
    """Return the error text if torch has no code for a GPU; None if it has.

    `built_for`: the result of `torch.cuda.get_arch_list`.
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


def take_devices(config: EngineConfig) -> tuple[list[str], TakenGpus]:
    """Return a device for each rank of a replica, and the locks on its GPUs.

    The locks exclude other workers of this host. On a CPU nothing is locked. Raises ModelLoadError
    if too few GPUs are free.
    """
    name, size = default_device() if config.device == "auto" else config.device, config.tensor_parallel_size
    device = usable_device(name)
    if device.type != "cuda":
        return [name] * size, TakenGpus([], [], [])
    names = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]
    taken = take_gpus(names, size, config.device_lock_folder, device.index)
    return [f"cuda:{index}" for index in taken.indices], taken


def unfit_for(dtype: torch.dtype, gpu: str, capability: tuple[int, int]) -> str | None:
    """Return the error text for a GPU without support for `dtype`; None if it has support."""
    if dtype != torch.bfloat16 or capability >= _BFLOAT16_SINCE:
        return None
    major, minor = capability
    return (
        f"{gpu} (compute capability {major}.{minor}) has no bfloat16, which needs 8.0; use the dtype float16 or float32"
    )
