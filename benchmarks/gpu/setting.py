"""The setting in which a row is measured."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from benchmarks.gpu.roofline import Gpu
from workers.engine.messages.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a row.

    `scratch` is a folder for checkpoints, shared by the rows of a run. `gpu` has the results of
    the row "card", if it was measured. On "cpu" everything is tiny: such a run only shows that the
    benchmark works.
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
    """Return the reason why there is no GPU to measure, or None."""
    # In a separate process, since CUDA keeps GPU memory for each process that uses it
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as asked:
        return asked.submit(_why_unusable, "cuda").result()


def _why_unusable(device: str) -> str | None:
    from workers.engine.device.device import usable_device

    try:
        usable_device(device)
    except ModelLoadError as error:
        return str(error)
    return None
