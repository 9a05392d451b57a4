"""Activations against those of transformers by the same name."""

import pytest
import torch
from transformers.activations import ACT2FN

from workers.engine.layers.activation import XIELU, activation
from workers.engine.layers.linear import load_xielu
from workers.engine.layers.parallel import Shard
from workers.engine.layers.weights import Weights

VALUES = torch.linspace(-20, 20, 4001)


@pytest.mark.parametrize(
    "name",
    ["silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu"],
)
def test_a_name_means_what_it_does_in_transformers(name: str) -> None:
    torch.testing.assert_close(activation(name)(VALUES), ACT2FN[name](VALUES))


def test_an_xielu_has_the_factors_of_its_layer() -> None:
    theirs = ACT2FN["xielu"].float()
    factors = {"alpha_p": torch.tensor([0.7]), "alpha_n": torch.tensor([-0.4])}
    theirs.alpha_p.data, theirs.alpha_n.data = factors.values()
    torch.testing.assert_close(XIELU(**factors)(VALUES), theirs(VALUES))
    tensors = {f"act_fn.{name}": lambda factor=factor: factor for name, factor in factors.items()}
    weight, x = torch.randn(6, 4), torch.randn(3, 4)
    weights = Weights(tensors | {"up_proj.weight": lambda: weight}, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
    up = load_xielu(weights, "up_proj", "act_fn", 4, Shard(0, 6, 6), bias=False)
    torch.testing.assert_close(up(x), theirs(x @ weight.t()))
