"""What the native library's tests share."""

from collections.abc import Iterator

import pytest
import torch

from workers.engine.native.library import load


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """As many afterwards as before."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def products() -> None:
    """Of packed matrices, for which not every processor has the instructions."""
    if not load().matmul_supported():
        pytest.skip("this processor has no AVX512-BF16")
