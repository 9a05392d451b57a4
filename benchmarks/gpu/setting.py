"""What a row is measured with."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from benchmarks.gpu.roofline import Gpu
from workers.engine.messages.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Setting:
    """`scratch` is a folder for checkpoints, shared by the rows of a run.

    `gpu` is what the row "card" measured, if it did.

    On "cpu" everything is tiny: it shows that the benchmark runs, and its figures compare to
    nothing.
    """

    device: str  # "cuda" or "cpu"
    scratch: str
    gpu: Gpu | None = None

    @property
    def tiny(self) -> bool:
        return self.device == "cpu"


class NeedsGpu(Exception):
    """The row can only be measured on a GPU."""


def no_gpu() -> str | None:
    """Return why there is no GPU to measure; None where there is one."""
    # Asked in a process of its own: CUDA keeps memory of a GPU for each that uses it.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as asked:
        return asked.submit(_why_unusable, "cuda").result()


def _why_unusable(device: str) -> str | None:
    from workers.engine.device.device import usable_device

    try:
        usable_device(device)
    except ModelLoadError as error:
        return str(error)
    return None
