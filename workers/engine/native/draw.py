"""The draw on a CPU with grammar masks applied in C (`source/grammar_mask.c`)."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.native.library import load
from workers.engine.sampling.draw import TorchDraw
from workers.engine.sampling.grammar_mask import check_masks


class NativeDraw(TorchDraw):
    def apply_masks(self, logits: Tensor, rows: NDArray[np.int64], masks: NDArray[np.int32]) -> None:
        check_masks(logits, rows, masks)
        rows, masks = np.ascontiguousarray(rows), np.ascontiguousarray(masks)
        rows_and_masks = rows.ctypes.data, len(rows), masks.ctypes.data
        _mask_rows()(logits.data_ptr(), logits.shape[1], *rows_and_masks, torch.get_num_threads())


@functools.cache
def _mask_rows() -> ctypes._FuncPointer:
    function, pointer, size = load().mask_rows, ctypes.c_void_p, ctypes.c_ssize_t
    function.argtypes = (pointer, size, pointer, size, pointer, size)
    function.restype = None
    return function
