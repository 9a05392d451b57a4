"""Tensor parallelism: two ranks say the same as one, and every rank holds the part of the model
that it should.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.processes import command_line
from tests.workers.engine.cache_sizes import block_bytes
from tests.workers.engine.driving import BLOCK_SIZE, Run, run
from tests.workers.engine.guides.texts import TOKENS, bytes_of, choice, regex
from tests.workers.engine.models.tiny_models import MODELS, VOCAB, TinyModel, make
from workers.engine.checkpoint.decoder_loader import load_weights
from workers.engine.checkpoint.model_checkpoint import open_checkpoint, shard_checkpoint
from workers.engine.core import EngineCore
from workers.engine.device.executor import Executor
from workers.engine.layers.base import Projection
from workers.engine.layers.parallel import Parallel
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, OutputGuide, SamplingParams, TokenLogprobs
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models import llama
from workers.engine.models.base import DecoderModel
from workers.engine.models.config import ModelConfig, shard_model
from workers.engine.models.decoder import RotaryDecoder

GPT2, LLAMA = MODELS["gpt2"].settings, MODELS["llama"].settings
# A vocabulary that two cannot share equally, nor a MLP of 72
SMALL = {"vocab_size": VOCAB + 1, "num_hidden_layers": 2}
SHARED = {
    "gpt2-12-heads": TinyModel(
        1, 0.3, "GPT2Config", GPT2 | SMALL | {"n_embd": 48, "n_head": 12, "n_layer": 2, "n_inner": 72}
    ),
    "llama-2-kv-heads": TinyModel(2, 0.22, "LlamaConfig", LLAMA | SMALL),
    "llama-1-kv-head-tied-biased": TinyModel(
        22,
        0.3,
        "LlamaConfig",
        LLAMA
        | SMALL
        | {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "gpt-neox-fused-heads": TinyModel(3, 0.3, "GPTNeoXConfig", MODELS["gpt-neox"].settings | SMALL),
    "glm4-fused-gates": TinyModel(1, 0.22, "Glm4Config", MODELS["glm4"].settings | SMALL),
    "stablelm-own-head-norms": TinyModel(1, 0.22, "StableLmConfig", MODELS["stablelm-head-norms"].settings | SMALL),
}
NUM_BLOCKS = 14
TOLERANCE = 1e-4


@contextmanager
def core(folder: Path, ranks: int, **settings: Any) -> Iterator[EngineCore]:
    """One whose cache is too small for all of `requests` at once, whichever the number of its
    ranks.
    """
    whole = open_checkpoint(str(folder))
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        threads=1,
        tensor_parallel_size=ranks,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=NUM_BLOCKS
        * block_bytes(shard_checkpoint(whole, ranks).config, torch.float32, BLOCK_SIZE),
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=40,
        depth=1,
        **({"device": "cpu"} | settings),
    )
    executor = Executor(config)
    try:
        yield EngineCore(executor)
    finally:
        executor.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def requests(first_id: int) -> list[EngineRequest]:
    """Greedy and drawn ones of many lengths, which ask for log probabilities."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (1, 60, 3, 40, 17, 33)]
    return [
        EngineRequest(
            first_id + number,
            prompt,
            [],
            SamplingParams(
                24,
                temperature=number % 2 * 0.9,
                top_p=0.9,
                seed=number,
                logprobs=2,
                prompt_logprobs=1 if number == 3 else -1,
            ),
        )
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "llama-2-kv-heads" else pytest.mark.proof) for name in SHARED]
)
def test_two_ranks_answer_as_one_does(name: str, tmp_path: Path) -> None:
    make(SHARED[name]).save_pretrained(tmp_path)
    runs: dict[int, list[Run]] = {}
    for ranks in (1, 2):
        with core(tmp_path, ranks) as one:
            runs[ranks] = [run(one, requests(first_id)) for first_id in (0, 100)]
    for alone, together in zip(*runs.values(), strict=True):
        assert (together.preemptions, together.prefix_hit_tokens) == (alone.preemptions, alone.prefix_hit_tokens)
        for number, answer in alone.answers.items():
            shared = together.answers[number]
            assert (shared.tokens, shared.finish) == (answer.tokens, answer.finish)
            assert_close(shared.logprobs, answer.logprobs)
            assert_close(shared.prompt_logprobs or [], answer.prompt_logprobs or [])
    assert runs[2][0].preemptions > 0
    assert runs[2][1].prefix_hit_tokens > runs[2][0].prefix_hit_tokens


@pytest.mark.usefixtures("crowded")
@pytest.mark.proof
def test_two_ranks_draw_under_the_same_masks(tmp_path: Path) -> None:
    make(SHARED["llama-2-kv-heads"]).save_pretrained(tmp_path)
    some = requests(0)
    for one, grammar in zip(
        some, [regex("[a-z]{30}"), choice("red", "green"), regex("[0-9]{2,9}(é|ed)")], strict=False
    ):
        one.guide = OutputGuide(grammar)
    some[3].guide = OutputGuide(choice("blue"), "</think>", in_reasoning=True, reasoning_budget=3)
    answers = []
    for ranks in (1, 2):
        with core(tmp_path, ranks) as one_core:
            one_core.set_vocabulary(TOKENS)
            answers.append(run(one_core, some).answers)
    for number, alone in answers[0].items():
        assert (answers[1][number].tokens, answers[1][number].finish) == (alone.tokens, alone.finish)
    assert bytes_of(answers[1][3].tokens).endswith(b"</think>blue")


@pytest.mark.proof
def test_two_ranks_answer_as_one_does_by_the_kernels_of_a_gpu(tmp_path: Path) -> None:
    make(SHARED["llama-1-kv-head-tied-biased"]).save_pretrained(tmp_path)
    tokens = []
    for ranks in (1, 2):
        with core(tmp_path, ranks, attention_backend="triton") as one:
            short = [
                EngineRequest(number, [5 + number, 7, 9], [], SamplingParams(6, temperature=0.0)) for number in range(3)
            ]
            tokens.append([answer.tokens for answer in run(one, short).answers.values()])
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", SHARED)
def test_two_gpus_answer_as_one_does(name: str, tmp_path: Path) -> None:
    """Through CUDA graphs and NCCL, each run on GPUs of its own choice."""
    make(SHARED[name]).save_pretrained(tmp_path)
    tokens = []
    for ranks in (1, 2):
        with core(tmp_path, ranks, device="cuda", device_lock_folder=str(tmp_path / "locks")) as one:
            tokens.append([answer.tokens for answer in run(one, requests(0)).answers.values()])
    assert tokens[0] == tokens[1]


def assert_close(actual: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert [item.token_ids for item in actual] == [item.token_ids for item in expected]
    if actual:
        first, second = (torch.tensor([item.logprobs for item in items]) for items in (actual, expected))
        assert (first - second).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("total", "size"), [(161, 2), (160, 2), (50257, 8), (512, 3), (5, 4), (3072, 12), (1, 3), (151936, 7)]
)
def test_parts_make_up_the_whole(total: int, size: int) -> None:
    parts = [Parallel(rank, size).part(total) for rank in range(size)]
    assert [number for part in parts for number in range(total)[part.where]] == list(range(total))
    longest = Parallel(0, size).part_size(total)
    assert max(part.length for part in parts) == longest
    assert longest - total / size < 16


def llama_config(heads: int, kv_heads: int) -> ModelConfig:
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        **LLAMA,
        "hidden_size": 16 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return llama.config(raw)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "kept"), [(4, 2, 2, 1), (4, 1, 2, 1), (8, 2, 4, 1), (8, 4, 2, 2), (12, 12, 6, 2)]
)
def test_query_heads_and_their_keys_are_on_the_same_rank(heads: int, kv_heads: int, size: int, kept: int) -> None:
    model = shard_model(llama_config(heads, kv_heads), size)
    layer = model.layers[0]
    assert (layer.heads, layer.kv_heads) == (heads // size, kept)
    for rank in range(size):
        queries = Parallel(rank, size).shard(layer.heads)
        keys = Parallel(rank, size).shard(layer.kv_heads, layer.kv_copies)
        assert (queries.total, keys.total) == (heads, kv_heads)
        needed = {query * kv_heads // heads for query in range(heads)[queries.where]}
        assert needed == set(range(kv_heads)[keys.where])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "fit"),
    [(12, 12, 5, "1, 2, 3, 4, 6, 12"), (12, 3, 2, "1, 3, 6, 12"), (4, 2, 8, "1, 2, 4")],
)
def test_a_size_that_does_not_fit_is_refused_with_those_that_do(heads: int, kv_heads: int, size: int, fit: str) -> None:
    with pytest.raises(ModelLoadError) as refusal:
        shard_model(llama_config(heads, kv_heads), size)
    assert str(refusal.value).endswith(f"; tensor parallel sizes that fit: {fit}")


def test_a_model_that_cannot_be_shared_is_refused_before_any_rank_is_started(tmp_path: Path) -> None:
    make(SHARED["llama-2-kv-heads"]).save_pretrained(tmp_path)
    before = page_faults_of_ended_children()
    with pytest.raises(ModelLoadError, match="3 ranks cannot share"):
        Executor(EngineConfig(model=str(tmp_path), device="cpu", tensor_parallel_size=3))
    assert page_faults_of_ended_children() == before
    assert not ranks_under_way()


def test_a_refusal_with_ranks_under_way_leaves_none(tmp_path: Path) -> None:
    make(SHARED["llama-2-kv-heads"]).save_pretrained(tmp_path)
    before = page_faults_of_ended_children()
    settings = {"device": "cpu", "attention_backend": "cpu", "dtype": "float16"}
    with pytest.raises(ModelLoadError, match="the cpu backend cannot be had"):
        Executor(EngineConfig(model=str(tmp_path), tensor_parallel_size=2, **settings))
    assert page_faults_of_ended_children() > before
    assert not ranks_under_way()


def ranks_under_way() -> list[int]:
    """Of this process, which has other children, such as the Redis of the whole run."""
    return [child.pid for child in psutil.Process().children() if "rank_process" in command_line(child.pid)]


def page_faults_of_ended_children() -> int:
    """More after every child that was started and waited for, however short its life."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def test_ranks_that_share_a_key_value_head_both_have_it(tmp_path: Path) -> None:
    make(TinyModel(3, 0.2, "LlamaConfig", LLAMA | SMALL)).save_pretrained(tmp_path)
    whole = open_checkpoint(str(tmp_path))
    device = torch.device("cpu")
    full = load_weights(whole, torch.float32, device)
    shared = shard_checkpoint(whole, 4)
    ranks = [load_weights(shared, torch.float32, device, parallel=Parallel(rank, 4)) for rank in range(4)]
    assert isinstance(full, RotaryDecoder)
    queries, keys, values = weight_of(full, full.stack.layers[1].attention.qkv).split([64, 32, 32])
    for rank, model in enumerate(ranks):
        assert isinstance(model, RotaryDecoder)
        q, k, v = weight_of(model, model.stack.layers[1].attention.qkv).split([16, 16, 16])
        assert q.equal(queries[16 * rank : 16 * rank + 16])
        assert k.equal(keys[rank // 2 * 16 : rank // 2 * 16 + 16])
        assert v.equal(values[rank // 2 * 16 : rank // 2 * 16 + 16])
    heads = torch.cat([weight_of(model, model.lm_head.logits) for model in ranks])
    assert heads[: VOCAB + 1].equal(weight_of(full, full.lm_head.logits))


def weight_of(model: DecoderModel, projection: Projection) -> Tensor:
    """[out, hidden] of one without a bias."""
    return projection(torch.eye(model.config.hidden_size)).T
