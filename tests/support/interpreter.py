"""Where there is no GPU that torch can use, Triton's interpreter runs the kernels.

It has to be known before Triton is imported.
"""

import os
import sys

import torch


def choose_interpreter() -> None:
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        assert "triton" not in sys.modules
        os.environ["TRITON_INTERPRET"] = "1"
