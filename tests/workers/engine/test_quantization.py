"""Models with their matrices in int8, of each kind of code that runs them: what they say, and what
is refused.
"""

import pytest
import torch

from tests.workers.engine import driving
from tests.workers.engine.device.test_loader import logits
from tests.workers.engine.device.test_parallel import weight_of
from tests.workers.engine.models.tiny_models import VOCAB, folder
from tests.workers.engine.models.tiny_pooling_models import pooling_folder
from tests.workers.engine.native.available import needs_native
from tests.workers.engine.places import CPU, Place, at_all
from tests.workers.engine.pooling import EMBED, pooling_requests, run_pooling, start
from workers.engine.backends.registry import find_backend
from workers.engine.device.loader import load_weights, open_checkpoint, shard_checkpoint, weight_bytes
from workers.engine.layers.base import Ops
from workers.engine.layers.ops import TorchOps
from workers.engine.layers.parallel import Parallel
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, SamplingParams
from workers.engine.models.base import DecoderModel

INT8 = "int8"
CPU_DEVICE = torch.device("cpu")


def load(name: str, ops: Ops, quantization: str | None = None, impl: str = "auto") -> DecoderModel:
    checkpoint = open_checkpoint(str(folder(name)), impl)
    return load_weights(checkpoint, torch.float32, CPU_DEVICE, 64, ops, quantization=quantization)


def divergence(name: str, ops: Ops, impl: str = "auto") -> float:
    """Mean Kullback-Leibler divergence of next tokens in int8 from those in float32."""
    exact, narrow = (logits(load(name, ops, kind, impl)).log_softmax(-1) for kind in (None, INT8))
    return float((exact.exp() * (exact - narrow)).sum(-1).mean())


@pytest.mark.parametrize(
    ("name", "impl"),
    [("gpt2", "auto"), ("llama", "auto"), ("qwen2", "auto"), ("granite", "auto"), ("mistral", "transformers")],
)
def test_next_tokens_are_about_those_of_float32(name: str, impl: str) -> None:
    """The tiny models are drawn wide, and so more sensitive than real ones."""
    found = divergence(name, TorchOps(), impl)
    assert 1e-6 < found < 0.05


@needs_native
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "granite"])
def test_the_cpu_s_kernels_say_what_torch_says(name: str) -> None:
    plain, native = (logits(load(name, find_backend(kind).ops, INT8)) for kind in ("torch", "cpu"))
    assert (plain - native).abs().max() < 0.02 * plain.abs().max()


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


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3", "electra"])
def test_embeddings_point_about_where_those_of_float32_do(name: str) -> None:
    """By code of the engine's own, and the last by transformers' class."""
    requests = pooling_requests(EMBED, name)
    exact, narrow = (
        run_pooling(start(pooling_folder(name), CPU, task="embed", quantization=kind), requests)
        for kind in (None, INT8)
    )
    for one, other in zip(exact, narrow, strict=True):
        assert 0.99 < torch.cosine_similarity(one, other, dim=0) < 1 - 1e-7


def test_ranks_have_the_rows_of_the_whole_model() -> None:
    whole = load("llama", TorchOps(), INT8)
    shared = shard_checkpoint(open_checkpoint(str(folder("llama"))), 2)
    ranks = [
        load_weights(shared, torch.float32, CPU_DEVICE, 64, parallel=Parallel(rank, 2), quantization=INT8)
        for rank in range(2)
    ]
    heads = torch.cat([weight_of(model, model.lm_head.logits) for model in ranks])
    assert heads[:VOCAB].equal(weight_of(whole, whole.lm_head.logits))


def test_it_is_said_what_a_core_runs_with() -> None:
    assert driving.make_core("llama", quantization=INT8).ready.quantization == INT8
    assert driving.make_core("llama").ready.quantization == ""


def test_the_weights_are_counted_as_what_they_become() -> None:
    checkpoint = open_checkpoint(str(folder("llama")))
    whole = weight_bytes(checkpoint, torch.float32)
    table = checkpoint.config.vocab_size * checkpoint.config.hidden_size
    assert weight_bytes(checkpoint, torch.float32, quantization=INT8) == whole // 4 + 3 * table
    tied = open_checkpoint(str(folder("qwen2")))
    assert weight_bytes(tied, torch.float32, quantization=INT8) == weight_bytes(tied, torch.float32) // 4


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="quantization must be int8, got 'int3'"):
        EngineConfig(model="m", quantization="int3")
