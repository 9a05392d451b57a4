"""Masks of grammars in C against their definition, with every width of vectors that the processor
has.
"""

import ctypes
import os
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.workers.engine.native.available import needs_native
from tests.workers.engine.sampling.masks import SIZES, check_masks_are_applied, every_kind
from workers.engine.backends.cpu import CpuBackend
from workers.engine.native import build, draw
from workers.engine.native.levels import THIS_PROCESSOR

pytestmark = needs_native


def apply(logits: Tensor, rows: NDArray[np.int64], masks: NDArray[np.int32]) -> None:
    CpuBackend().draw(1, logits.shape[1], logits.device).apply_masks(logits, rows, masks)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", SIZES)
def test_equals_the_definition(vocab: int, threads: int) -> None:
    torch.set_num_threads(threads)
    check_masks_are_applied(apply, vocab)


@pytest.mark.parametrize("narrower", ["-mno-avx512f", pytest.param("-mno-avx", marks=pytest.mark.proof)])
def test_narrower_vectors(narrower: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that has no wider ones."""
    if os.uname().machine != "x86_64":
        pytest.skip("AVX is of x86-64")
    library = tmp_path / "mask.so"
    compiler = [*build.find_compilers()[0], *build._FLAGS, "-shared", *THIS_PROCESSOR, narrower]
    sources = [str(build.SOURCE / name) for name in ("grammar_mask.c", "parallel.c")]
    subprocess.run([*compiler, *sources, "-o", str(library)], check=True)
    print(shlex.join(compiler))
    monkeypatch.setattr(draw, "load", lambda: ctypes.CDLL(str(library)))
    draw._mask_rows.cache_clear()
    try:
        for vocab in SIZES:
            check_masks_are_applied(apply, vocab)
    finally:
        draw._mask_rows.cache_clear()


def test_masks_that_are_part_of_a_larger_array() -> None:
    masks = np.zeros((12, 18), np.int32)
    masks[::2, ::2] = every_kind(257)
    check_masks_are_applied(lambda logits, rows, _: apply(logits, rows, masks[::2, ::2]), 257)


def test_no_rows() -> None:
    logits = torch.randn(2, 40)
    before = logits.clone()
    apply(logits, np.empty(0, np.int64), np.empty((0, 2), np.int32))
    assert logits.equal(before)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"masks must be int32 \[6, 9\], got int32 \[6, 8\]"):
        apply(torch.zeros(6, 257), np.arange(6), every_kind(256))
    with pytest.raises(ValueError, match=r"masks are of rows \[-1, 1\], and there are 6"):
        apply(torch.zeros(6, 257), np.array([-1, 1]), every_kind(257)[:2])
