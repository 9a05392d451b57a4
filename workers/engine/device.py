"""Whether a device is there and fit for what is asked of it. All that can be wrong becomes one sentence that says what to do."""

from __future__ import annotations

import torch

from workers.engine.config import EngineConfig
from workers.engine.device_lock import TakenCards, take_cards
from workers.engine.errors import ModelLoadError

_BFLOAT16_SINCE = (8, 0)  # compute capability


def usable_device(name: str) -> torch.device:
    """The device of that name. Raises ModelLoadError where there is none, or none that this torch can use."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"unknown device {name!r}; choose auto, cpu or cuda")
    if device.type == "cuda":
        found = torch.cuda.device_count()
        if (device.index or 0) >= found:
            problem = f"the device is {name}, but torch {torch.__version__} finds {found} GPUs here"
            raise ModelLoadError(f"{problem}{'' if found else _why_none()}; run with the device cpu, or put that right")
        try:
            torch.cuda.current_device()
        except RuntimeError as error:
            raise ModelLoadError(f"the device {name} cannot be used: {_one_line(error)}") from error
    return device


def _why_none() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return ", for it is a build without CUDA (the default index of pip has one with it)"
    try:
        torch.cuda.current_device()
    except RuntimeError as error:  # an old driver, or none; or every card is hidden
        return f" ({_one_line(error)})"
    return ""


def take_devices(config: EngineConfig) -> tuple[list[str], TakenCards]:
    """A device for each rank of a replica, and the locks that keep other workers of this host from its cards.

    On a CPU nothing is locked. Raises ModelLoadError where too few cards are free.
    """
    device, size = usable_device(config.device), config.tensor_parallel_size
    if device.type != "cuda":
        return [config.device] * size, TakenCards([], [])
    names = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]
    taken = take_cards(names, size, config.device_lock_folder, device.index)
    return [f"cuda:{index}" for index in taken.indices], taken


def check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ModelLoadError for a card that is too old for `dtype`."""
    if device.type == "cuda":
        why = unfit_for(dtype, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
        if why is not None:
            raise ModelLoadError(why)


def unfit_for(dtype: torch.dtype, card: str, capability: tuple[int, int]) -> str | None:
    """What is to be said of a card that does not know `dtype`; None where it does."""
    if dtype != torch.bfloat16 or capability >= _BFLOAT16_SINCE:
        return None
    major, minor = capability
    return f"{card} (compute capability {major}.{minor}) has no bfloat16, which came with 8.0; use the dtype float16 or float32"


def _one_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
