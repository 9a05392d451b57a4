"""Settings that an executor refuses, and the KV cache that it plans."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.engine.cache_sizes import block_bytes
from tests.workers.engine.checkpoint.test_loading import edit
from tests.workers.engine.models.tiny_models import folder
from tests.workers.engine.native.available import needs_native
from workers.engine.checkpoint.model_checkpoint import open_checkpoint
from workers.engine.device.cache_plan import cpu_cache_bytes
from workers.engine.device.executor import Executor
from workers.engine.device.resolve import resolve
from workers.engine.messages.config import EngineConfig, available_cpus
from workers.engine.messages.errors import ModelLoadError


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model=str(folder("llama")), dtype="float32", device="cpu", threads=1, block_size=16, **settings)


def test_context_past_the_models_own_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="--max-model-len is 300, but the model's context is 256 tokens"):
        Executor(config(max_model_len=300))


def test_cache_too_small_for_the_asked_context_is_refused() -> None:
    per_block = block_bytes(open_checkpoint(str(folder("llama"))).config, torch.float32, 16)
    with pytest.raises(ModelLoadError, match="a context of 200 tokens needs a KV cache of"):
        Executor(config(max_model_len=200, kv_cache_memory_bytes=5 * per_block))


def test_context_is_shortened_to_the_cache_when_not_asked_for() -> None:
    per_block = block_bytes(open_checkpoint(str(folder("llama"))).config, torch.float32, 16)
    executor = Executor(config(kv_cache_memory_bytes=5 * per_block))
    assert (executor.num_pages, executor.config.max_model_len) == (5, 4 * 16)


@needs_native
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_cache_fills_what_it_was_given(dtype: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder("llama"), tmp_path / "llama"))
    edit(path / "config.json", dtype="bfloat16")
    executor = Executor(EngineConfig(model=str(path), device="cpu", dtype=dtype, kv_cache_memory_bytes=100_000))  # type: ignore[arg-type]
    size = sum(layer.cache.nbytes for layer in executor.runner.layers)
    assert 100_000 - size < size / executor.num_pages
    assert executor.runner.layers[0].cache.dtype == (torch.bfloat16 if dtype == "auto" else torch.float32)


def test_a_cache_that_the_machine_cannot_hold_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ModelLoadError,
        match=r"weights of 0\.00 GiB and a KV cache of 1048576\.00 GiB do not fit into the \d+\.\d\d GiB",
    ):
        Executor(config(kv_cache_memory_bytes=1 << 50))


def test_a_cache_without_a_configured_size_takes_a_share_of_what_the_weights_leave() -> None:
    model = open_checkpoint(config().model).config

    def size(available: int | None, **changes: int) -> int:
        settings = resolve(config(**{"max_num_seqs": 8, **changes}), "cpu", model)
        return cpu_cache_bytes(replace(settings, threads=available_cpus()), model, torch.float32, 1000, available)

    longest = (8 * model.max_model_len // 16 + 1) * block_bytes(model, torch.float32, 16)
    assert size(11_000) == 10_000 < longest
    assert size(2 << 30, max_num_seqs=1 << 40) == 1 << 30
    assert size(1 << 40) == longest
    assert size(1 << 40, max_num_seqs=1 << 40) == 409 << 30
    assert size(None) == longest
    assert size(None, max_num_seqs=1 << 40) == 1 << 30
    with pytest.raises(ModelLoadError, match=r"weights of .* do not fit"):
        size(999)


def test_replicas_that_divide_the_cpus_divide_the_memory() -> None:
    model = open_checkpoint(config().model).config

    def size(threads: int) -> int:
        settings = resolve(config(max_num_seqs=1 << 40), "cpu", model)
        return cpu_cache_bytes(replace(settings, threads=threads), model, torch.float32, 0, 1 << 40)

    cpus = available_cpus()
    assert size(1) * cpus == pytest.approx(size(cpus), abs=cpus << 30)
    assert size(4 * cpus) == size(cpus)


def test_a_cache_holds_one_request_of_the_length_that_was_asked_for() -> None:
    model = open_checkpoint(config().model).config
    model = replace(model, layers=model.layers[:1] * 300_000)
    settings = resolve(config(max_model_len=64, max_num_seqs=8), "cpu", model)
    request = (64 // 16 + 1) * block_bytes(model, torch.float32, 16)
    assert cpu_cache_bytes(settings, model, torch.float32, 0, request + 1) == request
    assert cpu_cache_bytes(settings, model, torch.float32, 0, request - 1) == request - 1


@pytest.mark.parametrize(
    ("device", "why"),
    [("gpu", "unknown device 'gpu'"), ("mps", "unknown device"), ("cuda:99", "the device is cuda:99, but")],
)
def test_a_device_that_is_not_there_is_refused(device: str, why: str) -> None:
    with pytest.raises(ModelLoadError, match=why):
        Executor(replace(config(), device=device))


@pytest.mark.parametrize(("name", "kept"), [("llama", True), ("rope-dynamic", False), ("rope-longrope", False)])
def test_prefix_caching_where_keys_depend_on_the_prompt(name: str, kept: bool) -> None:
    executor = Executor(EngineConfig(model=str(folder(name)), dtype="float32", device="cpu", threads=1))
    assert executor.config.enable_prefix_caching is kept


def test_a_window_as_long_as_the_context_is_none() -> None:
    settings = {"dtype": "float32", "device": "cpu", "threads": 1, "block_size": 16}
    for length, windows in ((24, [None]), (25, [24])):
        executor = Executor(EngineConfig(model=str(folder("mistral")), max_model_len=length, **settings))  # type: ignore[arg-type]
        assert [group.rule.window for group in executor.cache_groups.groups] == windows
        executor.close()
