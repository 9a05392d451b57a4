"""Padded decode steps: which sizes there are and when they are recorded, and that padding is seen
nowhere but in the null block.
"""

import gc
import weakref
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.engine.driving import recorded, resolved
from tests.workers.engine.models.tiny_models import folder, reference
from tests.workers.engine.places import Place, interpreted, on_gpu
from workers.engine.backends.registry import find_backend
from workers.engine.checkpoint.decoder_loader import load_weights
from workers.engine.checkpoint.model_checkpoint import open_checkpoint
from workers.engine.cuda.graphs import CudaRecorder, DecodeGraphs, GraphVariant, Work, sizes, steps_to_record
from workers.engine.device.model_runner import ModelRunner
from workers.engine.messages.core import SamplingParams
from workers.engine.messages.step import AddedRequest, NewBlocks, StepPlan
from workers.engine.models.decoder import RotaryDecoder
from workers.engine.sampling.sampler import Sampled

BLOCK, BLOCKS = 4, 24


@pytest.mark.parametrize("most", [1, 2, 3, 8, 20, 64, 100, 256, 1000, 1024])
def test_sizes_grow_by_at_most_a_quarter_once_they_are_large(most: int) -> None:
    found = sizes(most)
    assert found[0] == 1
    assert found[-1] == most
    assert found == sorted(set(found))
    assert all(after <= 2 * before for before, after in pairwise(found))
    assert all(after <= 1.25 * before for before, after in pairwise(found) if before >= 64)
    assert len(found) < 30


class Tape:
    """Says which sizes were recorded and which were done, and by what."""

    def __init__(self, most: int, room: int = 1 << 30) -> None:
        self.recorded: list[int] = []
        self.done: list[int] = []
        self._room = room
        self.graphs = DecodeGraphs(lambda _, rows: self.done.append(rows), most, self._record)

    def _record(self, work: Work) -> Work:
        if len(self.recorded) == self._room:
            raise RuntimeError("the recording went wrong") from torch.OutOfMemoryError("CUDA out of memory.")
        work()
        self.recorded.append(self.done[-1])
        return work

    def run(self, rows: int) -> int:
        self.graphs.run(GraphVariant.TOKENS, rows)
        return self.done[-1]


def test_the_largest_size_is_recorded_first_and_the_others_when_they_pay() -> None:
    tape = Tape(100)
    assert tape.run(3) == 4
    assert tape.recorded == [100, 4]
    assert tape.run(98) == 100
    assert tape.run(50) == 100  # no more than twice as many
    assert tape.run(40) == 40
    assert tape.run(2) == 4
    assert tape.recorded == [100, 4, 40]
    # Padding costs by its rows: 10 steps of 44 rows too many, one of them above, are worth 8 of 56.
    assert [tape.run(50) for _ in range(11)] == [100] * 9 + [56] * 2
    assert tape.recorded == [100, 4, 40, 56]


@pytest.mark.parametrize("most", [8, 100, 256, 1024])
def test_every_size_is_recorded_in_time_on_the_way_down(most: int) -> None:
    tape, falling = Tape(most), sizes(most)[::-1]
    tape.run(most)
    for larger, size in pairwise(falling):
        steps = steps_to_record(size, larger)
        assert [tape.run(size) for _ in range(steps)][-2:] == [larger, size][-min(steps, 2) :]
    assert tape.recorded == falling


def test_without_memory_for_another_recording_a_larger_one_does_or_none() -> None:
    tape = Tape(64, room=1)
    assert [tape.run(rows) for rows in (1, 30, 64)] == [1, 64, 64]
    assert tape.recorded == [64]
    bare = Tape(64, room=0)
    assert [bare.run(rows) for rows in (1, 30, 64)] == [1, 32, 64]


def test_any_other_failure_is_raised() -> None:
    def broken(_: Work) -> Work:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        DecodeGraphs(lambda *_: None, 8, broken).run(GraphVariant.TOKENS, 3)

    def full(_: Work) -> Work:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        DecodeGraphs(lambda *_: None, 8, full, forgiving=False).run(GraphVariant.TOKENS, 3)


class Graph:
    def __init__(self, calls: "Calls") -> None:
        self._calls = calls

    def capture_begin(self, **_: object) -> None:
        self._calls.made.append("begin")

    def capture_end(self) -> None:
        if self._calls.broken:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None: ...


class Calls:
    """Replaces the parts of `torch.cuda` that recording uses, and records the order of calls.

    Ending a recording that went wrong fails, and leaves the allocator recording, as in torch 2.11.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.alive: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.broken = False
        monkeypatch.setattr(torch, "cuda", self)
        self.memory = self

    def graph_pool_handle(self) -> str:
        return "pool"

    def current_device(self) -> int:
        return 0

    def current_stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda _: self.made.append("wait"))

    def Stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda _: None)

    def stream(self, _: Any) -> Any:
        return nullcontext()

    def empty_cache(self) -> None:
        self.made.append("empty cache")

    def CUDAGraph(self) -> Any:
        graph = Graph(self)
        self.alive.add(graph)
        return graph

    def _cuda_endAllocateToPool(self, device: int, pool: str) -> None:
        self.made.append(f"end allocation to the {pool} of {device}")


def test_a_recording_that_fails_leaves_the_others_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph lives on, what was queued of it is waited for, and the allocator records no
    longer.
    """
    calls = Calls(monkeypatch)
    record = CudaRecorder()
    room = iter([True, True, False, True, False])

    def work() -> None:
        if not next(room):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    record(work)
    assert calls.made == ["wait", "empty cache", "begin"]
    with pytest.raises(torch.OutOfMemoryError):
        record(work)
    assert calls.made[3:] == ["wait"]
    calls.broken = True
    with pytest.raises(RuntimeError, match="previous error") as failed:
        record(work)
    assert isinstance(failed.value.__context__, torch.OutOfMemoryError)
    assert calls.made[4:] == ["wait", "empty cache", "begin", "end allocation to the pool of 0"]
    del failed
    gc.collect()
    assert len(calls.alive) == 2


@pytest.mark.gpu
def test_on_a_gpu_a_recording_that_fails_leaves_the_others_whole() -> None:
    record = CudaRecorder()
    x, weight, out = (torch.randn(size, 2048, device="cuda") for size in (64, 2048, 64))

    def work() -> None:
        torch.mm(x, weight, out=out)
        if next(asked):
            torch.empty(1 << 60, dtype=torch.uint8, device="cuda")

    asked = iter([False, False, False, True])
    replay = record(work)
    with pytest.raises(torch.OutOfMemoryError):
        record(work)
    gc.collect()
    torch.cuda.empty_cache()
    others = torch.full((1 << 28,), torch.nan, device="cuda")  # where what was given back lay
    x.normal_()
    out.fill_(torch.nan)
    replay()
    torch.testing.assert_close(out, x @ weight)
    assert others.isnan().all()


def make_runner(place: Place) -> ModelRunner:
    """The path of a GPU with room for five rows; one layer, and a poisoned cache.

    No graphs yet.
    """
    config = resolved(
        "llama",
        max_num_seqs=5,
        max_num_batched_tokens=64,
        max_model_len=40,
        block_size=BLOCK,
        enforce_eager=True,
        **place.settings(),
    )
    checkpoint = open_checkpoint(str(folder("llama")))
    backend = find_backend(place.attention_backend)
    model = load_weights(checkpoint, torch.float32, torch.device(place.device), 40, backend.ops)
    assert isinstance(model, RotaryDecoder)
    model.stack.layers = model.stack.layers[:1]
    runner = ModelRunner(config, backend, model, BLOCKS)
    for cache in (layer.cache for layer in runner.layers):
        cache.fill_(torch.nan)
    return runner


def step(rows: list[tuple[int, int, int]], added: list[AddedRequest], blocks: list[NewBlocks]) -> StepPlan:
    slots, starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    return StepPlan(0, added, blocks, slots, starts, counts, np.ones(len(rows), np.int32))


GREEDY = SamplingParams(8, temperature=0.0)
DRAWN = SamplingParams(8, temperature=0.9, top_p=0.8, seed=5)
STAGED = SamplingParams(8, temperature=0.9, repetition_penalty=1.3, logprobs=2, seed=6)


def drive(runner: ModelRunner, second: SamplingParams) -> list[list[int]]:
    """Prompts of 9, 3 and 6 tokens in slots 4, 0 and 3, and four decode steps; the first request,
    which is sampled by stages, leaves after two of them, the second after three. Nothing is retired
    between.
    """
    slots, lengths = [4, 0, 3], [9, 3, 6]
    prompts = [reference("llama").prompts[1][:length] for length in lengths]
    samplings = [STAGED, second, GREEDY]
    added = [
        AddedRequest(slot, prompt, len(prompt), sampling)
        for slot, prompt, sampling in zip(slots, prompts, samplings, strict=True)
    ]
    blocks = [
        NewBlocks(slot, 0, [4 * row + 1, 4 * row + 2, 4 * row + 3, 4 * row + 4]) for row, slot in enumerate(slots)
    ]
    launched = [
        runner.launch(step([(slot, 0, length) for slot, length in zip(slots, lengths, strict=True)], added, blocks))
    ]
    for number in range(4):
        left = range(max(0, number - 1), 3)
        launched.append(runner.launch(step([(slots[row], lengths[row] + number, 1) for row in left], [], [])))
    return [runner.retire(one).tokens.tolist() for one in launched]


BOTH, HIDDEN, TOKENS = GraphVariant.BOTH, GraphVariant.HIDDEN, GraphVariant.TOKENS


@pytest.mark.proof
@pytest.mark.parametrize(
    ("second", "graphs", "staged"),
    [
        pytest.param(DRAWN, {(BOTH, 5), (TOKENS, 5), (TOKENS, 2)}, [1, 1, 1], id="one staged"),
        pytest.param(
            STAGED, {(HIDDEN, 5), (BOTH, 5), (BOTH, 2), (TOKENS, 5), (TOKENS, 1)}, [3, 3, 3, 1], id="two staged"
        ),
    ],
)
@pytest.mark.parametrize("place", [interpreted, on_gpu])
def test_padding_changes_no_token_and_nothing_in_the_cache_but_the_null_block(
    place: Place, second: SamplingParams, graphs: set[tuple[GraphVariant, int]], staged: list[int]
) -> None:
    """Only rows that need stages are sampled outside a graph, unless they are most of them."""
    plain, padded = make_runner(place), make_runner(place)
    plain._backend = SimpleNamespace(records=False)  # type: ignore[assignment]
    padded.use_graphs(CudaRecorder() if place.device == "cuda" else recorded)
    stages, rows = padded.sampler.sample, []

    def sample(logits: Tensor, *rest: Any) -> Sampled:
        rows.append(len(logits))
        return stages(logits, *rest)

    padded.sampler.sample = sample  # type: ignore[method-assign]
    assert drive(padded, second) == drive(plain, second)
    assert rows == staged
    cache, expected = padded.layers[0].cache, plain.layers[0].cache
    torch.testing.assert_close(cache[:, 1:], expected[:, 1:], rtol=0, atol=1e-5, equal_nan=True)
    assert cache[:, 13:].isnan().all()  # free blocks
    assert torch.equal(padded.inputs.tokens, plain.inputs.tokens)
    assert padded.graphs is not None
    assert set(padded.graphs._recorded) == graphs
