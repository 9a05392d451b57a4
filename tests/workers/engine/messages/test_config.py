"""What the engine is configured with, and the sampling parameters that may reach it."""

from typing import Any

import msgspec
import pytest

from workers.engine.messages import config as module
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import (
    AddRequests,
    EngineRequest,
    FromCore,
    SamplingParams,
    Stats,
    StepOutput,
    ToCore,
    TokenLogprobs,
)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"block_size": -1}, "block_size must be at least 1"),
        ({"depth": 2}, "depth must be 0 or 1, got 2"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"model_impl": "mine"}, "model_impl must be auto or own or transformers, got 'mine'"),
    ],
)
def test_a_value_out_of_range_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EngineConfig(model="m", **settings)


def test_threads_follow_the_containers_quota(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(module, "_CGROUP_CPU_MAX", tmp_path / "cpu.max")
    unlimited = EngineConfig(model="m").compute_threads()
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert EngineConfig(model="m").compute_threads() == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert EngineConfig(model="m").compute_threads() == unlimited


@pytest.mark.parametrize(("ranks", "threads"), [(1, 6), (2, 3), (4, 1), (8, 1)])
def test_ranks_take_equal_shares_of_the_threads(ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert EngineConfig(model="m", tensor_parallel_size=ranks).compute_threads() == threads
    assert EngineConfig(model="m", tensor_parallel_size=ranks, threads=5).compute_threads() == 5


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
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**64},
        {"choice": -1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": float("nan")},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"min_tokens": -1},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((1, float("nan")),)},
        {"bad_words": ((),)},
        {"bad_words": ((1, -1),)},
        {"logprobs": -2},
        {"prompt_logprobs": -2},
    ],
)
def test_a_sampling_parameter_out_of_range_never_reaches_the_core(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        SamplingParams(**{"max_tokens": 1, **settings})


def test_what_a_request_asks_for_travels_as_msgpack() -> None:
    sampling = SamplingParams(
        3,
        min_p=0.1,
        repetition_penalty=1.2,
        min_tokens=2,
        logit_bias=((5, -1.5),),
        bad_words=((1,), (2, 3)),
        logprobs=0,
        prompt_logprobs=4,
    )
    added = AddRequests([EngineRequest(1, [1, 2], [3], sampling, live=True, priority=-7)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(added), type=ToCore) == added
    item = TokenLogprobs([7, 7, 9], [-0.5, -0.5, -3.0], 1)
    output = StepOutput(
        1, [1], [1], [7], [0], [-1], [0], Stats(), logprobs={1: [item]}, prompt_logprobs={1: [item, item]}
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=FromCore) == output
