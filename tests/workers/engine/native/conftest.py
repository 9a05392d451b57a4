"""What the native library's tests share."""

from collections.abc import Iterator

import pytest
import torch

from workers.engine.native.library import load
from workers.engine.native.packed import can_pack


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """As many afterwards as before."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


DTYPES = [torch.float32, torch.bfloat16]
"""That products with packed matrices are computed in, the latter not by every processor."""


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    if chosen == torch.bfloat16 and not load().multiplies_bf16():
        pytest.skip("this processor has no AVX512-BF16")
    assert can_pack(torch.empty(1, 2, dtype=chosen)), "the kernels are wrong"
    return chosen
