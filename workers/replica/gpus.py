"""Read GPU metrics from the driver through NVML; its library is imported only for a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from jobs.extras import install_command
from jobs.queue.gauges import GpuGauges

logger = logging.getLogger(__name__)


def gpu_gauges(uuids: list[str]) -> list[GpuGauges]:
    """Return utilization, memory and power of these GPUs. Blocks for milliseconds.

    The list is empty without GPU, library (nvidia-ml-py) or driver, and if another library has that
    name; the reason is logged once.
    """
    if not uuids:
        return []
    try:
        import pynvml

        pynvml.nvmlInit()  # reference-counted; only the first call initializes
        return [_gauges_of(pynvml, uuid) for uuid in uuids]
    except ImportError:
        _warn_once(f"nvidia-ml-py is not installed: {install_command('cuda')}")
    except Exception as error:
        _warn_once(f"{type(error).__name__}: {error}")
    return []


@cache
def _warn_once(reason: str) -> None:
    logger.warning("GPU metrics unavailable: %s", reason)


def _gauges_of(nvml: Any, uuid: str) -> GpuGauges:
    """Return the metrics of one GPU. Raise NVMLError if the driver does not have it."""
    gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def reported(ask: Callable[[Any], Any]) -> Any:
        """Return a metric, or None if this GPU or partition does not report it."""
        try:
            return ask(gpu)
        except nvml.NVMLError:
            return None

    rates, memory, milliwatts = (
        reported(ask)
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
