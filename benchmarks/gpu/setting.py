"""What a row is measured with."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from benchmarks.gpu.roofline import Card
from workers.engine.messages.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Setting:
    """`scratch` is a folder for checkpoints, shared by the rows of a run.

    `card` is what the row of that name measured, if it did.

    On "cpu" everything is tiny: it shows that the benchmark runs, and its figures compare to
    nothing.
    """

    device: str  # "cuda" or "cpu"
    scratch: str
    card: Card | None = None

    @property
    def tiny(self) -> bool:
        return self.device == "cpu"


class NeedsCard(Exception):
    """The row can only be measured on a card."""


def no_card() -> str | None:
    """Why there is no card to measure; None where there is one."""
    # Asked in a process of its own: CUDA keeps memory of a card for each that uses it.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as asked:
        return asked.submit(_why_unusable, "cuda").result()


def _why_unusable(device: str) -> str | None:
    from workers.engine.device.device import usable_device

    try:
        usable_device(device)
    except ModelLoadError as error:
        return str(error)
    return None
