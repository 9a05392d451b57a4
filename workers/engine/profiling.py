"""Where a step's time goes: named spans for Nsight Systems (NVTX) and for torch's profiler, and a
trace of some steps.

Imports torch only once it is turned on, so that the scheduler's side may use `span`.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from workers.engine.messages.errors import ModelLoadError

if TYPE_CHECKING:
    from torch.profiler import profile

logger = logging.getLogger(__name__)

FIRST_STEP = 64
"""Steps before a trace begins: by then kernels are loaded and tuned, the usual graphs are captured,
and a full load decodes.
"""

STEPS = 32
"""Steps in a trace; those of the demo model on a CPU take 0.7 MB."""

_NOTHING = nullcontext()
_marker: Callable[[str], AbstractContextManager[object]] | None = None


def span(name: str) -> AbstractContextManager[object]:
    """Names what runs inside it: schedule, inputs, forward, masks, sample, retire.

    One shared object that does nothing until `mark_spans`.
    """
    return _NOTHING if _marker is None else _marker(name)


def mark_spans() -> None:
    """From now on, in this process, spans show in torch's profiler and, with a CUDA build of torch,
    as NVTX ranges.
    """
    import torch

    global _marker
    _marker = _nvtx_and_torch if torch.version.cuda else torch.profiler.record_function


@contextmanager
def _nvtx_and_torch(name: str) -> Iterator[None]:
    import torch

    with torch.profiler.record_function(name), torch.cuda.nvtx.range(name):
        yield


def make_profile_folder(folder: Path) -> None:
    """Raise ModelLoadError where there cannot be a folder, or no file in it.

    Imports no torch, so that a command can ask at once.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ModelLoadError(f"the profile folder {folder} cannot be made or written to: {error.strerror}") from error


class StepTrace:
    """Writes one trace of `STEPS` steps from step `FIRST_STEP` on into `folder`, in Chrome's
    format, for Perfetto.

    Raises ModelLoadError where it cannot be written there.
    """

    def __init__(self, folder: Path, device: str) -> None:
        make_profile_folder(folder)
        self.file = folder / f"steps-{FIRST_STEP}-to-{FIRST_STEP + STEPS - 1}-core-{os.getpid()}.json.gz"
        self._on_device = device.startswith("cuda")
        self._steps = 0
        self._profile: profile | None = None
        mark_spans()

    def next_step(self) -> None:
        """To be called before each step."""
        if self._steps == FIRST_STEP:
            self._begin()
        elif self._steps == FIRST_STEP + STEPS:
            self._write()
        self._steps += 1

    def close(self) -> None:
        """Write what there is of a trace that was cut short."""
        if self._profile is not None:
            self._write()
        elif self._steps <= FIRST_STEP:
            logger.warning(
                "nothing was profiled: there were %d steps, and a trace begins after %d", self._steps, FIRST_STEP
            )

    def _begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_device else [])]
        self._profile = profile(activities=activities)
        self._profile.start()

    def _write(self) -> None:
        assert self._profile is not None
        profiled, self._profile = self._profile, None
        profiled.stop()
        try:
            profiled.export_chrome_trace(str(self.file))
        except (OSError, RuntimeError) as error:
            logger.error("the profile cannot be written: %s", error)
        else:
            logger.info("a profile of %d steps is in %s", min(STEPS, self._steps - FIRST_STEP), self.file)
