"""What the machine, the container and a GPU leave of memory, and the step that is done to see
it.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.workers.engine.cache_sizes import block_bytes
from tests.workers.engine.driving import resolved
from tests.workers.engine.models.tiny_models import folder
from tests.workers.engine.places import CPU, Place, interpreted, on_gpu
from workers.engine.backends.registry import find_backend
from workers.engine.checkpoint.decoder_loader import load_weights
from workers.engine.checkpoint.model_checkpoint import open_checkpoint
from workers.engine.device.cache_plan import plan_cache
from workers.engine.device.executor import Executor
from workers.engine.device.memory import GpuMemory, _container, _machine, available_memory, gib
from workers.engine.device.memory_profiling import largest_step, profile_memory
from workers.engine.device.rank import _refusing
from workers.engine.layers.base import AttentionPattern
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.errors import ModelLoadError
from workers.engine.messages.resolved_config import ResolvedConfig


def test_this_machine_says_something() -> None:
    available = available_memory()
    assert available is not None
    assert available > 1 << 20


def test_what_the_kernel_calls_available_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       100 kB\nMemFree:          1 kB\nMemAvailable:    40 kB\n")
    assert _machine(meminfo) == 40 * 1024
    assert _machine(tmp_path / "absent") is None


def test_a_containers_limit_leaves_what_it_does_not_use_and_files_that_can_go(tmp_path: Path) -> None:
    assert _container(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert _container(tmp_path) == 300
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert _container(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert _container(tmp_path) is None


def test_sizes_are_shown_in_gib() -> None:
    assert gib(3 << 29) == "1.50 GiB"


GIB = 1 << 30
GPU = GpuMemory("Some GPU", 0.9, 100 * GIB, taken=3 * GIB, weights=50 * GIB, step=5 * GIB, graphs=2 * GIB)


def test_a_gpu_is_divided_up() -> None:
    assert GPU.left == 30 * GIB
    assert (
        GPU.account
        == "Some GPU has 100.00 GiB, --gpu-memory-utilization 0.9 makes 90.00 GiB of them usable; 3.00 GiB are taken"
        " already, the weights take 50.00 GiB, the largest step 5.00 GiB and CUDA graphs 2.00 GiB, which leaves"
        " 30.00 GiB"
    )
    full = GpuMemory("Some GPU", 0.5, 100 * GIB, taken=3 * GIB, weights=50 * GIB, step=5 * GIB, graphs=2 * GIB)
    assert full.left == -10 * GIB
    assert full.account.endswith("which is 10.00 GiB too much")


def config(**settings: int) -> ResolvedConfig:
    return resolved("llama", device="cpu", dtype="float32", threads=1, **settings)


def test_a_context_that_a_gpu_does_not_hold_is_refused_with_all_numbers() -> None:
    """The cache is as large as the fullest GPU of a replica allows."""
    settings = config(max_model_len=200)
    model = open_checkpoint(settings.model).config
    per_block = block_bytes(model, torch.float32, 16)
    assert plan_cache(settings, model, torch.float32, GPU.left, GPU)[1] == GPU.left // per_block
    full = GpuMemory("Some GPU", 0.6, 100 * GIB, taken=3 * GIB, weights=50 * GIB, step=5 * GIB, graphs=2 * GIB)
    need = (
        f"but a context of 200 tokens needs a KV cache of {14 * per_block} bytes, {per_block} for each block of 16"
        " tokens; "
    )
    advice = "raise --gpu-memory-utilization, or lower --max-model-len, --max-num-batched-tokens or --max-num-seqs"
    for gpu, account in ((full, full.account), (GPU, f"{GPU.account}, and another rank's GPU 0.00 GiB")):
        with pytest.raises(ModelLoadError) as caught:
            plan_cache(settings, model, torch.float32, 0, gpu)
        assert str(caught.value) == f"{account}, {need}{advice}"


def test_a_context_needs_of_a_window_no_more_than_a_request_can_read_again() -> None:
    """Beside the blocks of the layer that keeps all, at most 2 of each window of 16 tokens."""
    settings = config(max_num_seqs=1, max_num_batched_tokens=16)
    assert settings.depth == 0
    model = open_checkpoint(settings.model).config
    full = model.layers[0]
    near = replace(full, pattern=AttentionPattern(window=16))
    mixed, page = (
        replace(model, layers=(*[near] * 5, full)),
        block_bytes(replace(model, layers=(full,)), torch.float32, 16),
    )
    planned, pages = plan_cache(settings, mixed, torch.float32, 21 * page + 1)
    assert (planned.max_model_len, pages) == (10 * 16, 21)
    planned, pages = plan_cache(settings, replace(model, layers=(full,) * 6), torch.float32, 31 * page)
    assert (planned.max_model_len, pages) == (4 * 16, 5)
    with pytest.raises(ModelLoadError) as caught:
        plan_cache(config(max_model_len=200, max_num_batched_tokens=16), mixed, torch.float32, 21 * page)
    assert str(caught.value).startswith(
        f"a context of 200 tokens needs a KV cache of {(13 + 5 * 2 + 1) * page} bytes, in pages of {page}, but"
        f" {21 * page} are available; lower --max-model-len"
    )


def test_a_want_of_memory_at_the_start_is_one_sentence() -> None:
    with (
        pytest.raises(ModelLoadError, match=r"^it does not fit \(.*can't allocate memory.*\)$"),
        _refusing("it does not fit"),
    ):
        torch.empty(1 << 55)
    with pytest.raises(RuntimeError, match="shapes"), _refusing("it does not fit"):
        torch.zeros(2, 3) @ torch.zeros(2, 3)


@pytest.mark.parametrize(("seqs", "tokens", "length"), [(8, 64, 64), (5, 17, 8), (16, 4, 64), (1, 300, 200)])
def test_the_largest_step_fills_the_budget_as_far_as_contexts_reach(seqs: int, tokens: int, length: int) -> None:
    plan = largest_step(config(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=length))
    rows = min(seqs, tokens)
    assert len(plan.slots) == rows
    assert plan.counts.sum() == min(tokens, rows * (length - 1))
    assert plan.counts.max() < length
    assert plan.samples.all()


@pytest.mark.parametrize("place", [CPU, interpreted])
def test_the_largest_step_runs_on_a_cache_of_the_null_block_alone(place: Place) -> None:
    checkpoint = open_checkpoint(str(folder("llama")))
    backend = find_backend(place.attention_backend)
    model = load_weights(checkpoint, torch.float32, torch.device("cpu"), 64, backend.ops)
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 7, "max_model_len": 64}
    assert profile_memory(resolved("llama", **limits, **place.settings()), backend, model) == 0


@pytest.mark.parametrize("place", [on_gpu])
def test_a_gpu_is_filled_as_far_as_was_asked_and_holds_the_largest_step_then(place: Place) -> None:
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": 200}
    executor = Executor(
        EngineConfig(model=str(folder("llama")), gpu_memory_utilization=0.5, **limits, **place.settings())
    )  # type: ignore[arg-type]
    for step in range(3):
        executor.retire(executor.launch(replace(largest_step(executor.config), step=step)))
    free, total = torch.cuda.mem_get_info()
    assert 0.45 * total < total - free < 0.55 * total
    executor.close()
