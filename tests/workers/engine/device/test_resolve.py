"""What a replica runs with, of what was asked for."""

from dataclasses import asdict, replace

import msgspec
import pytest
import torch

from tests.workers.engine.driving import resolved
from tests.workers.engine.models.tiny_pooling_models import pooling_folder
from tests.workers.engine.native.available import missing_native, needs_native
from tests.workers.engine.places import Place, on_gpu
from workers.engine.checkpoint import dtypes
from workers.engine.checkpoint.dtypes import cpu_dtype
from workers.engine.checkpoint.model_checkpoint import open_checkpoint
from workers.engine.device.resolve import resolve
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.errors import ModelLoadError
from workers.engine.messages.ranks import RankSetup


def test_what_is_left_open_is_decided_for_the_device_and_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    config = resolved("llama", device="cpu")
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.depth, config.threads) == (64, 1024, 0, 3)
    assert config.live_step_ms == 150
    assert (config.max_model_len, config.may_shorten) == (256, True)
    assert config.dtype in ("bfloat16", "float32")
    assert config.attention_backend == ("torch" if missing_native() else "cpu")
    assert resolved("llama", device="cpu", dtype="float16").attention_backend == "torch"
    assert resolved("llama", device="cpu", dtype="float16").dtype == "float16"


def test_a_cache_of_8_bits_is_for_models_that_generate() -> None:
    config = resolved("llama", device="cpu", attention_backend="triton", kv_cache_dtype="fp8")
    assert config.cache_dtype == "float8_e4m3fn"
    encoder = EngineConfig(model=str(pooling_folder("bert")), device="cpu", kv_cache_dtype="fp8")
    with pytest.raises(ModelLoadError, match=r"--kv-cache-dtype fp8 is for models that generate: .*; leave it at auto"):
        resolve(encoder, "cpu", open_checkpoint(encoder.model).config)


@needs_native
def test_a_cache_is_as_exact_as_the_checkpoint_or_as_was_asked_for() -> None:
    name = resolved("llama", device="cpu").model
    model = open_checkpoint(name).config

    def cache(stored: str, **asked: str) -> str:
        config = EngineConfig(model=name, device="cpu", **asked)  # type: ignore[arg-type]
        return resolve(config, "cpu", replace(model, dtype=stored)).cache_dtype

    own = str(cpu_dtype()).removeprefix("torch.")
    assert (cache("bfloat16"), cache("float16"), cache("float32")) == ("bfloat16", "float32", "float32")
    assert cache("bfloat16", dtype="float32") == "float32"
    assert cache("float32", dtype="bfloat16") == "bfloat16"
    assert cache("bfloat16", attention_backend="torch") == own


@pytest.mark.parametrize("fast", [False, True])
def test_the_dtype_is_the_fastest_that_is_as_precise_as_the_checkpoint(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtypes, "_fast_bfloat16", lambda: fast)
    model = open_checkpoint(resolved("llama", device="cpu").model).config

    def chosen(stored: str | None) -> torch.dtype:
        return dtypes.resolve_dtype("auto", replace(model, dtype=stored), torch.device("cpu"))

    assert chosen("bfloat16") == (torch.bfloat16 if fast else torch.float32)
    assert [chosen(stored) for stored in ("float16", "float32", None)] == [torch.float32] * 3


@pytest.mark.parametrize("fast", [False, True])
def test_a_dtype_that_is_slow_on_the_processor_is_warned_of(
    fast: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dtypes, "_fast_bfloat16", lambda: fast)
    for dtype in ("auto", "float32", *(["bfloat16"] if fast else [])):
        resolved("llama", device="cpu", dtype=dtype)
    assert not caplog.records
    for dtype in ("float16", *([] if fast else ["bfloat16"])):
        resolved("llama", device="cpu", dtype=dtype)
        assert f"--dtype {dtype} is slow on this CPU" in caplog.text


@pytest.mark.parametrize(("asked", "found"), [(None, 128), (5, 5)])
def test_on_a_cpu_many_whole_texts_run_at_once(asked: int | None, found: int) -> None:
    config = EngineConfig(model=str(pooling_folder("bert")), device="cpu", max_num_seqs=asked)
    assert resolve(config, "cpu", open_checkpoint(config.model).config).max_num_seqs == found


@pytest.mark.parametrize("place", [on_gpu])
def test_on_a_gpu_steps_are_larger_and_launched_ahead(place: Place) -> None:
    config = resolved("llama", device=place.device)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.depth) == (1024, 16384, 1)
    assert config.live_step_ms == 50


def test_what_was_asked_for_stays() -> None:
    asked = {
        "max_num_seqs": 5,
        "max_num_batched_tokens": 6,
        "max_model_len": 8,
        "block_size": 7,
        "depth": 1,
        "threads": 8,
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "triton",
        "enforce_eager": True,
    }
    config = resolved("llama", **asked)
    assert not config.may_shorten
    assert {name: value for name, value in asdict(config).items() if name in asked} == asked


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="unknown attention backend 'flash'"):
        resolved("llama", device="cpu", attention_backend="flash")
    with pytest.raises(ValueError, match="dtype must be auto or float32 or bfloat16 or float16, got 'int3'"):
        resolved("llama", device="cpu", dtype="int3")


def test_it_travels_to_the_other_ranks() -> None:
    setup = RankSetup(resolved("llama", device="cpu"), 1, 7000)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(setup), type=RankSetup).config == setup.config
