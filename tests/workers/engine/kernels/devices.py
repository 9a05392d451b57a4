"""Where kernels run in tests: on a card where there is one, else under the interpreter."""

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

_WITHOUT = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")


def CARD(test):  # type: ignore[no-untyped-def]
    """For tests of shapes that the interpreter is too slow for."""
    return pytest.mark.gpu(_WITHOUT(test))
