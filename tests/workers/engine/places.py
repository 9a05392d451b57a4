"""Where the engine's tests run: by the CPU's kernels, in torch, on a GPU, and by the GPU's
kernels under Triton's interpreter.

Tests that take a `place` run unchanged on all of theirs. Arithmetic is float32 everywhere (the
GPU's without TF32, as is torch's default), so that greedy tokens are the same ones. The
interpreter is slow, so it has tests of its own, with few tokens.
"""

from dataclasses import dataclass
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.workers.engine.native.available import missing_native

_LOCKS = TemporaryDirectory()
"""Of this process alone, so that tests may share a GPU: their caches are small."""


@dataclass(frozen=True)
class Place:
    """Settings of an `EngineConfig`."""

    device: str
    attention_backend: str

    def settings(self) -> dict[str, str]:
        chosen = {"device": self.device, "attention_backend": self.attention_backend, "dtype": "float32"}
        return chosen if self.device == "cpu" else {**chosen, "device_lock_folder": _LOCKS.name}


TORCH = Place("cpu", "torch")
CPU = TORCH if missing_native() else Place("cpu", "cpu")
INTERPRETER = Place("cpu", "triton")
GPU = Place("cuda", "triton")

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here")

on_gpu = pytest.param(GPU, id="gpu", marks=pytest.mark.gpu)
interpreted = pytest.param(INTERPRETER, id="interpreter", marks=[pytest.mark.proof, needs_interpreter])

in_torch = pytest.param(
    TORCH,
    id="torch",
    marks=[pytest.mark.proof, pytest.mark.skipif(CPU == TORCH, reason="that is what the CPU runs with here")],
)

at = pytest.mark.parametrize("place", [pytest.param(CPU, id="cpu"), on_gpu])
at_all = pytest.mark.parametrize("place", [pytest.param(CPU, id="cpu"), in_torch, on_gpu])
"""For tests of the whole engine."""
