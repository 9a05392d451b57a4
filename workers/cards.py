"""What the driver tells of GPUs, through NVML. Imports its library only when asked for a card."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jobs.gauges import CardGauges

logger = logging.getLogger(__name__)


def card_gauges(uuids: list[str]) -> list[CardGauges]:
    """Use, memory and power of these cards. Blocks for milliseconds. Empty where there is no card, library (nvidia-ml-py) or driver."""
    if not uuids:
        return []
    try:
        import pynvml
    except ImportError:
        logger.debug("nvidia-ml-py is not installed: nothing is told of the cards")
        return []
    try:
        pynvml.nvmlInit()  # counted by the library; the first call alone does something
        return [_of_card(pynvml, uuid) for uuid in uuids]
    except pynvml.NVMLError as error:
        logger.debug("nothing is told of the cards: %s", error)
        return []


def _of_card(nvml: Any, uuid: str) -> CardGauges:
    """Raises NVMLError where the driver does not know the card."""
    card = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def told(ask: Callable[[Any], Any]) -> Any:
        """None for what this card, or a part of one, does not tell."""
        try:
            return ask(card)
        except nvml.NVMLError:
            return None

    rates, memory, milliwatts = (
        told(ask) for ask in (nvml.nvmlDeviceGetUtilizationRates, nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlDeviceGetPowerUsage)
    )
    return CardGauges(
        name=str(nvml.nvmlDeviceGetName(card)),
        uuid=uuid,
        busy=rates.gpu / 100 if rates is not None else None,
        memory_used=memory.used if memory is not None else None,
        memory_total=memory.total if memory is not None else None,
        watts=milliwatts / 1000 if milliwatts is not None else None,
    )
