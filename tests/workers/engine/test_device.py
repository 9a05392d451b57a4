"""What is said of a device that cannot do what is asked of it."""

import pytest
import torch

from workers.engine.device import unfit_for, usable_device
from workers.engine.errors import ModelLoadError


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
def test_a_build_without_cuda_is_named() -> None:
    with pytest.raises(ModelLoadError, match=r"the device is cuda, but torch \S+ finds 0 GPUs here, for it is a build without CUDA"):
        usable_device("cuda")


def test_a_card_too_old_for_a_dtype_is_named_with_what_to_use() -> None:
    why = unfit_for(torch.bfloat16, "Tesla T4", (7, 5))
    assert why == "Tesla T4 (compute capability 7.5) has no bfloat16, which came with 8.0; use the dtype float16 or float32"
    assert unfit_for(torch.float16, "Tesla T4", (7, 5)) is None
    assert unfit_for(torch.bfloat16, "A100", (8, 0)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_a_card_past_the_last_is_refused() -> None:
    assert usable_device("cuda").type == "cuda"
    with pytest.raises(ModelLoadError, match=r"finds \d+ GPUs here; "):
        usable_device(f"cuda:{torch.cuda.device_count()}")
