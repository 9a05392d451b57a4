"""What the driver tells of GPUs, through NVML. Imports its library only when asked for a card."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from jobs.queue.gauges import GpuGauges

logger = logging.getLogger(__name__)


def gpu_gauges(uuids: list[str]) -> list[GpuGauges]:
    """Use, memory and power of these cards. Blocks for milliseconds.

    Empty where there is no card, library (nvidia-ml-py) or driver, and where a library of that name
    does something else; says why once.
    """
    if not uuids:
        return []
    try:
        import pynvml

        pynvml.nvmlInit()  # counted by the library; the first call alone does something
        return [_of_gpu(pynvml, uuid) for uuid in uuids]
    except ImportError:
        _say("nvidia-ml-py is not installed (it comes with the extra `cuda`)")
    except Exception as error:
        _say(f"{type(error).__name__}: {error}")
    return []


@cache
def _say(reason: str) -> None:
    logger.warning("nothing is told of the cards: %s", reason)


def _of_gpu(nvml: Any, uuid: str) -> GpuGauges:
    """Raises NVMLError where the driver does not know the card."""
    gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def told(ask: Callable[[Any], Any]) -> Any:
        """None for what this card, or a part of one, does not tell."""
        try:
            return ask(gpu)
        except nvml.NVMLError:
            return None

    rates, memory, milliwatts = (
        told(ask)
        for ask in (nvml.nvmlDeviceGetUtilizationRates, nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlDeviceGetPowerUsage)
    )
    return GpuGauges(
        name=str(nvml.nvmlDeviceGetName(gpu)),
        uuid=uuid,
        busy=rates.gpu / 100 if rates is not None else None,
        memory_used=memory.used if memory is not None else None,
        memory_total=memory.total if memory is not None else None,
        watts=milliwatts / 1000 if milliwatts is not None else None,
    )
