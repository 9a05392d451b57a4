"""Quantized checkpoints by the GPU's kernels: which product each matrix gets, and what it says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers.engine import driving
from tests.workers.engine.checkpoint.quantizing import Case, Parts, change, write
from tests.workers.engine.checkpoint.test_loading import logits
from tests.workers.engine.checkpoint.test_quantized_checkpoint import CASES, CPU, Q_PROJ, packed, weights_of
from tests.workers.engine.loading import load_model
from tests.workers.engine.models.tiny_models import VOCAB
from tests.workers.engine.places import GPU, TORCH, Place, interpreted, needs_interpreter, on_gpu
from workers.engine.checkpoint.decoder_loader import load_weights
from workers.engine.checkpoint.model_checkpoint import open_checkpoint, shard_checkpoint
from workers.engine.checkpoint.readers import weight_readers
from workers.engine.checkpoint.weight_size import weight_bytes
from workers.engine.core import EngineCore
from workers.engine.device.executor import Executor
from workers.engine.kernels.ops import TritonOps
from workers.engine.kernels.quantized_matmul import QuantizedMatmul
from workers.engine.kernels.scaled_matmul import ScaledMatmul, quantize_rows
from workers.engine.layers.base import Ops
from workers.engine.layers.ops import TorchOps
from workers.engine.layers.parallel import Parallel, Shard
from workers.engine.layers.quantized import QuantizedWeight
from workers.engine.layers.weights import Weights
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, SamplingParams
from workers.engine.messages.errors import ModelLoadError

SCALED = ("fp8-matrix", "fp8-large-blocks", "float-tensor", "float-channel")
"""Whose inputs are rounded to float8, too: a tiny matrix is one block of 128 columns."""

KEPT = (
    "gptq-4-32",
    "gptq-4-rows",
    "gptq-8-32",
    "awq-32",
    "awq-128",
    "awq-rows",
    "int-channel",
    "int-tensor",
    "packed-4-32",
    "packed-4-32-asymmetric",
    "packed-8-rows",
    "float-block",
    "float-channel-weights-only",
)
"""Whose weights stay as they are stored, and are multiplied with inputs as they are."""


class RowsInFloat8(TorchOps):
    """Plain torch, whose inputs are rounded as `ScaledMatmul` rounds them."""

    def product(self, weight: Any, bias: Tensor | None) -> Any:
        plain = super().product(weight, bias)

        def rounded(x: Tensor) -> Tensor:
            values, scales = quantize_rows(x.flatten(0, -2))
            return plain((values.float() * scales).view(x.shape))

        return rounded

    def multiplies_float8(self, device: torch.device) -> bool:
        return True


def kinds(model: Any) -> set[type]:
    """Return what multiplies: products with an activation behind them are functions."""
    return {
        type(part)
        for layer in model.stack.layers
        for part in (layer.attention.qkv, layer.attention.output, layer.mlp.down)
    }


@pytest.mark.proof
@needs_interpreter
@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_matrix_gets_its_product(name: str, tmp_path: Path) -> None:
    quantized, _ = write(CASES[name], tmp_path)
    model = load_model(str(quantized), "float32", CPU, ops=TritonOps())
    assert (QuantizedMatmul in kinds(model)) == (name in KEPT)
    assert (ScaledMatmul in kinds(model)) == (name in SCALED)
    reference: Ops = RowsInFloat8() if name in SCALED else TorchOps()
    expected = logits(load_model(str(quantized), "float32", CPU, ops=reference))
    # Dequantized weights are rounded to 16 bits
    assert (logits(model) - expected).norm() < 0.02 * expected.norm()


@pytest.mark.proof
@needs_interpreter
@pytest.mark.parametrize("name", ["packed-4-32-asymmetric", "float-channel", "float-block"])
def test_ranks_take_their_parts(name: str, tmp_path: Path) -> None:
    quantized, _ = write(CASES[name], tmp_path)
    found = []
    for ops in (TritonOps(), TorchOps()):
        shared = shard_checkpoint(open_checkpoint(str(quantized)), 2)
        ranks = [load_weights(shared, torch.float32, CPU, ops=ops, parallel=Parallel(rank, 2)) for rank in (0, 1)]
        found.append(torch.cat([weight.flatten() for model in ranks for weight in weights_of(model)]))
    assert (found[0] - found[1]).norm() < 0.01 * found[1].norm()


class OnMeta(TorchDispatchMode):
    """Records how many numbers the tensors have that are made on the device meta."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.device.type == "meta":
            self.sizes.append(made.numel())
        return made


@needs_interpreter
@pytest.mark.parametrize("name", ["packed-4-32-asymmetric", "packed-8-rows", "float-channel", "float-block"])
def test_a_rank_has_only_its_part_on_the_device(name: str, tmp_path: Path) -> None:
    quantized, _ = write(CASES[name], tmp_path)
    readers, meta = weight_readers(open_checkpoint(str(quantized))), torch.device("meta")
    weights = Weights(readers, torch.bfloat16, meta, ops=TritonOps())
    for take in (
        lambda: weights.take_matrix([f"{Q_PROJ}.weight"], [Shard(32, 32, 64)], 64),
        lambda: weights.take_matrix_columns(f"{Q_PROJ}.weight", 64, Shard(32, 32, 64)),
    ):
        with OnMeta() as made:
            weight = take().whole()
        assert isinstance(weight, QuantizedWeight)
        assert weight.values.device == weight.scales.device == meta
        assert max(made.sizes) == weight.values.numel() == 32 * 64


@needs_interpreter
def test_projections_of_two_kinds_are_dequantized(tmp_path: Path) -> None:
    case = packed(4, 32)
    settings = case.settings | {"ignore": ["lm_head", Q_PROJ]}
    quantized, _ = write(Case(settings, case.pack, case.dtype), tmp_path, (Q_PROJ,))
    model: Any = load_model(str(quantized), "float32", CPU, ops=TritonOps())
    assert [isinstance(layer.attention.qkv, QuantizedMatmul) for layer in model.stack.layers] == [True, False, True]


@pytest.mark.parametrize("name", ["gptq-4-32", "int-channel", "fp8-matrix", "float-channel", "fp8-large-blocks"])
def test_weights_are_counted_as_what_they_become(name: str, tmp_path: Path) -> None:
    quantized, _ = write(CASES[name], tmp_path)
    checkpoint = open_checkpoint(str(quantized))
    stored = sum(file.stat().st_size for file in quantized.glob("*.safetensors"))
    size = weight_bytes(checkpoint, torch.bfloat16, integers=True, float8=True)
    assert size == pytest.approx(stored, rel=0.3)
    assert weight_bytes(checkpoint, torch.bfloat16) > 1.5 * stored


@pytest.mark.parametrize("name", [*KEPT, *SCALED])
def test_scales_and_zero_points_are_counted(name: str, tmp_path: Path) -> None:
    quantized, _ = write(CASES[name], tmp_path)
    checkpoint = open_checkpoint(str(quantized))
    readers: dict[str, Any] = weight_readers(checkpoint)
    expected = 0
    for tensor, reader in readers.items():
        weight = (reader.quantized() or reader.float8()) if tensor.endswith("_proj.weight") else None
        expected += 2 * reader().numel() if weight is None else memory(weight.form)
    assert weight_bytes(checkpoint, torch.bfloat16, integers=True, float8=True) == expected


@pytest.mark.parametrize("broken", [None, torch.tensor(1.0).to(torch.float8_e4m3fn)])
@pytest.mark.parametrize("name", ["fp8-matrix", "float-channel"])
def test_a_matrix_that_is_missing_or_no_matrix_is_refused_by_name(
    name: str, broken: Tensor | None, tmp_path: Path
) -> None:
    quantized, _ = write(CASES[name], tmp_path)

    def spoil(stored: Parts) -> None:
        del stored[f"{Q_PROJ}.weight"]
        stored.update({} if broken is None else {f"{Q_PROJ}.weight": broken})

    change(quantized, spoil)
    checkpoint = open_checkpoint(str(quantized))
    with pytest.raises(ModelLoadError, match=r"q_proj\.weight"):
        weight_bytes(checkpoint, torch.bfloat16, float8=True)
    with pytest.raises(ModelLoadError, match=r"q_proj\.weight"):
        load_weights(checkpoint, torch.float32, CPU)


def memory(weight: QuantizedWeight) -> int:
    zeros = 0 if weight.zeros is None else weight.zeros.numel()
    return weight.values.numel() * weight.bits // 8 + 4 * weight.scales.numel() + zeros


def write_exact(quantized: Path, plain: Path) -> Path:
    """Write the plain checkpoint anew with the quantized one's matrices in float32, not rounded."""
    readers: dict[str, Any] = weight_readers(open_checkpoint(str(quantized)))

    def widen(stored: Parts) -> None:
        for name in [name for name in stored if name.endswith("_proj.weight")]:
            matrix = readers[name].quantized() or readers[name].float8()
            weight = matrix.rows(slice(0, matrix.form.shape[0]))
            stored[name] = replace(weight, dtype=torch.float32).dequantize()

    change(plain, widen)
    return plain


def tokens(folder: Path, place: Place, **settings: Any) -> list[list[int]]:
    """Return the greedy answers of a checkpoint to a few prompts that run together."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (3, 20, 9)]
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    config = EngineConfig(
        model=str(folder), threads=1, max_num_seqs=4, kv_cache_memory_bytes=1 << 20, **{**place.settings(), **settings}
    )
    core = EngineCore(Executor(config))
    run = driving.run(core, [EngineRequest(row, prompt, [], sampling) for row, prompt in enumerate(prompts)])
    assert not any(answer.error for answer in run.answers.values())
    return [run.answers[row].tokens for row in range(len(prompts))]


@pytest.mark.parametrize("place", [interpreted, on_gpu])
@pytest.mark.parametrize("name", ["packed-4-32-asymmetric", "gptq-4-rows", "int-channel", "float-block"])
def test_answers_are_those_of_the_dequantized_model(name: str, place: Place, tmp_path: Path) -> None:
    quantized, plain = write(CASES[name], tmp_path)
    assert tokens(quantized, place) == tokens(write_exact(quantized, plain), TORCH)


@pytest.mark.parametrize("place", [interpreted, on_gpu])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_in_float8_answers(dtype: str, place: Place, tmp_path: Path) -> None:
    quantized, _ = write(CASES["float-channel"], tmp_path)
    assert [len(some) for some in tokens(quantized, place, dtype=dtype)] == [6, 6, 6]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["packed-4-32-asymmetric", "packed-8-rows", "float-channel", "float-channel-weights-only", "float-block"]
)
def test_16_bits_in_graphs_and_outside(name: str, tmp_path: Path) -> None:
    quantized, _ = write(CASES[name], tmp_path)
    assert [len(some) for some in tokens(quantized, GPU, dtype="bfloat16")] == [6, 6, 6]
    assert [len(some) for some in tokens(quantized, GPU, dtype="float16", enforce_eager=True)] == [6, 6, 6]
