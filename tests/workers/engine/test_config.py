"""What the engine is configured with, and the sampling parameters that may reach it."""

from typing import Any

import msgspec
import pytest

from workers.engine import config as module
from workers.engine.config import EngineConfig
from workers.engine.messages import SamplingParams


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"block_size": -1}, "block_size must be at least 1"),
        ({"depth": 2}, "depth must be 0 or 1, got 2"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    ],
)
def test_a_value_out_of_range_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EngineConfig(model="m", **settings)


def test_auto_is_settled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    resolved = EngineConfig(model="m", device="cpu").resolve()
    assert (resolved.max_num_seqs, resolved.max_num_batched_tokens, resolved.depth, resolved.threads) == (64, 2048, 0, 3)
    assert resolved.resolve() == resolved
    assert EngineConfig(model="m", device="cuda").resolve().depth == 1


def test_what_was_asked_for_stays() -> None:
    asked = EngineConfig(model="m", device="cpu", max_num_seqs=5, max_num_batched_tokens=6, block_size=7, depth=1, threads=8)
    assert asked.resolve() == asked


def test_threads_follow_the_containers_quota(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(module, "_CGROUP_CPU_MAX", tmp_path / "cpu.max")
    unlimited = EngineConfig(model="m").compute_threads()
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert EngineConfig(model="m").compute_threads() == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert EngineConfig(model="m").compute_threads() == unlimited


def test_a_configuration_travels_as_msgpack() -> None:
    sent = EngineConfig(model="m", max_model_len=9)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineConfig) == sent


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": -1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**64},
        {"choice": -1},
    ],
)
def test_a_sampling_parameter_out_of_range_never_reaches_the_core(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        SamplingParams(**{"max_tokens": 1, **settings})
