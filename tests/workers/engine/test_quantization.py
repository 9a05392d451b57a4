"""Models with their matrices in int8, of each kind of code that runs them: what they say, and what
is refused.
"""

from typing import Any, cast

import pytest
import torch

from tests.workers.engine import driving
from tests.workers.engine.checkpoint.test_loading import logits
from tests.workers.engine.device.test_parallel import weight_of
from tests.workers.engine.models.tiny_models import VOCAB, folder
from tests.workers.engine.models.tiny_pooling_models import pooling_folder
from tests.workers.engine.native.available import needs_native
from tests.workers.engine.native.rounding import RoundingOps
from tests.workers.engine.places import CPU, Place, at_all
from tests.workers.engine.pooling import EMBED, pooling_requests, run_pooling, start
from workers.engine.checkpoint.decoder_loader import load_weights
from workers.engine.checkpoint.model_checkpoint import open_checkpoint, shard_checkpoint
from workers.engine.checkpoint.pooling_loader import load_pooling_model
from workers.engine.checkpoint.weight_size import weight_bytes
from workers.engine.core import EngineCore
from workers.engine.device.executor import Executor
from workers.engine.layers.base import Ops
from workers.engine.layers.int8_ops import Int8Ops
from workers.engine.layers.ops import TorchOps
from workers.engine.layers.parallel import Parallel
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, SamplingParams
from workers.engine.models.base import DecoderModel
from workers.engine.native.ops import NativeOps

INT8 = "int8"
CPU_DEVICE = torch.device("cpu")


def load(name: str, ops: Ops, impl: str = "auto") -> DecoderModel:
    return load_weights(open_checkpoint(str(folder(name)), impl), torch.float32, CPU_DEVICE, 64, ops)


def divergence(name: str, ops: Ops, impl: str = "auto") -> float:
    """Mean Kullback-Leibler divergence of next tokens in int8 from those in float32."""
    exact, quantized = (logits(load(name, one, impl)).log_softmax(-1) for one in (ops, Int8Ops(ops)))
    return float((exact.exp() * (exact - quantized)).sum(-1).mean())


@pytest.mark.parametrize(
    ("name", "impl"),
    [("gpt2", "auto"), ("llama", "auto"), ("qwen2", "auto"), ("cwm", "auto"), ("mistral", "transformers")],
)
def test_next_tokens_are_about_those_of_float32(name: str, impl: str) -> None:
    """The tiny models are drawn wide, and so more sensitive than real ones."""
    found = divergence(name, TorchOps(), impl)
    assert 1e-6 < found < 0.05


@needs_native
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "cwm"])
def test_the_cpu_kernels_are_nearer_to_torch_than_int8_is_to_float32(name: str) -> None:
    """To torch with inputs that are rounded as the kernels round them."""
    plain, native = (logits(load(name, Int8Ops(ops))) for ops in (RoundingOps(), NativeOps()))
    exact = logits(load(name, TorchOps()))
    assert (plain - native).norm() < 0.1 * (plain - exact).norm()


@needs_native
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_projection_of_a_decoder_is_in_int8(name: str) -> None:
    model: Any = load(name, Int8Ops(NativeOps()))
    parts = [
        part
        for layer in model.stack.layers
        for part in (layer.attention.qkv, layer.attention.output, layer.mlp.up, layer.mlp.down)
    ]
    assert {part.stored for part in parts} == {torch.int8}


@needs_native
@pytest.mark.parametrize("name", ["bert", "modernbert", "distilbert"])
def test_every_projection_of_an_encoder_is_in_int8(name: str) -> None:
    checkpoint = open_checkpoint(str(pooling_folder(name)), task="embed")
    model: Any = load_pooling_model(checkpoint, torch.float32, CPU_DEVICE, 64, Int8Ops(NativeOps()))
    parts = [
        part
        for layer in model._trunk.stack.layers
        for part in (layer.attention.qkv, layer.attention.output, layer.mlp.up, layer.mlp.down)
    ]
    assert {part.stored for part in parts} == {torch.int8}


@needs_native
def test_a_step_in_bfloat16() -> None:
    """By the kernels, whether or not the processor has instructions for bfloat16."""
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    request = EngineRequest(0, list(range(30)), [], sampling)
    settings = {"attention_backend": "cpu", "device": "cpu", "dtype": "bfloat16", "quantization": INT8}
    config = EngineConfig(model=str(folder("llama")), threads=1, **settings)  # type: ignore[arg-type]
    core = EngineCore(Executor(config))
    assert driving.run(core, [request]).answers[0].error == ""


@at_all
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_answers_do_not_depend_on_what_runs_beside_them(name: str, place: Place) -> None:
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (3, 40, 17, 80, 1, 30)]
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    requests = [EngineRequest(row, prompt, [], sampling) for row, prompt in enumerate(prompts)]
    together = driving.run(
        driving.make_core(name, place=place, quantization=INT8, max_num_seqs=8, max_num_batched_tokens=48), requests
    )
    alone = driving.make_core(name, place=place, quantization=INT8, max_num_seqs=8)
    for request in requests:
        one = driving.run(alone, [EngineRequest(9, request.prompt_token_ids, [], sampling)])
        assert one.answers[9].tokens == together.answers[request.request_id].tokens


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3", "electra", "t5"])
def test_embeddings_point_about_where_those_of_float32_do(name: str) -> None:
    """By code of the engine's own, and the last two by transformers' classes."""
    requests = pooling_requests(EMBED, name)
    exact, quantized = (
        run_pooling(start(pooling_folder(name), CPU, task="embed", quantization=kind), requests)
        for kind in (None, INT8)
    )
    for one, other in zip(exact, quantized, strict=True):
        assert 0.99 < torch.cosine_similarity(one, other, dim=0) < 1 - 1e-7


def test_ranks_have_their_part_of_the_whole_model() -> None:
    """Of matrices that are cut by columns each rank has scales of its own."""
    whole, exact = (load("llama", ops) for ops in (Int8Ops(TorchOps()), TorchOps()))
    shared = shard_checkpoint(open_checkpoint(str(folder("llama"))), 2)
    ranks: list[Any] = [
        load_weights(shared, torch.float32, CPU_DEVICE, 64, Int8Ops(TorchOps()), Parallel(rank, 2)) for rank in range(2)
    ]
    heads = torch.cat([weight_of(model, model.lm_head.logits) for model in ranks])
    assert heads[:VOCAB].equal(weight_of(whole, whole.lm_head.logits))
    for layer in range(3):
        parts = [model.stack.layers[layer].attention.output._own(torch.eye(32)).T for model in ranks]
        plain = weight_of(exact, cast("Any", exact).stack.layers[layer].attention.output)
        for part, columns in zip(parts, plain.chunk(2, 1), strict=True):
            assert 0 < (part - columns).abs().max() <= 0.501 / 127 * columns.abs().max()


def test_a_core_reports_its_quantization() -> None:
    assert driving.make_core("llama", quantization=INT8).ready.quantization == INT8
    assert driving.make_core("llama").ready.quantization == ""


@pytest.mark.parametrize(("impl", "share"), [("auto", 4), ("transformers", 1)])
def test_weights_are_planned_as_what_they_become(impl: str, share: int) -> None:
    checkpoint = open_checkpoint(str(folder("llama")), impl)
    whole = weight_bytes(checkpoint, torch.float32)
    assert weight_bytes(checkpoint, torch.float32, quantization=INT8) == pytest.approx(whole / share, rel=0.1)


def test_a_class_that_stays_mostly_as_it_is_logs_that(caplog: pytest.LogCaptureFixture) -> None:
    """The projections of transformers' GPT-2 are modules of its own; but for the head."""
    load("gpt2", Int8Ops(TorchOps()), "transformers")
    (record,) = caplog.records
    assert record.getMessage().startswith("--quantization int8: 10240 of the ")


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="quantization must be int8, got 'int3'"):
        EngineConfig(model="m", quantization="int3")
