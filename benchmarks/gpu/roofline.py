"""The least time that a workload can take on a GPU, from the measured rates of its memory and its
matrix units.

Two kinds of work are counted. Prompts: every token runs through all matrices once, 2 operations per
weight, at the matrix rate. Decoding: each step reads all weights once and every running request's
keys and values once, at the copy bandwidth, or does its matrix operations at the matrix rate,
whichever takes longer. All requests run at once from the first step on; step t has those whose
answer is longer than t, each with a context of its prompt and t tokens. Nothing else is counted: no
activation, no scheduling, no sampling, no launch, and no attention over the prompt (under 2 % of a
prompt's operations at the lengths used here). So no engine reaches it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu.workload import Workload


@dataclass(frozen=True, slots=True)
class Gpu:
    """The measured rates of a GPU."""

    copy_bytes_per_second: float  # read and written, as a copy moves them
    matrix_operations_per_second: float


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The cost of one token for a decoder with gated or plain projections.

    The head has 2 bytes per weight.
    """

    layer_weights: int  # elements of all layers' matrices
    head_weights: int  # elements of the output projection
    kv_bytes_per_token: int
    layer_bytes: float = 2  # of an element of a layer's matrix

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that a decode step reads, without embedding rows."""
        return round(self.layer_bytes * self.layer_weights) + 2 * self.head_weights


def cost_of(shape: Mapping[str, Any], kv_bytes: int = 2, layer_bytes: float = 2) -> ModelCost:
    """Return the cost for a Llama-like shape, with the names of transformers' configurations.

    `kv_bytes`: bytes of one number of a key or value; `layer_bytes`: of one weight of a layer.
    """
    hidden, inner, layers, heads = (
        shape[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    )
    kv_heads, head_dim = shape["num_key_value_heads"], shape.get("head_dim", hidden // heads)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    return ModelCost(
        layers * (attention + 3 * hidden * inner),
        hidden * shape["vocab_size"],
        layers * 2 * kv_bytes * kv_heads * head_dim,
        layer_bytes,
    )


@dataclass(frozen=True, slots=True)
class Roofline:
    """A workload's least seconds and their parts."""

    prompt_seconds: float
    decode_seconds: float
    weight_bytes: int
    kv_bytes: int
    operations: float

    @property
    def seconds(self) -> float:
        return self.prompt_seconds + self.decode_seconds


def roofline(cost: ModelCost, work: Workload, gpu: Gpu) -> Roofline:
    """Return the least time of a workload; the module docstring defines it."""
    prompts = np.array([len(prompt) for prompt in work.prompts])
    outputs = np.array(work.output_lengths)
    steps = np.arange(1, outputs.max())  # the first token of an answer comes with its prompt
    running = (outputs[None, :] > steps[:, None]).sum(1)
    contexts = np.where(outputs[None, :] > steps[:, None], prompts[None, :] + steps[:, None], 0).sum(1)
    kv_bytes = contexts * cost.kv_bytes_per_token
    operations = 2.0 * running * (cost.layer_weights + cost.head_weights)
    by_memory = (cost.weight_bytes + kv_bytes) / gpu.copy_bytes_per_second
    by_matrix = operations / gpu.matrix_operations_per_second
    prompt_operations = 2.0 * (prompts.sum() * cost.layer_weights + len(prompts) * cost.head_weights)
    return Roofline(
        prompt_seconds=float(prompt_operations / gpu.matrix_operations_per_second),
        decode_seconds=float(np.maximum(by_memory, by_matrix).sum()),
        weight_bytes=int(cost.weight_bytes * len(steps)),
        kv_bytes=int(kv_bytes.sum()),
        operations=float(operations.sum() + prompt_operations),
    )
