"""The parts of a layer's weights that each rank loads."""

import pytest
import torch

from workers.engine.layers.linear import load_sinks
from workers.engine.layers.parallel import Parallel
from workers.engine.layers.weights import Weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_has_the_sinks_of_its_heads(dtype: torch.dtype) -> None:
    whole = torch.randn(6).bfloat16().float()
    for rank in range(2):
        weights = Weights({"sinks": lambda: whole}, dtype, torch.device("cpu"), parallel=Parallel(rank, 2))
        sinks = load_sinks(weights, "sinks", 3)
        assert sinks.dtype == torch.float32
        assert sinks.equal(whole[3 * rank : 3 * rank + 3])
